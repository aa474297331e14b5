"""Runs the stages of a rehearsal here or on a cluster, and says how each of them ended."""

from __future__ import annotations

import time
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

from nemo_rod.commands.text import say
from nemo_rod.config import Config
from nemo_rod.files import read_json
from nemo_rod.lab.rehearsal.rehearsal_stages import RehearsalStages
from nemo_rod.lab.rehearsal.rehearsal_table import DONE, FAILED, LEFT_OUT, Row
from nemo_rod.run.handover import Stage
from nemo_rod.run.launch import queue
from nemo_rod.run.launch.submit import submit
from nemo_rod.run.stage_log import StageLog
from nemo_rod.signals import Stopped

_SENTENCES = (ValueError, OSError, RuntimeError)  # errors that say what to do
_LOOK_SECONDS = 5.0  # between two looks at a queue


def carried_out(rehearsal: RehearsalStages) -> list[Row]:
    """Runs or submits the stages and waits for them; returns how each ended."""
    config, stages = rehearsal.config, rehearsal.all()
    if rehearsal.stages.launcher.submits:
        submit(rehearsal.stages, stages)
        rows = _waited_for(config, stages)
    else:
        rows = _run_here(config, stages)
    return [_with_finding(config, row) for row in rows]


def _run_here(config: Config, stages: list[Stage]) -> list[Row]:
    """Runs the stages one after the other; those that need one that failed are left out."""
    rows: dict[str, Row] = {}
    for number, stage in enumerate(stages, start=1):
        say(f"[{number}/{len(stages)}] {stage.title}")
        missing = [n for n in stage.needs if n in rows and rows[n].state != DONE]
        if missing:
            note = f"needs {', '.join(missing)}"
            rows[stage.name] = Row(name=stage.name, state=LEFT_OUT, note=note)
            continue
        record = StageLog(Path(config.run_dir), stage.name)
        start = time.monotonic()
        state, note = DONE, ""
        try:
            # the report prints its verdicts, which mean nothing here
            with record.only_one(), record.attempt(), redirect_stdout(StringIO()):
                stage.run()
        except Stopped:
            raise
        except Exception as error:  # whatever it is, the table says so, and the others still run
            kind = "" if isinstance(error, _SENTENCES) else f"{type(error).__name__}: "
            state, note = FAILED, kind + " ".join(str(error).split())
        rows[stage.name] = Row(
            name=stage.name, state=state, note=note, seconds=time.monotonic() - start
        )
    return list(rows.values())


def _waited_for(config: Config, stages: list[Stage]) -> list[Row]:
    """Waits for the end of the last submitted stage; what ran is in the stages' records."""
    while queue.alive(Path(config.run_dir)):
        time.sleep(_LOOK_SECONDS)
    rows: dict[str, Row] = {}
    for stage in stages:
        events = StageLog(Path(config.run_dir), stage.name).events()
        last = events[-1] if events else {}
        state = {"done": DONE, None: LEFT_OUT}.get(last.get("event"), FAILED)
        note = last.get("why", "")
        if state == LEFT_OUT:
            needed = [n for n in stage.needs if n in rows and rows[n].state != DONE]
            note = f"needs {', '.join(needed)}" if needed else "its job left no record"
        elif state == FAILED and not note:
            note = f"its job ended without a word: see {config.run_dir}/logs/slurm"
        began = [event["time"] for event in events if event["event"] == "began"]
        seconds = last["time"] - began[-1] if began else None
        rows[stage.name] = Row(name=stage.name, state=state, note=note, seconds=seconds)
    return list(rows.values())


def _with_finding(config: Config, row: Row) -> Row:
    """Adds what a stage of the rehearsal found, for its note."""
    if row.state != DONE or row.name != "losses":
        return row
    found = read_json(Path(config.run_dir) / "losses" / "losses.json", "difference")["difference"]
    worst = max(found, key=lambda name: found[name])
    note = (
        f"the exports of {len(found)} models reload; their losses are Hugging Face's to "
        f"{found[worst]:.1g} nats ({config.model.precision})"
    )
    return replace(row, note=note)
