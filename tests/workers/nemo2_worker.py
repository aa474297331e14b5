"""Runs one job of `recipes/swap_in/nemo2`, with or without the selector: ... nemo2_worker.py SPEC

The specification is a JSON object with the arguments of `one_run`. `on_cpu nemo2` runs it.
"""

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from job_notes import note_step
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

RECIPE = Path(__file__).parents[2] / "recipes" / "swap_in" / "nemo2"
sys.path.insert(0, str(RECIPE))

from before import make_job  # noqa: E402
from nemo import lightning as nl  # noqa: E402
from nemo.collections import llm  # noqa: E402

import nemo_rod  # noqa: E402
from nemo_rod.hosts import swap_in  # noqa: E402

ROLES = {0: "adaptation", 1: "replay"}


def one_run(
    root: str,
    name: str,
    kind: str,
    *,
    steps: int,
    base: str | None = None,  # run whose last checkpoint it starts from, or scores with
    corpora: list[str] = ["new", "old"],  # noqa: B006
    role: str = "",
    die_at: int | None = None,  # the step, from 0, after which the process kills itself
) -> None:
    """One job: kind "stock", "take_all", "joint", or "score" for references of one role."""
    out = Path(root, name)
    job = make_job(Path(root, "data"), out, steps=steps, corpora=tuple(corpora))
    job["trainer"].callbacks.append(Watch(out, die_at))
    parts = job["model"], job["data"], job["trainer"]
    checkpoint = None
    if base is not None:
        (checkpoint,) = Path(root, base, "job", "checkpoints").glob("*-last")
        job["resume"].restore_config = nl.RestoreConfig(path=str(checkpoint))
    if kind == "score":
        swap_in.reference("nemo2", *parts, role=role, roles=ROLES, checkpoint=checkpoint, out=out)
        return
    if kind != "stock":
        joint = kind == "joint"
        nemo_rod.install(
            "nemo2", *parts, roles=ROLES,
            references=[Path(root, f"refs_{name}") for name in corpora] if joint else (),
            policy=nemo_rod.Joint() if joint else nemo_rod.TakeAll(), multiplier=2 if joint else 1,
            out=out / "rod", validation_every=None if joint else 0,
        )  # fmt: skip
        job["trainer"].loggers = [Lines(out)]
    llm.pretrain(**job)


class Lines(Logger):
    """Writes some of the metrics of every call to `logged.jsonl`."""

    name, version = "lines", 0

    def __init__(self, out: Path) -> None:
        self.out = out

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        ours = ("at_a_glance/", "rod_by_source/")
        known = {name: value for name, value in metrics.items() if name.startswith(ours)}
        self.out.mkdir(parents=True, exist_ok=True)
        with open(self.out / "logged.jsonl", "a") as file:
            file.write(json.dumps({**({"done": step} if known else {}), **known}) + "\n")


class Watch(Callback):
    """Writes loss and gradient norm of every step, and what was read for what."""

    def __init__(self, out: Path, die_at: int | None) -> None:
        self.out, self.die_at = out, die_at
        self.read: dict[str, list[int]] = {}

    def on_megatron_microbatch_start(self, step: Any, batch: Any, **_: Any) -> None:
        scoring = not step.forward_only and not torch.is_grad_enabled()
        purpose = "validation" if step.forward_only else "scoring" if scoring else "training"
        self.read.setdefault(purpose, []).append(zlib.crc32(batch["tokens"].numpy().tobytes()))

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        names, row = {"loss": "reduced_train_loss", "grad_norm": "grad_norm"}, None
        if trainer.global_rank == 0:
            known = trainer.callback_metrics
            row = {name: float(known[key]) for name, key in names.items()} | {"read": self.read}
        note_step(self.out, row, step=trainer.global_step - 1, die_at=self.die_at)


if __name__ == "__main__":
    one_run(**json.loads(sys.argv[1]))
