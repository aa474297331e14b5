"""Benchmark tasks of every arm: one resumable process per model."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

from nemo_rod.config import DTYPES, Config, section
from nemo_rod.files import flat, interpreting, read_json, remove, write_json
from nemo_rod.lab.tasks.lm_eval_job import TaskJob, check_installed, refuse_unknown, task_manager
from nemo_rod.lab.tasks.section import Tasks
from nemo_rod.run.handover import refuse_changes
from nemo_rod.run.model_jobs import ModelJobs
from nemo_rod.run.processes.torchrun import refuse_bad_ending, run_process

FILE = "tasks.json"
JOB, ANSWERED = "tasks.job.json", "tasks.answered.json"
PARTIAL = (JOB, ANSWERED, "tasks.answered.partial.json")  # left by an interrupted attempt


def wanted(config: Config) -> bool:
    """Returns whether the recipe has tasks."""
    tasks = section(config, Tasks)
    return bool(tasks.capabilities or tasks.held_out)


def check(config: Config) -> str:
    """Returns one line about the tasks of the recipe.

    Raises:
        ValueError: lm-eval or its backend is not installed, or a task is unknown to lm-eval or has
            no accuracy.
    """
    tasks = section(config, Tasks)
    check_installed(tasks.backend)
    if tasks.held_out:
        return f"tasks: {tasks.held_out} questions of each replay source's held-out blocks"
    names = [name for listed in tasks.capabilities.values() for name in listed]
    refuse_unknown(names, task_manager(tasks.include, names))
    return (
        f"tasks: all {len(names)} names of {len(tasks.capabilities)} capabilities are known "
        "to the installed lm-eval"
    )


def missing(jobs: ModelJobs, names: list[str]) -> list[str]:
    """Returns the arms without a `tasks.json`.

    Raises:
        ValueError: a result has another configuration or weights, or a package is not installed.
    """
    tasks = section(jobs.config, Tasks)
    check_installed(tasks.backend)
    pending = []
    for name in names:
        path = jobs.results.arm(name) / FILE
        if not path.exists():
            pending.append(name)
            continue
        recorded = read_json(path, "inputs", "configuration")
        with interpreting(path):
            earlier = {**recorded["inputs"], **flat({"tasks": recorded["configuration"]})}
        # Tasks from held-out blocks derive from the run's own blocks, whose digest is compared.
        same = recorded["configuration"]["capabilities"] if tasks.held_out else tasks.capabilities
        job = _job(jobs, name, path, dataclasses.replace(tasks, capabilities=same))
        now = {**flat({"tasks": json.loads(json.dumps(job.configuration()))}), **job.inputs}
        refuse_changes(path, earlier, now, advice="add rebuild=[evaluate] to run the tasks again")
    return pending


def measure(jobs: ModelJobs, names: list[str]) -> None:
    """Writes `tasks.json` for the arms without one, in one resumable process per model.

    Raises:
        ValueError: see `missing`.
        Stopped: the job was asked to stop; the answers so far are kept.
        RuntimeError: a process failed, with the reason.
    """
    if not (pending := missing(jobs, names)):
        return
    tasks, config = section(jobs.config, Tasks), jobs.config
    if tasks.held_out:
        from nemo_rod.corpus import load_tokenizer
        from nemo_rod.lab.tasks.held_out_questions import write_held_out_tasks

        tokenizer = load_tokenizer(
            config.domain.tokenizer,
            eod=config.domain.eod,
            trust_remote_code=config.model.trust_remote_code,
        )
        definitions = jobs.results.path / "tasks"
        remove(definitions, below=jobs.results.path)  # others' definitions may run functions
        capabilities = write_held_out_tasks(
            jobs.results.blocks, definitions, tokenizer, num_questions=tasks.held_out
        )
        include = str(definitions.absolute())
        tasks = dataclasses.replace(tasks, capabilities=capabilities, include=include)
    for name in pending:
        folder = jobs.results.arm(name)
        answered, file = folder / ANSWERED, folder / JOB
        job = _job(jobs, name, answered, tasks)
        write_json(file, dataclasses.asdict(job), below=folder.parent)
        log = jobs.results.log(f"tasks_{name}")
        module = "nemo_rod.lab.tasks.lm_eval_job"
        command = [sys.executable, "-P", "-m", module, str(file.absolute())]
        refuse_bad_ending(run_process(command, log, config.launcher), log)
        file.unlink()
        os.replace(answered, folder / FILE)


def _job(jobs: ModelJobs, name: str, out: Path, tasks: Tasks) -> TaskJob:
    model = jobs.config.model
    trusted = {"trust_remote_code": True} if model.trust_remote_code else {}
    arguments = {"dtype": DTYPES[model.precision], **trusted, **tasks.arguments}
    return TaskJob(
        name=name,
        model=str(jobs.results.checkpoint(name).absolute()),
        out=str(out.absolute()),
        tasks=dataclasses.replace(tasks, arguments=arguments),
        inputs={**jobs.results.measured(name), "tasks.held_out": tasks.held_out},
    )
