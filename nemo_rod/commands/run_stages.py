"""The stages of each command, handed to the launcher or run here."""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from nemo_rod import parts
from nemo_rod.commands.text import say
from nemo_rod.config import Config
from nemo_rod.files import read_json
from nemo_rod.run.beforehand import lacking
from nemo_rod.run.handover import OtherInputs, Stage, partial
from nemo_rod.run.launch.render import launch_folder, write_files
from nemo_rod.run.launch.submit import check_idle, submit
from nemo_rod.run.processes.nodes import Nodes
from nemo_rod.run.processes.torchrun import follow
from nemo_rod.run.run_folder import RunFolder
from nemo_rod.run.stage_log import StageLog
from nemo_rod.run.stages import Stages
from nemo_rod.run.variants import SPECIALIST, arm_settings
from nemo_rod.signals import STOP_SIGNALS, Stopped

_REPORT_SECONDS = 300.0  # how long to wait for a report that another command builds


def on_all_nodes(command: Callable[[Config], None], config: Config) -> None:
    """Runs a command; on a job's other nodes, follows the first node instead.

    Raises:
        Stopped: a signal requested it.
    """
    nodes = Nodes.from_environment()

    def stop(number: int, _: object) -> None:
        if nodes.rank == 0:  # the first node receives it, too, and announces the end to the others
            raise Stopped("was asked to stop: run it again to resume")

    for number in STOP_SIGNALS:
        signal.signal(number, stop)
    if nodes.rank:
        log = RunFolder(Path(config.run_dir), config.recipe).log(
            f"{nodes.record.stem}.node{nodes.rank}"
        )
        follow(nodes, world_size=config.parallel.world_size, launcher=config.launcher, log=log)
        return
    with nodes.announcing_end():
        command(config)


def shows_dry_run(command: Callable[[Config], None]) -> Callable[[Config], None]:
    """Marks a command that shows what it would do with `dry_run`; all others are not called."""
    command.shows_dry_run = True  # type: ignore[attr-defined]
    return command


@shows_dry_run
def run(config: Config) -> None:
    """Runs every stage of the recipe, then evaluation and report.

    Raises:
        ValueError: no stage makes an arm, as the part that would is not there; or `arm` is set.
    """
    if (one := config.arm) is not None:
        raise ValueError(f"arm={one} is for commands of one stage: did you mean arms=[{one}]?")
    stages = Stages(config)
    chosen = stages.all()
    if unmade := [name for name in config.arms if name not in {stage.name for stage in chosen}]:
        raise ValueError(
            f"No part that is installed makes the arm {unmade[0]}: take it out of arms=[...], or "
            "install all of nemo_rod."
        )
    execute(stages, chosen, is_launch=True)
    if not (config.dry_run or stages.launcher.submits):
        for line in results_of(config):
            say(line)


def results_of(config: Config) -> list[str]:
    """Returns where a run's results are, and how to try them: the last lines of a run."""
    folder, lines = Path(config.run_dir), list[str]()
    results = folder / "report" / "results.json"
    if results.is_file() and (verdict := read_json(results).get("verdict")):
        lines.append(f"verdict  {verdict['advice']}")
    if (page := folder / "report" / "index.html").is_file():
        lines.append(f"page     {page}")
    if made := [name for name in config.arms if (folder / "arms" / name / "hf").is_dir()]:
        name = "rod" if "rod" in made else made[-1]
        lines.append(f"model    {folder / 'arms' / name / 'hf'}, for transformers and vLLM")
        lines.append(f"try it   nemo-rod inspect {shlex.quote(str(folder))} arm={name} prompt=TEXT")
    return lines


def one_stage(command: str, config: Config) -> None:
    """Carries out a command: the stages of its name, of one arm or of all.

    Raises:
        ValueError: the recipe has none for the command.
    """
    stages, names = Stages(config), [config.arm] if config.arm else config.arms
    match command:
        case "prepare":
            chosen = [stage for stage in stages.all() if "prepare" in (stage.name, stage.feeds)]
            chosen = [stage for stage in chosen if stage.is_alone] or chosen
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
            trained = [name for name in names if arm_settings(config, name).kind == "trained"]
            chosen = [stages.train(name) for name in trained]
        case "export" | "evaluate" if command == "export" or config.step is not None:
            chosen = parts.load("saved_step_commands", command)(stages)
        case _:
            chosen = stages.part(command)
    if not chosen:
        raise ValueError(
            f"There is nothing to {command} among {names}: name an arm with arm=... or arms=[...], "
            f"or read nemo-rod {command} --help."
        )
    execute(stages, chosen)


def execute(stages: Stages, chosen: list[Stage], *, is_launch: bool = False) -> None:
    """Runs some stages of a run, or submits them, or says with `dry_run` what it would do.

    Args:
        stages: the run.
        chosen: its stages, in order.
        is_launch: whether `nemo-rod status` shows them as one launch.

    Raises:
        ValueError: results have other inputs, are foreign or damaged, or something is lacking that
            the stages need; the message names the change and the key for a rebuild.
    """
    config = stages.config
    for name in config.rebuild:
        known = [stage.name for stage in [*stages.all(), *chosen] if stage.results]
        if name not in known:
            near, all_ = parts.did_you_mean(name, known), ", ".join(dict.fromkeys(known))
            raise ValueError(f"rebuild=[{name}] is not a stage{near}: expected some of {all_}.")
    states = stage_states(chosen, config)
    to_run = [each.stage for each in states if each.state != "done"]
    if config.dry_run and not stages.launcher.submits:
        for number, (stage, state, why) in enumerate(states, start=1):
            label, note = f"[{number}/{len(states)}] {stage.title}", f": {why}" if why else ""
            say(f"{label}: {state}{note}  (nemo-rod {stage.command}, {stage.folder})")
            if stage.preview and (line := stage.preview()):
                say(f"    {line}")
    if refused := [each.why for each in states if each.state == "refused"]:
        raise ValueError(refused[0])
    if differ := [each for each in states if each.state == "differs"]:  # all at once
        names = ",".join(dict.fromkeys([*config.rebuild, *(each.stage.name for each in differ)]))
        raise ValueError(
            f"{differ[0].why}: add rebuild=[{names}] to make {'it' if len(differ) == 1 else 'all'} "
            "again, or choose another run_dir."
        )
    lacks = lacking(to_run, config)
    if config.dry_run and stages.launcher.submits:  # perhaps of another machine
        for lack in lacks:
            if not lack.everywhere:
                say(lack.sentence)
        lacks = [lack for lack in lacks if lack.everywhere]
    if lacks:
        raise ValueError(" ".join(lack.sentence for lack in lacks))
    if stages.launcher.submits:
        for name in parts.names("checks") if config.dry_run else ():
            with suppress(OSError):  # already reported
                if line := parts.load("checks", name)(config, to_run):
                    say(line)
        submit(stages, chosen)
    elif not config.dry_run:
        if is_launch:
            check_idle(config)
            write_files(launch_folder(config), stages.launcher.render(config, chosen))
        _run_here(config, chosen)


class StageState(NamedTuple):
    """A stage and its state at the start of a run."""

    stage: Stage
    state: str  # "done", "to do", "running", "refused", or "differs": made with other inputs
    why: str


def stage_states(stages: Iterable[Stage], config: Config) -> list[StageState]:
    """Returns the state of every stage, without changing anything.

    If a stage has other inputs, the stages that use its results will have other inputs, too, unless
    they write to the folder of a stage that they need.
    """
    states, others, open_ = list[StageState](), set[str](), set[str]()
    for stage in stages:
        state, why = "to do", ""
        used = [need for need in stage.needs if need in others]
        try:
            if StageLog(Path(config.run_dir), stage.name).is_held():
                state = "running"
            elif stage.is_done():
                state = "done"
            elif partial(stage.folder).exists():
                why = "resumes"
        except OtherInputs as error:
            state, why = "differs", error.difference
        except ValueError as error:
            if not open_.intersection(stage.needs):
                state, why = "refused", str(error)
            elif stage.is_there():  # compared once its needs are there
                state, why = "done", "if its inputs stay the same"
        if used and stage.folder in stage.results and (stage.is_there() or why == "resumes"):
            state, why = "differs", why or f"{stage.folder} uses {', '.join(used)}"
        elif state == "done" and stage.folder not in stage.results and open_ & {*stage.needs}:
            state, why = "to do", "again, of what is made again"
        if state == "differs":
            others.add(stage.name)
        if stage.name in config.rebuild:
            state, why = "to do", "again, as rebuild asks"
        if state != "done":
            open_.add(stage.name)
        states.append(StageState(stage, state, why))
    return states


def _run_here(config: Config, stages: list[Stage]) -> None:
    """Runs stages one after the other, skipping finished ones."""
    estimates = parts.load_all("time_left") if len(stages) > 1 else []
    for number, stage in enumerate(stages, start=1):
        label = f"[{number}/{len(stages)}] {stage.title}"
        log = StageLog(Path(config.run_dir), stage.name)
        # `nemo-rod status --serve` builds the report, too, and takes seconds
        with log.only_one(patience=_REPORT_SECONDS if stage.name == "report" else 0.0):
            if stage.name in config.rebuild:
                stage.move_aside()
            if stage.is_done():
                say(f"{label}: done before")
                continue
            left = next((tell(config) for tell in estimates), "")
            say(f"{label}  (about {left} left of all)" if left else label)
            start = time.monotonic()
            with log.attempt():
                try:
                    stage.run()
                except SystemExit as end:  # of others' code; nothing may look done by it
                    raise RuntimeError(
                        f"{stage.name} was left by sys.exit({end.code!r}): correct the part that "
                        "calls it."
                    ) from end
            say(f"{label}: {time.monotonic() - start:.0f} s")
