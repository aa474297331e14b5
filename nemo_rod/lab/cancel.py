"""`nemo-rod status RUN_DIR --cancel`: cancels the Slurm jobs of a run."""

from __future__ import annotations

from pathlib import Path

from nemo_rod.lab.launches import read_launch
from nemo_rod.run.launch import queue


def cancel(run_dir: Path) -> None:
    """Cancels the jobs of all launches of a run; the results so far stay.

    Raises:
        ValueError: the folder is not a run's, none of its jobs is in the queue, or Slurm does
            not respond, or refuses.
    """
    alive = sorted(queue.alive(run_dir))
    if not alive:
        read_launch(run_dir)  # refuses a folder that is not a run's
        raise ValueError(f"{run_dir} has no job in the queue: there is nothing to cancel.")
    for cluster, short in queue.by_cluster(alive).items():  # running ones are asked to stop first
        lines = queue.ask("scancel", *cluster, *short)
        if isinstance(lines, str):
            raise ValueError(f"Slurm did not cancel jobs {', '.join(short)} ({lines}): try again.")
    print(f"cancelled {len(alive)} jobs: {', '.join(alive)}")
