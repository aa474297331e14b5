"""The stages of each command, handed to the launcher or run here."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from nemo_rod import parts
from nemo_rod.commands.text import say
from nemo_rod.config import Config
from nemo_rod.run.exports import evaluate_export_stage, export_stage
from nemo_rod.run.handover import Stage
from nemo_rod.run.launch import launcher_of
from nemo_rod.run.launch.render import launch_folder, write_files
from nemo_rod.run.launch.submit import check_idle, submit
from nemo_rod.run.processes.nodes import Nodes
from nemo_rod.run.processes.pythons import can_be_found, python_with_megatron
from nemo_rod.run.processes.torchrun import run_torchrun
from nemo_rod.run.stage_log import StageLog
from nemo_rod.run.stages import Stages
from nemo_rod.run.variants import SPECIALIST, arm_settings
from nemo_rod.signals import STOP_SIGNALS, Stopped

_REPORT_SECONDS = 300.0  # to wait for a report that another command builds
# extra of nemo-rod that a stage needs -> the modules that it imports
_NEEDS = {
    "": (),
    "data": ("tokenizers", "transformers"),
    "bridge": ("torch", "transformers", "safetensors", "megatron.core", "megatron.bridge"),
    "eval": ("torch", "safetensors"),
    "report": ("jinja2", "matplotlib"),
}


def on_all_nodes(command: Callable[[Config], None], config: Config) -> None:
    """Runs a command; on a job's other nodes, follows the first node instead.

    Raises:
        Stopped: if a signal requested it.
    """
    nodes = Nodes.of_this_job()
    for number in STOP_SIGNALS:
        signal.signal(number, _stop if nodes.rank == 0 else _ignore)
    if nodes.rank:
        nodes.follow(lambda order: run_torchrun(order, nodes, config.launcher))
        return
    with nodes.led():
        command(config)


def _stop(number: int, _: object) -> None:
    raise Stopped("was asked to stop: run it again to resume")


def _ignore(number: int, _: object) -> None:
    """Ignores the signal: the first node receives it, too, and announces the end."""


def run(config: Config) -> None:
    """Runs every stage of the recipe, then evaluation and report."""
    stages = Stages(config)
    every = stages.all()
    if not (stages.launcher.submits or config.dry_run):
        check_idle(config)
        check_packages([stage for stage in every if not stage.is_there()], config)
        write_files(launch_folder(config), stages.launcher.render(config, every))
    _execute(stages, every)


def one_stage(command: str, config: Config) -> None:
    """Carries out a command: the stages of its name, of one arm or of all.

    Raises:
        ValueError: if the recipe has none for the command.
    """
    stages = Stages(config)
    match command:
        case "prepare":
            chosen = [stages.prepare()]
        case "pretrain":
            chosen = [stages.make_base()]
        case "reference":
            references = {"base": "base", SPECIALIST: "specialist"}
            if config.arm not in (None, *references):
                raise ValueError(
                    f"arm={config.arm} is not a reference model: expected base, {SPECIALIST}, or "
                    "no arm for both."
                )
            models = [config.arm] if config.arm else references
            chosen = [stages.reference(references[model]) for model in models]
        case "train":
            names = [config.arm] if config.arm else config.arms
            trained = [name for name in names if arm_settings(config, name).kind == "trained"]
            chosen = [stages.train(name) for name in trained]
        case "export":
            chosen = [export_stage(stages.jobs)]
        case "evaluate" if config.step is not None:
            chosen = [export_stage(stages.jobs), evaluate_export_stage(stages.jobs)]
        case _:
            chosen = stages.part(command)
    if not chosen:
        names = [config.arm] if config.arm else config.arms
        raise ValueError(
            f"There is nothing to {command} among {names}: name an arm with arm=... or arms=[...]."
        )
    _execute(stages, chosen)


def check_packages(stages: Iterable[Stage], config: Config) -> None:
    """Refuses stages whose packages are not all installed.

    NeMo-RL, as a launcher, brings its own packages, and so does the environment of its workers.

    Raises:
        ValueError: naming the packages, the stage that needs them, and the extras that bring them.
    """
    missing: dict[str, str] = {}  # module -> extra
    names = []
    here = launcher_of(config).environment and python_with_megatron() == sys.executable
    for stage in stages:
        if stage.extra == "bridge" and not here:
            continue
        lacks = [module for module in _NEEDS[stage.extra] if not can_be_found(module)]
        for module in lacks:
            missing.setdefault(module, stage.extra)
        names += [stage.name] if lacks else []
    if missing:
        extras = ",".join(dict.fromkeys(missing.values()))
        raise ValueError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed, which "
            f"{names[0]} needs{' first' if len(names) > 1 else ''}: pip install "
            f"'nemo-rod[{extras}]', run `make venv` in a checkout on a machine without a GPU, or "
            "use an image of docs/images.md."
        )


def _execute(stages: Stages, chosen: list[Stage]) -> None:
    config = stages.config
    known = [stage.name for stage in [*stages.all(), *chosen] if stage.results]
    for name in config.rebuild:
        if name not in known:
            raise ValueError(f"rebuild=[{name}] is not a stage: expected some of {known}.")
    if stages.launcher.submits:
        for name in parts.names("checks"):
            parts.load("checks", name)(config)
        submit(stages, chosen)
    else:
        _run_here(config, chosen)


def _run_here(config: Config, stages: list[Stage]) -> None:
    """Runs stages one after the other, skipping finished ones."""
    for number, stage in enumerate(stages, start=1):
        label = f"[{number}/{len(stages)}] {stage.title}"
        if config.dry_run:
            state = "done" if stage.is_there() else "to do"
            say(f"{label}: {state}  (nemo-rod {stage.command}, {stage.folder})")
            if stage.preview and (line := stage.preview()):
                say(f"    {line}")
            continue
        log = StageLog(Path(config.run_dir), stage.name)
        # `nemo-rod serve` builds the report, too, and takes seconds
        with log.only_one(patience=_REPORT_SECONDS if stage.name == "report" else 0.0):
            if stage.name in config.rebuild:
                stage.move_aside()
            if stage.is_done():
                say(f"{label}: done before")
                continue
            check_packages([stage], config)
            say(label)
            start = time.monotonic()
            with log.attempt():
                stage.run()
            say(f"{label}: {time.monotonic() - start:.0f} s")
