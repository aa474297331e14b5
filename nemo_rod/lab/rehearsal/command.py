"""`nemo-rod rehearse`: a scaled-down end-to-end run of a recipe."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from nemo_rod.commands.run_stages import shows_dry_run
from nemo_rod.commands.text import say
from nemo_rod.config import Config, config_class, section
from nemo_rod.files import write_json
from nemo_rod.lab.plan.command import make_plan
from nemo_rod.lab.rehearsal.derive import Places, other_runs, scaled_down, small_layout
from nemo_rod.lab.rehearsal.forms import SmallModel, shrunken
from nemo_rod.lab.rehearsal.materials import TABLE, describe, is_rehearsal
from nemo_rod.lab.rehearsal.preflight import preflight, published_config
from nemo_rod.lab.rehearsal.section import Rehearsal
from nemo_rod.lab.rehearsal.stages import RehearsalStages, run_stages
from nemo_rod.lab.rehearsal.table import DONE, FAILED, UNSEEN, Row, as_dict, format_table
from nemo_rod.run.checks import check, to_config
from nemo_rod.run.hub import NotChecked
from nemo_rod.run.launch.submit import check_idle
from nemo_rod.run.processes.pythons import sees_gpu
from nemo_rod.run.stage_log import StageLog

# overrides that belong to one recipe, not to those whose runs it uses
_OWN = (
    *("recipe", "run_dir", "arm", "parallel", "variants", "rehearsal.run_dir"),
    *("model=", "model.hf", "model.shape", "model.architecture"),
)


@shows_dry_run
def rehearse(config: Config) -> None:
    """Rehearses a recipe and prints the table of its parts; or runs one part, as launchers do.

    Raises:
        ValueError: the model has no shrunken form, the folder is not a rehearsal's, or another
            rehearsal is running in it.
        RuntimeError: a part of the rehearsal failed.
    """
    options = section(config, Rehearsal)
    if options.part is not None and not config.dry_run:
        if not is_rehearsal(Path(config.run_dir)):
            raise ValueError(
                f"rehearsal.part={options.part} is for the jobs of a rehearsal, and run_dir="
                f"{config.run_dir} holds none: leave it out."
            )
        own = RehearsalStages(config)
        parts = {"materials": own.materials, "model": own.model, "losses": own.losses}
        stage = parts[options.part]()
        record = StageLog(Path(config.run_dir), stage.name)
        with record.only_one(), record.attempt():
            stage.run()
        return
    folder, model = rehearsal_folder(config), small_model(config)
    if folder.is_dir() and not config.dry_run:
        for run in (folder, *folder.glob("others/*")):
            earlier = config_class()()
            earlier.run_dir = str(run)
            check_idle(earlier)
            if any(StageLog(run, r.stem).is_held() for r in run.glob("launch/stages/*.jsonl")):
                raise ValueError(f"Another rehearsal is running in {run}: wait for it to end.")
        shutil.rmtree(folder)
    rows = [_checked(name, action) for name, action in preflight(config).items()]
    if others := other_runs(config):
        names = lambda: ", ".join(_recipe_for(run).recipe for run in others)  # noqa: E731
        rows.append(_checked("other runs", names))
    if not any(row.state == FAILED for row in rows) and not config.dry_run:
        rows += _rehearsed(config, folder, model, scale=options.steps / config.train.steps)
    plan = None
    with suppress(ValueError):  # the row of the layout shows it
        plan = make_plan(config)
    print(format_table(config.recipe, rows, plan))
    if not config.dry_run:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / TABLE, as_dict(config.recipe, rows, plan))
    if failed := [row.name for row in rows if row.state == FAILED]:
        raise RuntimeError(f"the rehearsal of {config.recipe} failed at {failed[0]}: see above")


def rehearsal_folder(config: Config) -> Path:
    """Returns the folder of the rehearsal.

    Raises:
        ValueError: it is the folder of the real run, inside or around it, or holds other files.
    """
    folder = Path(section(config, Rehearsal).run_dir or f"{config.run_dir.rstrip('/')}_rehearsal")
    real, resolved = Path(config.run_dir).absolute().resolve(), folder.absolute().resolve()
    if resolved == real or real in resolved.parents or resolved in real.parents:
        raise ValueError(
            f"rehearsal.run_dir={folder} and run_dir={config.run_dir} share a folder: a rehearsal "
            "never writes into the folder of the real run; choose one beside it."
        )
    if folder.exists() and any(folder.iterdir()) and not is_rehearsal(folder):
        raise ValueError(
            f"{folder} holds files, and no rehearsal: choose another rehearsal.run_dir."
        )
    return folder


def small_model(config: Config, stages: int | None = None) -> SmallModel | None:
    """Returns the small form of the recipe's model; None for a base that the recipe trains itself.

    Raises:
        ValueError: its architecture has no shrunken form, or is not known here.
    """
    if config.model.hf is None:
        return None
    described = published_config(config.model.hf) or config.model.shape
    if described is None:
        raise ValueError(
            f"The architecture of {config.model.hf} is not known here: set model.shape to the "
            "content of its config.json, or model.hf to a folder that holds it."
        )
    if stages is None:
        parallel, _ = small_layout(config.parallel, _processes(config))
        stages = parallel.pipeline * parallel.virtual_pipeline
    return shrunken(described, where=config.model.hf, stages=stages)


def _rehearsed(
    config: Config, folder: Path, model: SmallModel | None, *, scale: float, prefix: str = ""
) -> list[Row]:
    """Runs the rehearsals that this one uses, then its own stages."""
    rows: list[Row] = []
    for run, arms in other_runs(config).items():
        other = _recipe_for(run)
        other.arms = arms
        inner, label = Places(folder.absolute()).other(run), f"{prefix}{other.recipe}: "
        rows += _rehearsed(other, inner, small_model(other), scale=scale, prefix=label)
    own = run_stages(make_rehearsal(config, folder, model, scale))
    return rows + [replace(row, name=prefix + row.name) for row in own]


def make_rehearsal(config: Config, folder: Path, model: SmallModel | None, scale: float) -> Config:
    """Writes the description of a rehearsal, and returns its configuration, checked."""
    parallel, lost = small_layout(config.parallel, _processes(config))
    if lost:
        say(
            f"{config.recipe}: parallel.{', parallel.'.join(lost)} must be reduced to 1 on "
            f"{_processes(config)} processes"
        )
    small = scaled_down(config, folder, parallel=parallel, scale=scale)
    if config.launcher.kind == "local" and not _has_gpu():
        for key in ("precision_aware_optimizer", "optimizer_offload"):
            if getattr(small.train, key):
                setattr(small.train, key, False)
                say(f"{config.recipe}: train.{key} needs a GPU, and is rehearsed without")
    # NeMo-RL's workers have keys of their own, and evaluation runs here
    runs_here = config.launcher.kind in ("local", "nemo_rl")
    if runs_here and small.model.provider and not _has_gpu():
        small.model.provider = {}
        say(f"{config.recipe}: model.provider needs GPUs, and is rehearsed without")
    check(small)
    folder.mkdir(parents=True, exist_ok=True)
    describe(config, folder, model)
    return small


def _checked(name: str, action: Callable[[], str]) -> Row:
    start = time.monotonic()
    try:
        state, note = DONE, action()
    except NotChecked as reason:
        state, note = UNSEEN, str(reason)
    except (ValueError, OSError) as error:
        state, note = FAILED, " ".join(str(error).split())
    return Row(name=name, state=state, note=note, seconds=time.monotonic() - start)


def _processes(config: Config) -> int | None:
    """Returns the largest number of processes that can run; None for no limit."""
    limit = section(config, Rehearsal).processes
    if limit is not None or config.launcher.kind != "local" or not _has_gpu():
        return limit
    import torch

    return torch.cuda.device_count()


def _has_gpu() -> bool:
    if not sees_gpu():  # torch need not be imported to know that
        return False
    import torch

    return torch.cuda.is_available()


def _recipe_for(run: str) -> Config:
    """Composes the recipe of a run's folder, with this command's other overrides.

    Raises:
        ValueError: there is no recipe of that name.
    """
    recipes = GlobalHydra.instance().config_loader().get_group_options("recipe")
    name = next((part for part in Path(run).parts if part in recipes), None)
    if name is None:
        raise ValueError(
            f"{run} names no recipe, so the run that it holds cannot be rehearsed: expected a "
            "folder such as runs/german_qwen3_5_4b."
        )
    overrides = HydraConfig.get().overrides.task
    shared = [o for o in overrides if not o.lstrip("+~").startswith(_OWN)]
    composed = compose("config", overrides=[f"recipe={name}", *shared])
    composed.recipe = name  # composing takes the name from this command's own choices
    return to_config(composed)
