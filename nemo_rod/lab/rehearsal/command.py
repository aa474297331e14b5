"""`nemo-rod rehearse`: a recipe in small, whole, before it is paid for."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from nemo_rod.commands.text import say
from nemo_rod.config import Config, config_class, section
from nemo_rod.files import write_json
from nemo_rod.lab.plan.costs import PlanResult
from nemo_rod.lab.plan.of_recipe import make_plan
from nemo_rod.lab.rehearsal.derive import Places, other_runs, rehearsal_of
from nemo_rod.lab.rehearsal.forms import SmallModel, shrunken
from nemo_rod.lab.rehearsal.looks import NotLooked, looks, published_config
from nemo_rod.lab.rehearsal.materials import TABLE, describe, is_rehearsal
from nemo_rod.lab.rehearsal.rehearsal_stages import RehearsalStages
from nemo_rod.lab.rehearsal.rehearsal_table import DONE, FAILED, UNSEEN, Row, as_dict, format_table
from nemo_rod.lab.rehearsal.rehearsed_stages import carried_out
from nemo_rod.lab.rehearsal.section import Rehearsal
from nemo_rod.lab.rehearsal.small_layout import small_layout
from nemo_rod.run.checks import check, to_config
from nemo_rod.run.launch.submit import check_idle
from nemo_rod.run.processes.start import sees_gpu
from nemo_rod.run.stage_log import StageLog

# overrides that belong to one recipe, not to those whose runs it uses
_OWN = (
    *("recipe", "run_dir", "arm", "parallel", "variants", "rehearsal.run_dir"),
    *("model=", "model.hf", "model.shape", "model.architecture"),
)


def rehearse(config: Config) -> None:
    """Rehearses a recipe and prints the table in which it ends.

    Raises:
        ValueError: if there is no shrunken form, or the folder is not a rehearsal's.
        RuntimeError: if a part of the rehearsal failed.
    """
    options = section(config, Rehearsal)
    if options.part is not None:
        run_part(config, options.part)
        return
    folder = rehearsal_folder(config)
    model = small_model(config)
    if not config.dry_run:
        check_idle_and_clear(folder)
    rows = [_looked(name, look) for name, look in looks(config).items()]
    if others := other_runs(config):
        rows.append(_looked("other runs", lambda: ", ".join(_recipe_of(r).recipe for r in others)))
    if not any(row.state == FAILED for row in rows) and not config.dry_run:
        scale = options.steps / config.train.steps
        rows += _rehearsed(config, folder, model, scale)
    plan = _plan(config)
    print(format_table(config.recipe, rows, plan))
    if not config.dry_run:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / TABLE, as_dict(config.recipe, rows, plan))
    failed = [row for row in rows if row.state == FAILED]
    if failed:
        raise RuntimeError(
            f"the rehearsal of {config.recipe} failed at {failed[0].name}: see above"
        )


def run_part(config: Config, part: str) -> None:
    """Runs one of the rehearsal's own stages, as launchers do.

    Raises:
        ValueError: if the run folder is not a rehearsal's.
    """
    if not is_rehearsal(Path(config.run_dir)):
        raise ValueError(
            f"rehearsal.part={part} is for the jobs of a rehearsal, and run_dir={config.run_dir} "
            "holds none: leave it out."
        )
    stage = RehearsalStages(config).part(part)
    record = StageLog(Path(config.run_dir), stage.name)
    with record.only_one(), record.attempt():
        stage.run()


def rehearsal_folder(config: Config) -> Path:
    """Returns the folder of the rehearsal.

    Raises:
        ValueError: if it is, or touches, the folder of the real run, or holds something else.
    """
    real = Path(config.run_dir).absolute().resolve()
    folder = Path(
        section(config, Rehearsal).run_dir or f"{str(config.run_dir).rstrip('/')}_rehearsal"
    )
    found = folder.absolute().resolve()
    if found == real or real in found.parents or found in real.parents:
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
    """Returns the recipe's model in small; None for a base that the recipe trains itself.

    Raises:
        ValueError: if its architecture has no shrunken form, or is not known here.
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


def check_idle_and_clear(folder: Path) -> None:
    """Removes an earlier rehearsal, unless it is at work."""
    if folder.is_dir():
        for run in (folder, *folder.glob("others/*")):
            config = config_class()()
            config.run_dir = str(run)
            check_idle(config)
            for record in run.glob("launch/stages/*.jsonl"):
                if StageLog(run, record.stem).is_held():
                    raise ValueError(f"Another rehearsal is at work in {run}: wait for it to end.")
        shutil.rmtree(folder)


def _rehearsed(
    config: Config, folder: Path, model: SmallModel | None, scale: float, prefix: str = ""
) -> list[Row]:
    """Runs the rehearsals that this one uses, then its own stages."""
    rows: list[Row] = []
    for run, arms in other_runs(config).items():
        other = _recipe_of(run)
        other.arms = arms
        inner = Places(folder.absolute()).other(run)
        rows += _rehearsed(other, inner, small_model(other), scale, f"{prefix}{other.recipe}: ")
    small = make_rehearsal(config, folder, model, scale)
    rehearsed = carried_out(RehearsalStages(small))
    return rows + [replace(row, name=prefix + row.name) for row in rehearsed]


def make_rehearsal(config: Config, folder: Path, model: SmallModel | None, scale: float) -> Config:
    """Writes the description of a rehearsal, and returns its configuration, checked."""
    parallel, lost = small_layout(config.parallel, _processes(config))
    if lost:
        say(
            f"{config.recipe}: parallel.{', parallel.'.join(lost)} cannot be kept above 1 on "
            f"{_processes(config)} processes, and is rehearsed at 1"
        )
    small = rehearsal_of(config, folder, parallel=parallel, scale=scale)
    if config.launcher.kind == "local" and not _has_gpu():
        for key in ("precision_aware_optimizer", "optimizer_offload"):
            if getattr(small.train, key):
                setattr(small.train, key, False)
                say(f"{config.recipe}: train.{key} needs a GPU, and is rehearsed without")
    check(small)
    folder.mkdir(parents=True, exist_ok=True)
    describe(config, folder, model)
    return small


def _looked(name: str, look: Callable[[], str]) -> Row:
    start = time.monotonic()
    try:
        state, note = DONE, look()
    except NotLooked as why:
        state, note = UNSEEN, str(why)
    except (ValueError, OSError) as error:
        state, note = FAILED, " ".join(str(error).split())
    return Row(name=name, state=state, note=note, seconds=time.monotonic() - start)


def _processes(config: Config) -> int | None:
    """Returns the most processes that can run; None if there is no limit."""
    asked = section(config, Rehearsal).processes
    if asked is not None or config.launcher.kind != "local":
        return asked
    if not _has_gpu():
        return None
    import torch

    return torch.cuda.device_count()


def _has_gpu() -> bool:
    if not sees_gpu():  # torch need not be imported to know that
        return False
    import torch

    return torch.cuda.is_available()


def _recipe_of(run: str) -> Config:
    """Composes the recipe behind the folder of a run, with this command's other overrides.

    Raises:
        ValueError: if there is no recipe of that name.
    """
    known = GlobalHydra.instance().config_loader().get_group_options("recipe")
    name = next((part for part in Path(run).parts if part in known), None)
    if name is None:
        raise ValueError(
            f"{run} names no recipe, so the run that it holds cannot be rehearsed: expected a "
            "folder such as runs/german_qwen3_5_4b."
        )
    own = HydraConfig.get().overrides.task
    kept = [o for o in own if not o.lstrip("+~").startswith(_OWN)]
    composed = compose("config", overrides=[f"recipe={name}", *kept])
    composed.recipe = name  # Hydra would say what this command was given
    return to_config(composed)


def _plan(config: Config) -> PlanResult | None:
    try:
        return make_plan(config)
    except ValueError:
        return None  # a row says why
