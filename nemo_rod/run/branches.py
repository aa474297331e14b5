"""Branches: arms that begin with the first steps of another one, their trunk.

    variants:
      rod_end_4k: {of: rod, at: 4000, anneal: 400}
      rod_longer: {of: rod, at: 4000, steps: 12000}

A branch copies the trunk's checkpoint, curriculum and metrics, and goes on as if it had been killed
after that step. So it is the arm that an unbroken run with its schedule would be, for the price of
the steps after `at`.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from nemo_rod.config import Optimisation, Variant
from nemo_rod.files import remove, write_whole
from nemo_rod.selection import Curriculum
from nemo_rod.selection.held_out import START_FILE

_CONFIG = "run_config.yaml"  # a checkpoint's file; it identifies the run's data


def find_checkpoint(trained: Path, step: int) -> Path:
    """Returns the folder of an arm's checkpoint.

    Raises:
        ValueError: there is no checkpoint; the message names those that exist.
    """
    checkpoints = {
        int(match[1]): path
        for path in trained.glob("checkpoints/iter_*")
        if (match := re.fullmatch(r"iter_(\d+)", path.name)) and (path / "metadata.json").exists()
    }
    if step not in checkpoints:
        steps = ", ".join(map(str, sorted(checkpoints))) or "none"
        raise ValueError(
            f"step={step} has no checkpoint in {trained / 'checkpoints'}: expected one of {steps}; "
            "checkpoint.every and checkpoint.keep say which ones a run saves and keeps."
        )
    return checkpoints[step]


def begin(folder: Path, trunk: Path, step: int, config_digest: str) -> None:
    """Fills the folder of a branch with the first steps of its trunk, unless that is done.

    Args:
        folder: where the branch is trained.
        trunk: the finished arm.
        step: updates of the trunk that it begins with.
        config_digest: of the branch, for its curriculum and its checkpoint.

    Raises:
        ValueError: the trunk has kept no checkpoint of the step.
    """
    if (folder / "checkpoints").exists():
        return
    saved = find_checkpoint(trunk, step)
    with Curriculum.open(trunk / "curriculum.rod", read_only=True) as recorded:
        header = replace(recorded.header, config=config_digest)
        remove(folder / "curriculum.rod", below=folder)
        Curriculum.create(folder / "curriculum.rod", header, recorded.records()[:step]).close()
    for name in ("metrics.jsonl", START_FILE):  # training drops the steps that come later
        if (trunk / name).exists():
            write_whole(folder / name, (trunk / name).read_bytes(), below=folder)
    unfinished = folder / "checkpoints.partial"
    remove(unfinished, below=folder)
    copied = unfinished / saved.name
    shutil.copytree(saved, copied, copy_function=_link)
    values: Any = yaml.safe_load((saved / _CONFIG).read_bytes())
    values["dataset"]["identity"]["config"] = config_digest
    write_whole(copied / _CONFIG, yaml.safe_dump(values).encode(), below=folder)
    os.replace(unfinished, folder / "checkpoints")


def schedule(where: str, branch: Variant, trunk: Optimisation, begins: int) -> Optimisation:
    """Returns the schedule of a branch of an arm: the trunk's up to `at`, then its own.

    Raises:
        ValueError: `at`, `anneal`, the length, the trunk and the step where it `begins` do not fit.
    """
    at, anneal, first = branch.at or 0, branch.anneal, max(trunk.warmup, begins)
    if anneal is None and branch.steps is None:
        raise ValueError(f"{where}.at={at} is set alone: set anneal, steps or both.")
    steps = branch.steps or at + (anneal or 0)
    decay = min(trunk.decay if anneal is None else anneal, steps)
    last = min(trunk.steps - trunk.decay, steps - decay)
    if not first <= at <= last:
        raise ValueError(
            f"{where}.at={at} is not valid: expected {first} to {last}, where the learning "
            f"rate of {branch.of} and of the branch is constant."
        )
    return replace(trunk, steps=steps, warmup_steps=trunk.warmup, decay_steps=decay)


def _link(source: str, target: str) -> None:
    """Links a file, which no trainer changes once it is written, or copies it."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without links
        shutil.copyfile(source, target)
