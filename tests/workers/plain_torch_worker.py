"""Trains a Hugging Face model by RoDBatches in plain PyTorch; every rank may run it.

    python tests/workers/plain_torch_worker.py SPEC.json

A run of the spec has `kind` "one", "ddp" or "fsdp2", `steps`, `references` and `out`; or `role`,
then it writes references with a model.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from nemo_rod.corpus import BlockStore
from nemo_rod.hosts.plain_torch import RoDBatches, write_references
from nemo_rod.roles import ROLES
from nemo_rod.selection import Candidates, References

BATCH = 8


def main(spec: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    for run in spec["runs"]:
        if "role" in run:
            model = wrapped(run["model"], run["kind"])
            store = BlockStore(spec["blocks"])
            write_references(model, store, run["out"], role=run["role"], micro_batch_size=3)
        else:
            train(BlockStore(spec["blocks"]), **run)
    if "RANK" in os.environ:
        dist.destroy_process_group()


def wrapped(folder: str, kind: str) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp2":
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        assert isinstance(model, FSDPModule)
    return model


def train(
    store: BlockStore, *, model: str, kind: str, out: str, references: list[str], lrs: list[float],
    micro_batch_size: int = 2, stop: int | None = None, policy: str = "joint",
) -> None:  # fmt: skip
    """Adam as Megatron's: no decay of vectors, gradients of norm 1 at most."""
    trained = wrapped(model, kind)
    roles = ("replay",) if policy == "mix" else ROLES
    pools = Candidates(
        num_adaptation=store.num_adaptation, num_replay=store.num_replay, batch_size=BATCH, seed=7,
    )  # fmt: skip
    batches = RoDBatches(
        trained, store, References.open(references, store, roles=roles), steps=stop or len(lrs),
        batch_size=BATCH, micro_batch_size=micro_batch_size, scoring_micro_batch_size=4,
        pools=pools, policy=policy, out=out, held_out=BlockStore(store.root, split="holdout"),
        validation_every=5,
    )  # fmt: skip
    parameters = list(trained.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lrs[0], betas=(0.9, 0.95), eps=1e-8)
    kept: dict[str, Any] = {"model": trained, "optimizer": optimizer, "batches": batches}
    checkpoint = Path(out) / f"checkpoint_{os.environ.get('RANK', 0)}.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=False)
        for name, item in kept.items():
            item.load_state_dict(state[name])
    replicas = dist.get_world_size() if dist.is_initialized() else 1
    accumulated = BATCH // micro_batch_size // replicas
    assert len(batches) == accumulated * batches.steps
    losses = []
    for number, batch in enumerate(batches, start=1):
        assert batch["input_ids"].shape == (micro_batch_size, store.block_size)
        loss = trained(**batch).loss / accumulated
        loss.backward()
        losses.append(loss.item())
        if number % accumulated == 0:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            for group in optimizer.param_groups:
                group["lr"] = lrs[batches.next_step - 1]
            optimizer.step()
            optimizer.zero_grad()
            batches.end_step({"train/loss": sum(losses)})
            losses = []
    if stop:
        torch.save({name: item.state_dict() for name, item in kept.items()}, checkpoint)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
