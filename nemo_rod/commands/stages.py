"""What each command does: it names its links, and the launcher carries them out."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from nemo_rod.config import Config
from nemo_rod.launch import ray, slurm
from nemo_rod.launch.render import render_local, write_files
from nemo_rod.launch.submit import submit
from nemo_rod.plan.of_recipe import check_before_submitting
from nemo_rod.processes.nodes import Nodes
from nemo_rod.processes.signals import STOP_SIGNALS, Stopped
from nemo_rod.processes.torchrun import run_torchrun
from nemo_rod.recipe.attempts import Record
from nemo_rod.recipe.chain import Link, evaluate_link, report_link, stage_link, whole_chain
from nemo_rod.recipe.stages import Stages
from nemo_rod.recipe.variants import BASE_REFERENCES, SPECIALIST, arm_settings


def on_all_nodes(command: Callable[[Config], None], config: Config) -> None:
    """Runs a command here; on the other nodes of a job, follows what the first node's does.

    Raises:
        Stopped: if a signal asked for it.
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
    raise Stopped("was asked to stop: run it again to go on from there")


def _leave_it_to_the_first_node(number: int, _: object) -> None:
    """The first node's command is asked, too, and says when all is over."""


def run(config: Config) -> None:
    """Every stage of the recipe, then evaluation and report."""
    links = whole_chain(config)
    if config.launcher.kind == "local":
        write_files(Path(config.run_dir) / "launch" / "local", render_local(config, links))
    _carry_out(config, links)


def prepare(config: Config) -> None:
    """Text -> blocks."""
    stages = Stages(config)
    _carry_out(config, [stage_link(stages, stages.prepare())])


def pretrain(config: Config) -> None:
    """The base model."""
    stages = Stages(config)
    _carry_out(config, [stage_link(stages, stages.make_base())])


def reference(config: Config) -> None:
    """Reference losses: of the base on replay and of the specialist on adaptation, or of one."""
    references = {SPECIALIST: "specialist", **{name: name for name in BASE_REFERENCES}}
    if config.arm is not None and config.arm not in references:
        raise ValueError(
            f"arm={config.arm} is no reference model: expected base, {SPECIALIST}, base_adaptation "
            "for the base on new blocks, or base_distillation for what it foretells of replay; or "
            "no arm for the first two."
        )
    stages = Stages(config)
    names = [references[config.arm]] if config.arm else ["base", "specialist"]
    _carry_out(config, [stage_link(stages, stages.reference(name)) for name in names])


def train(config: Config) -> None:
    """One arm, or every trained arm of the recipe."""
    stages = Stages(config)
    names = _arms(config, "trained")
    _carry_out(config, [stage_link(stages, stages.train(name)) for name in names])


def merge(config: Config) -> None:
    """One merged arm, or every one of the recipe."""
    stages = Stages(config)
    names = _arms(config, "merged")
    _carry_out(config, [stage_link(stages, stages.merge(name)) for name in names])


def evaluate(config: Config) -> None:
    """Held-out losses, and the tasks, of every arm that has none yet."""
    _carry_out(config, [evaluate_link(config)])


def report(config: Config) -> None:
    """Tables, figures, the page and the verdicts, over all seeds of a sweep."""
    _carry_out(config, [report_link(config)])


def _arms(config: Config, kind: str) -> list[str]:
    names = [config.arm] if config.arm else config.arms
    found = [name for name in names if arm_settings(config, name).kind == kind]
    if not found:
        raise ValueError(
            f"There is no {kind} arm among {names}: name one with arm=... or arms=[...]."
        )
    return found


def _carry_out(config: Config, links: list[Link]) -> None:
    known = [link.name for link in whole_chain(config) if link.results]
    for name in config.rebuild:
        if name not in known:
            raise ValueError(f"rebuild=[{name}] names no stage: expected some of {known}.")
    renderers = {"slurm": slurm.render, "ray": ray.render}
    if config.launcher.kind in renderers:
        check_before_submitting(config)
        submit(config, links, renderers[config.launcher.kind])
    else:
        _here(config, links)


def _here(config: Config, links: list[Link]) -> None:
    """Carries out links one after the other, skipping what is done."""
    for number, link in enumerate(links, start=1):
        label = f"[{number}/{len(links)}] {link.title}"
        if config.dry_run:
            state = "done" if link.is_there() else "to do"
            _say(f"{label}: {state}  (nemo-rod {link.command}, {link.folder})")
            if link.preview:
                _say(f"    {link.preview()}")
            continue
        record = Record(Path(config.run_dir), link.name)
        with record.only_one():
            if link.name in config.rebuild:
                link.move_aside()
            if link.is_done():
                _say(f"{label}: done before")
                continue
            _say(label)
            start = time.monotonic()
            with record.attempt():
                link.run()
            _say(f"{label}: {time.monotonic() - start:.0f} s")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
