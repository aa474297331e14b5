"""The stages of each command, handed to the launcher or run here."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

from nemo_rod.commands.packages import check_packages
from nemo_rod.commands.text import say
from nemo_rod.config import Config
from nemo_rod.hosts.ray import launcher as ray
from nemo_rod.lab.plan.of_recipe import check_before_submitting
from nemo_rod.run.attempts import Record
from nemo_rod.run.evaluate import evaluate_stage
from nemo_rod.run.exports import evaluate_export_stage, export_stage
from nemo_rod.run.handover import Stage
from nemo_rod.run.launch import slurm
from nemo_rod.run.launch.render import launch_folder, render_local, write_files
from nemo_rod.run.launch.submit import check_idle, submit
from nemo_rod.run.processes.nodes import Nodes
from nemo_rod.run.processes.torchrun import run_torchrun
from nemo_rod.run.stages import Stages
from nemo_rod.run.variants import BASE_REFERENCES, SPECIALIST, arm_settings
from nemo_rod.signals import STOP_SIGNALS, Stopped

STAGES = ("prepare", "pretrain", "reference", "train", "merge", "evaluate", "export", "report")
_REPORT_SECONDS = 300.0  # to wait for a report that another command builds
RENDERERS = {"slurm": slurm.render, "ray": ray.render}  # of launchers that submit, not run here


def on_all_nodes(command: Callable[[Config], None], config: Config) -> None:
    """Runs a command; on a job's other nodes, follows the first node instead.

    Raises:
        Stopped: if a signal requested it.
    """
    nodes = Nodes.of_this_job()
    for number in STOP_SIGNALS:
        signal.signal(number, _stop if nodes.rank == 0 else _leave_it_to_the_first_node)
    if nodes.rank:
        nodes.follow(lambda order: run_torchrun(order, nodes, config.launcher))
        return
    with nodes.led():
        command(config)


def _stop(number: int, _: object) -> None:
    raise Stopped("was asked to stop: run it again to resume")


def _leave_it_to_the_first_node(number: int, _: object) -> None:
    """Ignores the signal: the first node receives it, too, and announces the end."""


def run(config: Config) -> None:
    """Runs every stage of the recipe, then evaluation and report."""
    stages = Stages(config).all()
    if config.launcher.kind not in RENDERERS and not config.dry_run:
        check_idle(config)
        check_packages([stage for stage in stages if not stage.is_there()], config.launcher)
        write_files(launch_folder(config), render_local(config, stages))
    _carry_out(config, stages)


def one_stage(command: str, config: Config) -> None:
    """Carries out a command of `STAGES`: the stages of its name, of one arm or of all.

    Raises:
        ValueError: if the recipe has none for the command.
    """
    stages = Stages(config)
    match command:
        case "prepare":
            found = [stages.prepare()]
        case "pretrain":
            found = [stages.make_base()]
        case "reference":
            found = [stages.reference(name) for name in _references(config)]
        case "train":
            found = [stages.train(name) for name in _arms(config, "trained")]
        case "merge":
            found = [stages.merge(name) for name in _arms(config, "merged")]
        case "export":
            found = [export_stage(stages.jobs)]
        case "evaluate" if config.step is not None:
            found = [export_stage(stages.jobs), evaluate_export_stage(stages.jobs)]
        case "evaluate":
            found = [evaluate_stage(stages.jobs)]
        case "report":
            found = [stages.report()]
        case _:
            raise AssertionError(command)
    _carry_out(config, found)


def _references(config: Config) -> list[str]:
    """Returns that of replay by the base and of adaptation by the specialist, or one alone."""
    references = {SPECIALIST: "specialist", **{name: name for name in BASE_REFERENCES}}
    if config.arm is not None and config.arm not in references:
        raise ValueError(
            f"arm={config.arm} is no reference model: expected base, {SPECIALIST}, base_adaptation "
            "for the base on adaptation blocks, base_distillation for its predictions on replay, "
            "or no arm for the first two."
        )
    return [references[config.arm]] if config.arm else ["base", "specialist"]


def _arms(config: Config, kind: str) -> list[str]:
    names = [config.arm] if config.arm else config.arms
    found = [name for name in names if arm_settings(config, name).kind == kind]
    if not found:
        raise ValueError(
            f"There is no {kind} arm among {names}: name one with arm=... or arms=[...]."
        )
    return found


def _carry_out(config: Config, stages: list[Stage]) -> None:
    known = [stage.name for stage in [*Stages(config).all(), *stages] if stage.results]
    for name in config.rebuild:
        if name not in known:
            raise ValueError(f"rebuild=[{name}] names no stage: expected some of {known}.")
    if config.launcher.kind in RENDERERS:
        check_before_submitting(config)
        submit(config, stages, RENDERERS[config.launcher.kind])
    else:
        _here(config, stages)


def _here(config: Config, stages: list[Stage]) -> None:
    """Runs stages one after the other, skipping finished ones."""
    for number, stage in enumerate(stages, start=1):
        label = f"[{number}/{len(stages)}] {stage.title}"
        if config.dry_run:
            state = "done" if stage.is_there() else "to do"
            say(f"{label}: {state}  (nemo-rod {stage.command}, {stage.folder})")
            if stage.preview:
                say(f"    {stage.preview()}")
            continue
        record = Record(Path(config.run_dir), stage.name)
        # `nemo-rod serve` builds the report, too, and takes seconds
        with record.only_one(patience=_REPORT_SECONDS if stage.name == "report" else 0.0):
            if stage.name in config.rebuild:
                stage.move_aside()
            if stage.is_done():
                say(f"{label}: done before")
                continue
            check_packages([stage], config.launcher)
            say(label)
            start = time.monotonic()
            with record.attempt():
                stage.run()
            say(f"{label}: {time.monotonic() - start:.0f} s")
