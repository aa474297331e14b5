"""The stages that tokenise parts of the text before `prepare` joins them."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

from nemo_rod.config import section
from nemo_rod.lab.prepare.encoder import PARTS
from nemo_rod.lab.prepare.section import Prepare
from nemo_rod.run.handover import HandOver, Stage, partial
from nemo_rod.run.stages import Stages


def part_stages(stages: Stages) -> list[Stage]:
    """Returns a stage for each of `prepare.nodes` tasks, or one if the launcher has its own tasks.

    None if there is one task: `prepare` does it.

    Raises:
        ValueError: `prepare.task` is none of them.
    """
    config, results = stages.config, stages.results
    wanted, prepare = section(config, Prepare), stages.prepare()
    count, root = wanted.nodes, results.path / PARTS
    # jobs of a queue are tasks
    run_tasks = None if stages.launcher.submits else getattr(stages.launcher, "run_tasks", None)
    names = ["tasks"] if run_tasks else [f"{task + 1}_of_{count}" for task in range(count)]
    if wanted.task is not None and wanted.task > len(names):
        raise ValueError(
            f"prepare.task={wanted.task} is none of prepare.nodes={count} tasks: expected 1 to "
            f"{len(names)}."
        )

    def stage(number: int, name: str) -> Stage:
        def make(folder: Path) -> dict[str, Any]:
            from nemo_rod.lab.prepare.tasks import run_task

            if run_tasks is None:
                folders = [path for n in names for path in (root / n, partial(root / n))]
            else:
                folders = [folder / f"{task + 1}_of_{count}" for task in range(count)]
            trusted = config.model.trust_remote_code
            run = functools.partial(run_task, config.domain, count, folders, trusted)
            if run_tasks is None:
                return {"files": run(folder, number)}
            return {"files": sum(run_tasks(run, folders, config.domain.workers))}

        assert prepare.inputs is not None
        of = prepare.inputs
        hand_over = HandOver(f"prepare_{name}", root / name, of, make, checks_itself=True)
        title = f"tokenise text, part {name.replace('_', ' ')}"
        only = "" if run_tasks else f" prepare.task={number + 1}"
        return dataclasses.replace(
            hand_over.stage(f"prepare{only}", title, runs_model=False, extra="data"),
            feeds="prepare",
            is_alone=wanted.task is not None,
            is_done=lambda: prepare.is_done() or hand_over.is_done(),
        )

    chosen = [stage(number, name) for number, name in enumerate(names) if count > 1]
    return chosen if wanted.task is None else chosen[wanted.task - 1 :][:1]
