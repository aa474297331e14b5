"""Trains a Hugging Face model on a recorded curriculum, by a plain loop without nemo_rod.

    nemo-rod curriculum materialise runs/toy/arms/rod --format parquet data
    python docs/examples/train_on_curriculum.py runs/toy/base/hf data trained

Every group of rows with one `step` is a batch.
"""

import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import AutoModelForCausalLM

LR, WARMUP, MICRO_BATCH = 3e-4, 50, 2


def rows(folder: Path) -> Iterable[dict[str, Any]]:
    """Returns the rows in the order of training."""
    files = sorted(map(str, folder.glob("part-*.parquet")))
    return datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)


def train(
    model: torch.nn.Module, data: Iterable[dict[str, Any]], rates: Iterator[float]
) -> Iterator[float]:
    """Makes one update per step of the data; yields its mean loss, in nats per token."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for _, batch in groupby(data, key=lambda row: row["step"]):
        ids = torch.tensor([row["input_ids"] for row in batch])
        total = 0.0
        for part in ids.split(MICRO_BATCH):
            loss = model(part, labels=part).loss * len(part) / len(ids)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group, rate in zip(optimizer.param_groups, [next(rates)] * 2, strict=True):
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        yield total


def main() -> None:
    base, data, out = map(Path, sys.argv[1:])
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    rates = (LR * min(1.0, step / WARMUP) for step in range(1, sys.maxsize))
    for step, loss in enumerate(train(model, rows(data), rates)):
        print(f"step {step}  loss {loss:.6f}", flush=True)
    model.save_pretrained(out)


if __name__ == "__main__":
    main()
