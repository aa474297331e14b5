"""`nemo-rod status RUN_DIR`: the state of a run, its live page, and the end of its jobs.

Everything is read from the run's folder; if jobs were submitted, Slurm is queried, too.
"""

from __future__ import annotations

import os
import re
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rod.commands.arguments import Arguments, Key
from nemo_rod.commands.text import printable, table
from nemo_rod.files import MOST_BYTES, open_file
from nemo_rod.lab.text import TRUST
from nemo_rod.progress import PREFIX

if TYPE_CHECKING:
    from nemo_rod.config import Config
    from nemo_rod.run.handover import Stage
    from nemo_rod.run.launch.queue import QueuedJob

_DESCRIPTION = """\
Shows every stage of a run: its state, job, place, progress, time left and last metrics. It reads
the run's folder, and queries Slurm if jobs were submitted; nothing is changed.

With --serve, the report is rebuilt whenever the run has progressed, and served on 127.0.0.1: the
page reloads itself. With --cancel, the jobs that launcher=slurm or launcher=ray submitted are
cancelled. The results so far stay, and the same command as before resumes the run."""
_RECENT = 20  # steps for the estimate of the time left
# a line of nemo_rod.progress.Progress; `far` is "done/all" at its beginning, if all is known
PROGRESS = re.compile(
    re.escape(PREFIX) + r"(?P<name>.+?)  (?P<far>(?P<done>[\d,]+)(?:/(?P<all>[\d,]+))?(?: \w+)?)"
    r"(?:  (?P<note>.*?))??(?:  (?P<left>\d+:\d\d:\d\d) left)?$"
)
_EVERY = {"watch": 5, "serve": 30}  # seconds between two updates
_PORT = 8008
_BAR = 20  # characters
_CLEAR = "\x1b[H\x1b[2J\x1b[3J"  # home, screen and scrollback, as `clear` does
_FINE = ("done", "running", "waiting", "requeued", "to do")
_HEADER = ("stage", "state", "job", "where", "progress", "left", "last")


@dataclass(frozen=True)
class Standing:
    """The state of one stage of a run."""

    # "done", "running", "waiting", "requeued", "stopped", "failed", "cancelled", "died" or "to do";
    # or Slurm's name for the end of a job that could not record one
    state: str
    why: str = ""  # cause of waiting, or a sentence about the end


def declare(parser: Arguments) -> None:
    """Declares the arguments of `nemo-rod status`."""
    parser.usage = (
        "nemo-rod status RUN_DIR [--watch] [every=SECONDS]\n"
        "       nemo-rod status RUN_DIR --serve [port=PORT] [every=N] [trust_remote_code=true]\n"
        "       nemo-rod status RUN_DIR --cancel"
    )
    parser.description = _DESCRIPTION
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="folder of the run")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--watch", action="store_true", help="show it with bars, and update it")
    ways.add_argument("--serve", action="store_true", help="serve the page of a run under way")
    ways.add_argument("--cancel", action="store_true", help="cancel the jobs of the run")
    every = f"seconds between two updates, {_EVERY['watch']} or, with --serve, {_EVERY['serve']}"
    port = f"of --serve, {_PORT} by default; 0 for any free port"
    parser.add_keys(
        Key("every", "SECONDS", every, read=int, bound="in [1, 86400]"),
        Key("port", "PORT", port, read=int, bound="in [0, 65535]", default=_PORT),
        TRUST,
    )
    parser.set_defaults(main=main)


def main(options: Namespace) -> None:
    """Prints the state of a run, once, or with --watch until Ctrl-C; or serves or cancels it."""
    if options.serve:
        from nemo_rod.lab.report.serve import serve_run

        serve_run(
            options.run_dir,
            port=options.port,
            every=options.every or _EVERY["serve"],
            trusted=bool(options.trust_remote_code),
        )
    elif options.cancel:
        cancel(options.run_dir)
    elif not options.watch:
        print(standing_text(options.run_dir))
    else:
        with suppress(KeyboardInterrupt):
            while True:
                text = standing_text(options.run_dir, bars=True)
                print(f"{_CLEAR}{text}\n\n{time.strftime('%H:%M:%S')}, Ctrl-C ends", flush=True)
                time.sleep(options.every or _EVERY["watch"])


def cancel(run_dir: Path) -> None:
    """Cancels the jobs of all launches of a run; the results so far stay.

    Raises:
        ValueError: the folder is not a run's, none of its jobs is in the queue, or Slurm does
            not respond, or refuses.
    """
    from nemo_rod.lab.launches import read_launch
    from nemo_rod.run.launch import queue

    if not (alive := sorted(queue.alive(run_dir))):
        read_launch(run_dir)  # refuses a folder that is not a run's
        raise ValueError(f"{run_dir} has no job in the queue: there is nothing to cancel.")
    for cluster, short in queue.by_cluster(alive).items():  # running ones are asked to stop first
        lines = queue.ask("scancel", *cluster, *short)
        if isinstance(lines, str):
            raise ValueError(f"Slurm did not cancel jobs {', '.join(short)} ({lines}): try again.")
    print(f"cancelled {len(alive)} jobs: {', '.join(alive)}")


def standing_text(run_dir: Path, *, bars: bool = False) -> str:
    """Returns a table of the run's stages, and a sentence for each that did not end well."""
    from nemo_rod.lab.launches import jobs_by_stage, read_launch
    from nemo_rod.run.handover import partial
    from nemo_rod.run.stage_log import StageLog
    from nemo_rod.run.stages import Stages

    launcher, config = read_launch(run_dir)
    if config.arm is not None:  # a single command was launched, but the whole run is shown
        config.arms, config.arm = list(dict.fromkeys([*config.arms, config.arm])), None
    jobs = jobs_by_stage(run_dir, launcher)
    standings: dict[str, Standing] = {}
    rows = []
    for stage in Stages(config).all():
        record, (number, job) = StageLog(run_dir, stage.name), jobs.get(stage.name, (None, None))
        events = record.events()
        standing = stand(stage, events, job, number is not None, record.is_held(), standings)
        standings[stage.name] = standing
        where = (job.nodes if job else "") or place(events)
        far = left = last = ""
        if standing.state == "done":
            seconds = working_seconds(events)
            far = f"in {_clock(seconds)}" if seconds else ""
        elif standing.state not in ("to do", "waiting", "cancelled"):
            folder = partial(stage.folder)
            logs = (run_dir / "logs").glob(f"{stage.name}*.log")
            log = max(logs, key=lambda log: log.stat().st_mtime, default=None)
            if (folder / "metrics.jsonl").exists():
                far, left, last = training_progress(folder)
            elif log and standing.state == "running":
                far, left, last = last_progress(log)
        last = last or (standing.why if standing.state in _FINE else "")
        far = f"{bar(standing, far)} {far}".rstrip() if bars else far
        rows.append((stage.name, standing.state, number, where, far, left, last))
    sentences = [
        printable(f"{name}: {standing.state}: {standing.why}")
        for name, standing in standings.items()
        if standing.why and standing.state not in _FINE
    ]
    done = sum(standing.state == "done" for standing in standings.values())
    left = time_left(config) if done < len(standings) else ""
    title = f"{config.recipe} in {run_dir}, launcher={launcher}: {done} of {len(rows)} stages done"
    title += f", about {left} of work left" if left else ""
    return "\n".join([title, table(_HEADER, rows), *sentences])


def bar(standing: Standing, far: str) -> str:
    """Returns a bar of a stage's progress, which is "done/all" at its beginning, or unknown."""
    share = 1.0 if standing.state == "done" else 0.0
    if match := re.match(r"([\d,]+)/([\d,]+)", far):
        done, total = (int(text.replace(",", "")) for text in match.groups())
        share = min(1.0, done / max(1, total))
    full = int(share * _BAR)
    return "\u2588" * full + "\u2591" * (_BAR - full)


def stand(
    stage: Stage,
    events: Sequence[Mapping[str, Any]],
    job: QueuedJob | None,
    was_submitted: bool,
    is_held: bool,
    others: Mapping[str, Standing],
) -> Standing:
    """Returns the state of a stage.

    `is_held` says whether a process of this machine works on it; `others` are the earlier stages.
    """
    last = events[-1] if events else {"event": "none"}
    if job is not None and job.alive:
        if job.state != "PENDING":
            return Standing(job.state.lower())
        if last["event"] in ("stopped", "began"):
            return Standing("requeued", last.get("why", ""))
        if job.reason != "Dependency":
            return Standing("waiting", f"in the queue ({job.reason})")
        needs = [need for need in stage.needs if need in others and others[need].state != "done"]
        return Standing("waiting", f"for {', '.join(needs)}")
    if is_held:
        return Standing("running")
    if stage.is_there() and last["event"] in ("done", "none"):
        # a stage that always runs, such as the report, may exist before its inputs do
        always = not (stage.results or stage.runs_model)
        open_ = any(need in others and others[need].state != "done" for need in stage.needs)
        return Standing("to do", "again") if always and open_ else Standing("done")
    if last["event"] in ("failed", "stopped"):
        return Standing(last["event"], last["why"])
    if job is not None and job.state not in ("COMPLETED", "CANCELLED"):
        return Standing(job.state.lower(), "its job ended without recording why; see logs/slurm")
    if last["event"] == "began":
        return Standing("died", "the process ended without recording why; run it again to resume")
    lost = [need for need in stage.needs if need in others and others[need].state not in _FINE]
    if was_submitted:
        return Standing("cancelled", f"{lost[0]} did not end well" if lost else "")
    return Standing("to do")


def place(events: Sequence[Mapping[str, Any]]) -> str:
    """Returns the last place of the stage's command: nodes of a job, or a machine."""
    began = [event for event in events if event["event"] == "began"]
    return (began[-1].get("nodes") or began[-1]["host"]) if began else ""


def training_progress(folder: Path) -> tuple[str, str, str]:
    """Returns steps done of all, time left at the recent pace, and the last step's metrics."""
    from nemo_rod.lab.report.under_way import read_part  # needs NumPy

    part = read_part(folder, folder.name.removesuffix(".partial"))
    done, steps, left = part.done or 0, part.steps, ""
    seconds = part.metrics.values("timing/train/total", len(part.metrics) - _RECENT)
    if steps is not None and len(seconds):
        left = _clock(float(seconds.mean()) * (steps - done))
    return f"{done}/{steps or '?'}", left, part.last


def last_progress(log: Path) -> tuple[str, str, str]:
    """Returns progress, time left and note of the last progress line that a job printed."""
    with open_file(log) as file:
        file.seek(-min(MOST_BYTES, log.stat().st_size), os.SEEK_END)
        lines = file.read(MOST_BYTES).decode(errors="replace").splitlines()
    read = [match for line in reversed(lines) if (match := PROGRESS.match(line))]
    return (read[0]["far"], read[0]["left"] or "", read[0]["note"] or "") if read else ("", "", "")


def working_seconds(events: Sequence[Mapping[str, Any]]) -> float:
    """Returns the working time over all attempts."""
    seconds, began = 0.0, None
    for event in events:
        if event["event"] == "began":
            began = event["time"]
        elif began is not None:
            seconds, began = seconds + max(0.0, event["time"] - began), None  # clocks are set back
    return seconds


def time_left(config: Config) -> str:
    """Returns the time that a run still takes if one stage runs after the other; "" if unknown.

    It is the plan of the open stages, less the share of their steps that are done; where a model
    runs, times the pace of such stages that are done: their working time over their plan. Stages
    that read text or copy files are no measure of that.
    """
    from nemo_rod.lab.plan.command import make_plan
    from nemo_rod.lab.plan.plan_text import wall
    from nemo_rod.lab.report.under_way import read_part
    from nemo_rod.run.handover import partial
    from nemo_rod.run.stage_log import StageLog
    from nemo_rod.run.stages import Stages

    model = config.model
    if model.hf and not (model.shape or Path(model.hf).expanduser().is_dir()):
        return ""  # not worth asking the hub
    try:
        planned = {stage.name: stage.hours for stage in make_plan(config).stages}
    except ValueError:
        return ""
    of_models = others = worked = taken = 0.0
    for stage in Stages(config).all():
        hours = planned.get(stage.name, 0.0)
        seconds = working_seconds(StageLog(Path(config.run_dir), stage.name).events())
        if not stage.is_there() or stage.name in config.rebuild:
            begun = None if stage.name in config.rebuild else read_part(partial(stage.folder), "")
            if begun is not None and begun.steps is not None:
                hours *= max(0.0, 1 - (begun.done or 0) / begun.steps)
            of_models += hours * stage.runs_model
            others += hours * (not stage.runs_model)
        elif seconds and hours and stage.runs_model:
            worked, taken = worked + hours, taken + seconds / 3600
    left = others + of_models * (taken / worked if worked else 1.0)
    return wall(left) if left else ""


def _clock(seconds: float) -> str:
    clock = time.gmtime(max(seconds, 0.0))  # damage can make a duration negative
    return time.strftime("%H:%M:%S", clock) if seconds < 86400 else "over a day"
