"""Any saved step of an arm as a Hugging Face checkpoint, and its evaluation.

    <run_dir>/exports/<arm>/step_<step>/hf  evaluation.json

The arm may still be in training: its checkpoints are read from where it works.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from nemo_rod.config import Parallel
from nemo_rod.files import read_json, write_json
from nemo_rod.jobs import ExportJob
from nemo_rod.run.base_model import checkpoint_digest
from nemo_rod.run.branches import find_checkpoint
from nemo_rod.run.handover import HandOver, Inputs, Stage, outputs, partial, read_record
from nemo_rod.run.held_out_losses import FILE, is_measured, measuring_losses, partial_folder
from nemo_rod.run.launch import launcher_of
from nemo_rod.run.model_jobs import ModelJobs
from nemo_rod.run.stages import Stages


def export_stages(stages: Stages) -> list[Stage]:
    """Returns the stage that exports `step` of `arm`, which must both be set."""
    jobs = stages.jobs
    name, step, folder = _find_export(jobs)

    def inputs() -> Inputs:
        folder = _training_folder(jobs, name)
        job = read_json(folder / "job.json", "config_digest", "config")
        own = {"arm": job["config_digest"], "seed": job["config"]["seed"], "step": step}
        records = [folder / file for file in ("manifest.json", "inputs.json")]  # finished, or not
        record = next((file for file in records if file.exists()), None)
        recorded = read_record(record, "inputs") if record else {}
        return own | {f"{name}.{key}": value for key, value in recorded.items()}

    def make(into: Path) -> dict[str, Any]:
        trained, train = _training_folder(jobs, name), jobs.settings(name).train
        job = jobs.job(
            ExportJob,
            f"export_{name}_{step}",
            into,
            config=dataclasses.replace(jobs.config, parallel=Parallel(), train=train),
            start=read_json(trained / "job.json", "start")["start"],
            saved=str(find_checkpoint(trained, step)),
        )
        jobs.run(job, into)
        return {"weights": checkpoint_digest(into / "hf")}

    stage = HandOver(f"export_{name}_{step}", folder, inputs, make).stage(
        f"export arm={name} step={step}",
        f"export {name} at step {step}, to {folder / 'hf'}",
        needs=(name,),
    )
    return [stage]


def evaluate_stages(stages: Stages) -> list[Stage]:
    """Returns the stages that export a step and measure its held-out losses."""
    jobs = stages.jobs
    name, step, folder = _find_export(jobs)
    file, stage = folder / FILE, f"evaluate_{name}_{step}"

    def inputs() -> Inputs:
        made_by = f"{jobs.results.command('export')} arm={name} step={step}"
        weights = outputs(folder, made_by=made_by, keys={"weights": str})["weights"]
        return {"model": weights, "blocks": jobs.results.block_counts()["digest"]}

    def run() -> None:
        current = inputs()
        with measuring_losses(jobs, {name: folder / "hf"}, folder, {name: current}) as losses:
            write_json(file, losses[name] | {"arm": name, "step": step, "inputs": current})

    measuring = Stage(
        name=stage,
        command=f"evaluate arm={name} step={step}",
        title=f"evaluate {name} at step {step}",
        folder=folder,
        proof=(file,),
        is_done=lambda: file.exists() and is_measured(file, inputs(), stage),
        run=run,
        results=(file, partial_folder(folder)),
        needs=(f"export_{name}_{step}",),
    )
    return [*export_stages(stages), measuring]


def _find_export(jobs: ModelJobs) -> tuple[str, int, Path]:
    """Returns the arm, its step and the folder of its export."""
    config = jobs.config
    if config.arm is None or config.step is None:
        there = [name for name in config.arms if (jobs.results.arm(name) / "hf").is_dir()]
        names = [config.arm] if config.arm in there else there
        folders = ", ".join(str(jobs.results.checkpoint(name)) for name in names)
        last = f"; the last step is exported already: {folders}" if names else ""
        raise ValueError(
            f"An earlier step needs its arm and its number, such as arm=rod step=1200{last}."
        )
    if not launcher_of(config).exports(config.arm):
        raise ValueError(
            f"launcher={config.launcher.kind} does not export a step: NeMo-RL's "
            "examples/converters convert its checkpoints."
        )
    folder = jobs.results.path / "exports" / config.arm / f"step_{config.step}"
    return config.arm, config.step, folder


def _training_folder(jobs: ModelJobs, name: str) -> Path:
    """Returns the folder of an arm; of one in training, its partial folder."""
    folder = jobs.results.base if name == "base" else jobs.results.arm(name)
    for candidate in (folder, partial(folder)):
        if (candidate / "job.json").exists():
            return candidate
    command = jobs.results.command("train")
    raise ValueError(f"{folder} is not there yet: run `nemo-rod {command} arm={name}` first.")
