"""`nemo-rod cancel RUN_DIR`: cancels the Slurm jobs of a run."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from nemo_rod.commands.arguments import Arguments

_DESCRIPTION = """\
Cancels the jobs that launcher=slurm or launcher=ray submitted for a run. The results so far stay;
the same command as before resumes the run."""


def declare(parser: Arguments) -> None:
    """Declares the arguments of `nemo-rod cancel`."""
    parser.usage, parser.description = "nemo-rod cancel RUN_DIR", _DESCRIPTION
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="folder of the run")
    parser.set_defaults(main=main)


def main(options: Namespace) -> None:
    """Cancels the jobs of all launches of the run.

    Raises:
        ValueError: the folder is not a run's, none of its jobs is in the queue, or Slurm does
            not respond, or refuses.
    """
    from nemo_rod.lab.launches import read_launch
    from nemo_rod.run.launch import queue

    alive = sorted(queue.alive(options.run_dir))
    if not alive:
        read_launch(options.run_dir)  # refuses a folder that is not a run's
        raise ValueError(f"{options.run_dir} has no job in the queue: there is nothing to cancel.")
    for cluster, short in queue.by_cluster(alive).items():  # running ones are asked to stop first
        lines = queue.ask("scancel", *cluster, *short)
        if isinstance(lines, str):
            raise ValueError(f"Slurm did not cancel jobs {', '.join(short)} ({lines}): try again.")
    print(f"cancelled {len(alive)} jobs: {', '.join(alive)}")
