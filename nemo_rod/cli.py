"""The command line: `nemo-rod COMMAND recipe=NAME [key=value ...]`, in Hydra's grammar."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from nemo_rod.commands import curriculum, doctor, inspect, merge, status
from nemo_rod.commands import reference_job as of_job
from nemo_rod.commands import stages as run
from nemo_rod.config import Config, config_folder
from nemo_rod.nemo_rl import cluster as nemo_rl
from nemo_rod.plan.of_recipe import plan
from nemo_rod.processes.signals import Stopped
from nemo_rod.recipe.checks import to_config

_USAGE = """nemo-rod: continued pretraining with replay on demand

  nemo-rod run recipe=toy             every stage of a recipe, skipping what is done
  nemo-rod run recipe=toy dry_run=true            what would run
  nemo-rod plan recipe=toy                        what it would cost: tokens, time, memory, disk
  nemo-rod run -m recipe=toy seed=1,2             a sweep: one run folder each

One stage at a time:
  nemo-rod prepare  recipe=NAME                   text -> blocks
  nemo-rod pretrain recipe=NAME                   the base model
  nemo-rod score    recipe=NAME                   reference losses
  nemo-rod train    recipe=NAME arm=ARM           one arm
  nemo-rod merge    recipe=NAME arm=merge_0.4     weights between base and specialist
  nemo-rod evaluate recipe=NAME                   held-out losses of every arm
  nemo-rod evaluate recipe=NAME tasks=paper       and benchmarks, through lm-eval
  nemo-rod report   recipe=NAME                   tables, figures and the page

On NeMo-RL, with a recipe in its own form (docs/nemo-rl.md):
  nemo-rod train --config RECIPE.yaml [key=value ...]
  nemo-rod score --config RECIPE.yaml rod.role=replay [key=value ...]

Without a recipe:
  nemo-rod status RUN_DIR                         what ran, where, how far it is, how it ended
  nemo-rod cancel RUN_DIR                         ends what launcher=slurm or ray submitted
  nemo-rod inspect PATH [block=ID]                what any of our files or folders holds
  nemo-rod curriculum export|verify|diff PATH ... a run's curriculum: to parquet, checked, compared
  nemo-rod score job=FILE.py:FUNCTION role=ROLE checkpoint=FOLDER out=FOLDER roles={PATH: ROLE, ...}
                                                  reference losses of your own job's data
  nemo-rod merge BASE ADAPTED OUT lambda=WEIGHT   weights between two checkpoints of your own
  nemo-rod doctor                                 what is installed, and what works here

Keys: recipe arms arm seed run_dir parallel rebuild dry_run train.* selection.* ...
`nemo-rod run recipe=NAME --cfg job` shows all of them with their values.
"""

# Commands that take a recipe, in Hydra's grammar; and those that take paths.
_STAGES: dict[str, Callable[[Config], None]] = {
    "run": run.run,
    "plan": plan,
    "prepare": run.prepare,
    "pretrain": run.pretrain,
    "score": run.score,
    "train": run.train,
    "merge": run.merge,
    "evaluate": run.evaluate,
    "report": run.report,
}
_TOOLS: dict[str, Callable[[Sequence[str]], None]] = {
    "status": status.main,
    "cancel": status.cancel,
    "inspect": inspect.main,
    "curriculum": curriculum.main,
    "doctor": doctor.main,
}


def main() -> None:
    """Entry point of the console script."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help", "help"):
        print(_USAGE)
        return
    command = sys.argv[1]
    if command in _TOOLS:
        _tool(_TOOLS[command], sys.argv[2:])
        return
    if command in ("train", "score") and "--config" in sys.argv:
        _tool(partial(nemo_rl.main, command), sys.argv[2:])
        return
    if command not in _STAGES:
        expected = ", ".join([*_STAGES, *_TOOLS])
        _leave(f"There is no command '{command}': expected one of {expected}.")
    if command == "score" and of_job.is_of_job(sys.argv[2:]):
        _tool(of_job.main, sys.argv[2:])
        return
    if command == "merge" and merge.is_of_folders(sys.argv[2:]):
        _tool(merge.main, sys.argv[2:])
        return
    sys.argv = [f"nemo-rod {command}", *sys.argv[2:]]
    ConfigStore.instance().store(name="schema", node=Config)
    hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="config")(
        _checked(_STAGES[command])
    )()


def _tool(tool: Callable[[Sequence[str]], None], arguments: Sequence[str]) -> None:
    try:
        tool(arguments)
    except (ValueError, OSError) as error:
        _leave(str(error))
    except RuntimeError as error:
        _leave(str(error), status=1)


def _checked(command: Callable[[Config], None]) -> Callable[[DictConfig], None]:
    """Turns what Hydra composed into our configuration, and errors into one sentence."""

    def task(composed: DictConfig) -> None:
        try:
            OmegaConf.resolve(composed)
            config = to_config(composed)
            config.run_dir = _run_dir(config)
            run.on_all_nodes(command, config)
        except ValueError as error:
            _leave(str(error))
        except Stopped as stop:
            _leave(str(stop), status=Stopped.exit_status)
        except RuntimeError as error:  # a job that failed; its log says more
            _leave(str(error), status=1)

    return task


def _run_dir(config: Config) -> str:
    """In a sweep every job gets its own folder, named after what it varies."""
    job = HydraConfig.get()
    if job.mode != RunMode.MULTIRUN or any(o.startswith("run_dir=") for o in job.overrides.task):
        return config.run_dir
    return str(Path(config.run_dir) / job.job.override_dirname)


def _leave(sentence: str, *, status: int = 2) -> None:
    print(f"nemo-rod: {' '.join(sentence.split())}", file=sys.stderr)
    raise SystemExit(status)


if __name__ == "__main__":
    main()
