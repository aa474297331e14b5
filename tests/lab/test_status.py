"""`nemo-rod status`: where each stage of a run stands, from its files and from Slurm's answers."""

import contextlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import composed, nemo_rod

from nemo_rod.cli import path_parser
from nemo_rod.commands import run_stages
from nemo_rod.lab import status
from nemo_rod.lab.launches import read_launch
from nemo_rod.lab.plan.command import make_plan
from nemo_rod.lab.plan.plan_text import wall
from nemo_rod.lab.status import (
    Standing,
    bar,
    last_progress,
    place,
    stand,
    training_progress,
    working_seconds,
)
from nemo_rod.progress import Progress
from nemo_rod.run.handover import Stage
from nemo_rod.run.launch.local import Local
from nemo_rod.run.launch.queue import QueuedJob
from nemo_rod.run.launch.render import launch_folder, write_files
from nemo_rod.run.stage_log import StageLog
from nemo_rod.run.stages import Stages

BEGAN = {"event": "began", "time": 1.0, "host": "login", "nodes": "n[1-2]"}
STOPPED = {"event": "stopped", "time": 2.0, "why": "rod was asked to stop"}
FAILED = {"event": "failed", "time": 2.0, "why": "rank 3: no"}
DONE = {"event": "done", "time": 9.0}


def rod(*, is_there: bool = False) -> Stage:
    return Stage(
        name="rod", command="train arm=rod", title="train rod", needs=("base", "references_base"),
        folder=Path("arms/rod"), proof=(Path(__file__ if is_there else "nowhere"),),
        is_done=lambda: is_there, run=lambda: None,
    )  # fmt: skip


def queued(state: str, **more: str) -> QueuedJob:
    return QueuedJob(state, alive=True, **more)


REQUEUED = queued("PENDING", reason="BeginTime")
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "never begun": ({}, "to do", ""),
    "done here": ({"events": [BEGAN, DONE], "there": True}, "done", ""),
    "made before logs": ({"there": True}, "done", ""),
    "at work here": ({"events": [BEGAN], "held": True}, "running", ""),
    "killed here": ({"events": [BEGAN]}, "died", "ended without recording why"),
    "failed": ({"events": [BEGAN, FAILED]}, "failed", "rank 3: no"),
    "stopped here": ({"events": [BEGAN, STOPPED]}, "stopped", "asked to stop"),
    "waits for others": ({"job": queued("PENDING", reason="Dependency")}, "waiting", "for base"),
    "waits for nodes": ({"job": queued("PENDING", reason="Resources")}, "waiting", "(Resources)"),
    "preempted": ({"job": REQUEUED, "events": [BEGAN, STOPPED]}, "requeued", "asked to stop"),
    "its node failed": ({"job": REQUEUED, "events": [BEGAN]}, "requeued", ""),
    "runs": ({"job": queued("RUNNING"), "events": [BEGAN]}, "running", ""),
    "a new try": ({"job": queued("PENDING", reason="Priority"), "events": [BEGAN, FAILED]},
                  "waiting", "(Priority)"),
    "failed as a job": ({"job": QueuedJob("FAILED"), "events": [BEGAN, FAILED]}, "failed", "no"),
    "timed out": ({"job": QueuedJob("TIMEOUT"), "events": [BEGAN]}, "timeout", "logs/slurm"),
    "out of memory": ({"job": QueuedJob("OUT_OF_MEMORY"), "events": [BEGAN]}, "out_of_memory",
                      "logs/slurm"),
    "another failed": ({"job": QueuedJob("CANCELLED"), "base": "failed"}, "cancelled",
                       "base did not end well"),
    "another failed, and Slurm forgot": ({"number": True, "base": "failed"}, "cancelled", "base"),
    "taken out of the queue": ({"job": QueuedJob("CANCELLED")}, "cancelled", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_where_a_stage_stands(case):
    given, state, why = CASES[case]
    job = given.get("job")
    others = {"base": Standing(given.get("base", "to do")), "references_base": Standing("done")}
    standing = stand(
        rod(is_there=given.get("there", False)), given.get("events", []), job,
        given.get("number", job is not None), given.get("held", False), others,
    )  # fmt: skip
    assert standing.state == state and why in standing.why


def test_a_clock_that_was_set_back_takes_no_time_away():
    times = (("began", 50.0), ("stopped", 20.0), ("began", 30.0), ("done", 37.0))
    assert working_seconds([{"event": event, "time": time} for event, time in times]) == 7


def test_place_is_that_of_the_last_start():
    assert place([]) == ""
    assert place([BEGAN, STOPPED, {"event": "began", "host": "desk"}]) == "desk"
    assert place([BEGAN, DONE]) == "n[1-2]"


def test_progress_of_training_counts_and_estimates(tmp_path):
    (tmp_path / "job.json").write_text(json.dumps({"config": {"train": {"steps": 100}}}))
    (tmp_path / "metrics.jsonl").write_text("")
    assert training_progress(tmp_path) == ("0/100", "", "")
    rows = [
        {"step": step, "train/loss": 3.0, "rod/replay_share": 0.25, "train/lr": 1e-4}
        | {"timing/train/total": 500.0 if step < 20 else 60.0}  # the first ones were slow
        for step in range(40)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    far, left, last = training_progress(tmp_path)
    assert (far, left) == ("40/100", "01:00:00")
    assert last == "loss 3  replay 0.25  lr 0.0001"
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(json.dumps(rows[-1] | {"timing/train/total": -1e17}) + "\n")  # damaged
    assert training_progress(tmp_path)[1] == "00:00:00"
    (tmp_path / "job.json").write_text('{"config": {"train": {"steps": 0}}}')
    with pytest.raises(ValueError, match=r"job\.json is damaged .*steps=0"):
        training_progress(tmp_path)


def test_progress_of_other_jobs_is_what_they_printed(tmp_path):
    log = tmp_path / "references_base.log"
    log.write_text("timing:\n  progress: False\n")
    assert last_progress(log) == ("", "", "")
    with open(log, "a") as file, contextlib.redirect_stderr(file):
        progress = Progress("references/base", 100, unit="blocks", every_seconds=0)
        progress.step(0)
        assert last_progress(log) == ("0/100 blocks", "", "")
        progress.began -= 10
        progress.step(40)
    far, left, last = last_progress(log)
    assert (far, left, last) == ("40/100 blocks", "0:00:15", "4 blocks/s")


def test_a_bar_is_as_long_as_what_is_done():
    running = Standing("running")
    assert bar(running, "0/100 blocks") == "\u2591" * 20
    assert bar(running, "1,000/4,000 blocks") == "\u2588" * 5 + "\u2591" * 15
    assert bar(running, "99/100").count("\u2588") == 19  # full only when it is done
    assert bar(running, "") == bar(Standing("to do"), "") == "\u2591" * 20
    assert bar(Standing("done"), "in 00:10:00") == "\u2588" * 20


def launched(arm: str | None = None) -> None:
    """Leaves the files of a launch of RoD on this machine."""
    config = composed("recipe=toy", "arms=[rod]")
    config.arm = arm
    write_files(launch_folder(config), Local().render(config, Stages(config).all()))


def test_watching_shows_bars_until_it_is_ended(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    launched()
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(status.time, "sleep", sleep)
    parser = path_parser("status")
    status.main(parser.parse_args(["status", "runs/toy", "--watch", "every=7"]))
    shown = capsys.readouterr().out.split("\x1b[H\x1b[2J\x1b[3J")
    assert slept == [7, 7] and len(shown) == 3
    stages = shown[1].splitlines()[2:10]
    assert all("\u2591" * 20 in line for line in stages) and stages[0].startswith("prepare")


def test_a_report_is_to_do_until_all_that_it_shows_is_done():
    report = replace(rod(is_there=True), name="report", needs=("evaluate",), runs_model=False)
    for state, expected in (("done", "done"), ("to do", "to do"), ("running", "to do")):
        others = {"evaluate": Standing(state)}
        assert stand(report, [DONE], None, False, False, others).state == expected


def test_the_time_left_follows_the_pace_of_the_models_that_are_done(tmp_path, monkeypatch):
    config = composed("recipe=toy_synthetic", f"run_dir={tmp_path}", "plan.startup_seconds=0")
    stages = Stages(config).all()
    assert re.fullmatch(r"\d+ (s|min)", status.time_left(config))
    plan = make_plan(config)
    monkeypatch.setattr("nemo_rod.lab.plan.command.make_plan", lambda _: plan)  # of no blocks
    hours = {stage.name: stage.hours for stage in plan.stages}
    for stage, slower in zip(stages, (10_000, 100), strict=False):  # text to blocks, the base
        for file in stage.proof:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        log = StageLog(tmp_path, stage.name).path
        log.parent.mkdir(parents=True, exist_ok=True)
        events = [{"time": 0, "event": "began", "host": "x"}]
        events.append({"time": slower * 3600 * hours[stage.name] + 1e-9, "event": "done"})
        log.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    left = {s.name: hours.get(s.name, 0) * (100 if s.runs_model else 1) for s in stages[2:]}
    assert status.time_left(config) == wall(sum(left.values()))
    begun = tmp_path / "arms" / "rod.partial"  # of whose steps a quarter is done
    begun.mkdir(parents=True)
    (begun / "job.json").write_text('{"config": {"train": {"steps": 4}}}')
    (begun / "metrics.jsonl").write_text('{"step": 0, "timing/train/total": 1}\n')
    assert status.time_left(config) == wall(sum(left.values()) - 0.25 * left["rod"])


def test_a_run_on_nemo_rl_leaves_its_launch_for_status(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_stages, "_run_here", lambda *_, **__: None)
    monkeypatch.setattr(run_stages, "lacking", lambda stages, config: [])
    run_stages.run(composed("recipe=toy", "arms=[rod]", "launcher=nemo_rl"))
    shown = status.standing_text(Path("runs/toy")).splitlines()
    assert shown[0].startswith("toy in runs/toy, launcher=nemo_rl: 0 of 11 stages done")
    assert [line.split()[0] for line in shown[2:]][-3:] == ["evaluate", "controls", "report"]
    script = Path("runs/toy/launch/nemo_rl/run.sh").read_text()
    commands = [line for line in script.splitlines() if "nemo_rod.cli" in line]
    assert commands and all(line.endswith(" launcher.kind=nemo_rl") for line in commands)


def test_status_of_a_run_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = nemo_rod("status", "runs/toy")
    assert done.returncode == 2
    assert "runs/toy holds no launch" in done.stderr
    done = nemo_rod("status", "runs/toy", "--watch", f"every={10**12}")
    assert "is not valid: expected a whole number in [1, 86400]" in done.stderr
    launched()
    done = nemo_rod("status", "runs/toy")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("toy in runs/toy, launcher=local: ")
    stages = ["prepare", "base", "references_base", "no_replay", "references_specialist", "rod"]
    stages += ["fixed_like_rod", "schedule_like_rod", "evaluate", "controls", "report"]
    assert [line.split()[0] for line in lines[2:]] == stages
    assert {line.split(maxsplit=1)[1] for line in lines[2:]} == {"to do"}
    launched("fixed_50")  # launched alone, it is a part of the run all the same
    assert "fixed_50  " in nemo_rod("status", "runs/toy").stdout
    config = Path("runs/toy").rename("moved") / "launch" / "local" / "config.yaml"
    assert f"run_dir: {tmp_path}/runs/toy" in config.read_text()
    assert read_launch(Path("moved"))[1].run_dir == f"{tmp_path}/moved"
    Path("moved").rename("runs/toy")
    done = nemo_rod("status", "runs/toy", "--cancel")
    assert "runs/toy has no job in the queue" in done.stderr
