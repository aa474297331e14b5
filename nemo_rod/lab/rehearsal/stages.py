"""The stages of a rehearsal, and how they are run or submitted.

The recipe's own stages stand between making their materials and comparing the exported models.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from nemo_rod.commands.text import say
from nemo_rod.config import Config
from nemo_rod.files import read_json, write_json
from nemo_rod.jobs import CheckJob
from nemo_rod.lab.rehearsal.derive import Places
from nemo_rod.lab.rehearsal.materials import make_materials
from nemo_rod.lab.rehearsal.table import DONE, FAILED, LEFT_OUT, Row
from nemo_rod.run.handover import Stage
from nemo_rod.run.launch import queue
from nemo_rod.run.launch.submit import submit
from nemo_rod.run.processes.pythons import python_with_megatron, sees_gpu
from nemo_rod.run.processes.torchrun import refuse_bad_ending, run_process
from nemo_rod.run.stage_log import StageLog
from nemo_rod.run.stages import Stages
from nemo_rod.signals import Stopped

_SENTENCES = (ValueError, OSError, RuntimeError)  # errors with a complete message
_POLL_SECONDS = 5.0  # between two queries of a queue


class RehearsalStages:
    """Builds the stages of a rehearsal."""

    def __init__(self, config: Config) -> None:
        self.config, self.folder = config, Path(config.run_dir)
        self.places, self.stages = Places(self.folder), Stages(config)

    def all(self) -> list[Stage]:
        """Returns every stage, in an order in which they can run."""
        materials, (prepare, *others) = self.materials(), self.stages.all()
        first = [materials, _after(prepare, materials)]
        if self.config.model.hf is not None and self.stages.launcher.bridge:
            first.append(self.model())
        return [*first, *(_after(stage, *first) for stage in others), self.losses()]

    def materials(self) -> Stage:
        """Returns the stage that makes documents, tokenizers and the small base."""
        manifest = self.places.made / "manifest.json"

        def make() -> None:
            make_materials(self.folder)
            write_json(manifest, {})

        title = "documents, tokenizer and small base"
        return _stage("materials", title, manifest, make, runs_model=False)

    def model(self) -> Stage:
        """Returns the stage that builds the model as training would."""
        folder = self.folder / "model"

        def build() -> None:
            folder.mkdir(exist_ok=True)
            jobs, start = self.stages.jobs, str(self.places.checkpoint)
            jobs.run(jobs.job(CheckJob, "model", folder, start=start), folder)
            described = read_json(self.places.checkpoint / "config.json")
            kinds = (described.get("text_config") or described).get("layer_types") or ()
            if sees_gpu() and "linear_attention" in kinds:  # at the shape of the real model
                log = self.stages.results.log("delta_net")
                command = [python_with_megatron(), "-P", "-m", "nemo_rod.lab.delta_net_probe"]
                refuse_bad_ending(run_process(command, log, self.config.launcher), log)

        title = "build the model in its layout"
        return _stage("model", title, folder / "model.json", build, needs=("prepare",))

    def losses(self) -> Stage:
        """Returns the stage that compares the losses of every export with Hugging Face's."""
        out = self.folder / "losses" / "losses.json"

        def compare() -> None:
            out.parent.mkdir(exist_ok=True)
            file, log = out.with_name("job.json"), self.stages.results.log("losses")
            job = {
                "run_dir": str(self.folder),
                "arms": ["base", *(name for name in self.config.arms if name != "base")],
                "recipe": self.config.recipe,
                "precision": self.config.model.precision,
                "out": str(out),
            }
            write_json(file, job)
            module = "nemo_rod.lab.rehearsal.exported_losses"
            command = [sys.executable, "-P", "-m", module, str(file)]
            refuse_bad_ending(run_process(command, log, self.config.launcher), log)

        title = "compare with Hugging Face's losses of the exports"
        return _stage("losses", title, out, compare, needs=("evaluate",))


def _stage(
    name: str,
    title: str,
    proof: Path,
    run: Callable[[], None],
    *,
    needs: tuple[str, ...] = (),
    runs_model: bool = True,
) -> Stage:
    return Stage(
        name=name,
        command=f"rehearse rehearsal.part={name}",
        title=title,
        folder=proof.parent,
        proof=(proof,),
        is_done=proof.exists,
        run=run,
        needs=needs,
        runs_model=runs_model,
    )


def _after(stage: Stage, *others: Stage) -> Stage:
    names = dict.fromkeys([*stage.needs, *(other.name for other in others)])
    return dataclasses.replace(stage, needs=tuple(names))


def run_stages(config: Config) -> list[Row]:
    """Runs or submits the stages of a rehearsal and waits for them; returns their states."""
    rehearsal = RehearsalStages(config)
    stages = rehearsal.all()
    if rehearsal.stages.launcher.submits:
        submit(rehearsal.stages, stages)
        while queue.alive(rehearsal.folder):
            time.sleep(_POLL_SECONDS)
        rows = _recorded(rehearsal.folder, stages)
    else:
        rows = _run_here(rehearsal.folder, stages)
    if (losses := rows["losses"]).state == DONE:
        file = rehearsal.folder / "losses" / "losses.json"
        difference = read_json(file, "difference")["difference"]
        note = (
            f"the exports of {len(difference)} models reload; their losses are Hugging Face's to "
            f"{max(difference.values()):.1g} nats ({config.model.precision})"
        )
        rows["losses"] = dataclasses.replace(losses, note=note)
    return list(rows.values())


def _run_here(folder: Path, stages: list[Stage]) -> dict[str, Row]:
    """Runs stages one after the other; those that need a failed one are left out."""
    rows: dict[str, Row] = {}
    for number, stage in enumerate(stages, start=1):
        say(f"[{number}/{len(stages)}] {stage.title}")
        if missing := _missing(stage, rows):
            note = f"needs {', '.join(missing)}"
            rows[stage.name] = Row(name=stage.name, state=LEFT_OUT, note=note)
            continue
        record, start = StageLog(folder, stage.name), time.monotonic()
        state, note = DONE, ""
        try:
            # the report prints its verdicts, which mean nothing here
            with record.only_one(), record.attempt(), redirect_stdout(StringIO()):
                stage.run()
        except Stopped:
            raise
        except Exception as error:  # shown in the table; the other stages still run
            kind = "" if isinstance(error, _SENTENCES) else f"{type(error).__name__}: "
            state, note = FAILED, kind + " ".join(str(error).split())
        seconds = time.monotonic() - start
        rows[stage.name] = Row(name=stage.name, state=state, note=note, seconds=seconds)
    return rows


def _recorded(folder: Path, stages: list[Stage]) -> dict[str, Row]:
    """Returns the states of submitted stages, from their records."""
    rows: dict[str, Row] = {}
    for stage in stages:
        events = StageLog(folder, stage.name).events()
        last = events[-1] if events else {}
        state = {"done": DONE, None: LEFT_OUT}.get(last.get("event"), FAILED)
        note = last.get("why", "")
        if state == LEFT_OUT:
            missing = _missing(stage, rows)
            note = f"needs {', '.join(missing)}" if missing else "its job left no record"
        elif state == FAILED and not note:
            note = f"its job ended without a record of the reason: see {folder}/logs/slurm"
        starts = [event["time"] for event in events if event["event"] == "began"]
        seconds = last["time"] - starts[-1] if starts else None
        rows[stage.name] = Row(name=stage.name, state=state, note=note, seconds=seconds)
    return rows


def _missing(stage: Stage, rows: dict[str, Row]) -> list[str]:
    return [name for name in stage.needs if name in rows and rows[name].state != DONE]
