"""What a step of RoD costs beside a plain one in plain PyTorch, and on the Megatron road.

A RoD step and a plain step (`TakeAll`, multiplier 1) of one model take turns, so that whatever else
the machine does meets both; ratios are of neighbours, the median over the rounds. Model, batch and
store are those of `recipe=toy`. The same ratio of the Megatron road, measured in the same run by
`step.py`, stands beside it. Times on a CPU are the processor's.

    limit    1 + m * forward / plain: scoring as fast as a forward pass of training

    python benchmarks/plain_torch.py --json rows.json [--quick]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from _rows import Row, Setting, run, under
from step import CASES, make_job, measure
from transformers import AutoModelForCausalLM

from nemo_rod import BlockStore, Candidates, References, RoDBatches, TakeAll
from nemo_rod.jobs import TrainJob, read_job

WARM_UP = 3  # rounds


def steps(setting: Setting) -> Iterator[Row]:
    rounds = 8 if setting.quick else 30
    file = make_job(setting.folder, CASES["single"])
    job = read_job(file)
    assert isinstance(job, TrainJob)
    torch.set_num_threads(1)
    seconds = plain_torch_seconds(job, rounds)
    ratio = np.median(seconds["rod"] / seconds["plain"])
    limit = 1 + 2 * np.median(seconds["forward"] / seconds["plain"])
    yield Row("rod_over_plain plain_torch", float(ratio), "x")
    yield Row("limit plain_torch", float(limit), "x")
    yield under("rod_over_limit plain_torch", float(ratio / limit), "x", 1.03)
    megatron = measure(file, rounds=10 if setting.quick else 40)
    theirs = np.median(megatron["rod"] / megatron["plain"])
    yield Row("rod_over_plain megatron", float(theirs), "x")
    yield under("plain_torch_over_megatron rod_over_plain", float(ratio / theirs), "x", 1.1)
    for kind in ("plain", "rod"):
        yield Row(f"ms {kind} plain_torch", 1e3 * float(np.median(seconds[kind])), "ms")


def plain_torch_seconds(job: TrainJob, rounds: int) -> dict[str, np.ndarray]:
    """Processor seconds of every round, float64 `[rounds]`, by kind of step."""
    model: Any = AutoModelForCausalLM.from_pretrained(job.start, dtype=torch.float32)
    store, o = BlockStore(job.blocks), job.config.train
    references = References.open(job.references, store)
    optimizer = torch.optim.AdamW(model.parameters(), lr=o.lr)

    def batches(policy: TakeAll | None, multiplier: float) -> RoDBatches:
        pools = Candidates(
            num_adaptation=store.num_adaptation, num_replay=store.num_replay,
            batch_size=o.batch_size, multiplier=multiplier, balance="exact",
        )  # fmt: skip
        return RoDBatches(
            model, store, references, steps=WARM_UP + rounds, batch_size=o.batch_size,
            micro_batch_size=o.micro_batch_size, policy=policy, pools=pools,
            scoring_micro_batch_size=job.config.scoring.micro_batch_size,
        )  # fmt: skip

    chosen, taken = iter(batches(None, 2)), iter(batches(TakeAll(), 1))
    count = o.batch_size // o.micro_batch_size

    def train(source: Iterator[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        for _ in range(count):
            batch = next(source)
            (model(**batch).loss / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        return batch

    def timed(action: Callable[[], Any]) -> tuple[float, Any]:
        clock = time.perf_counter if torch.cuda.is_available() else time.process_time
        begin = clock()
        result = action()
        return clock() - begin, result

    def losses(batch: Any) -> Any:
        return [model(**batch).loss for _ in range(count)]

    rows = []
    for _ in range(WARM_UP + rounds):
        rod, _ = timed(lambda: train(chosen))
        plain, batch = timed(lambda: train(taken))
        with torch.no_grad():
            forward, _ = timed(partial(losses, batch))
        rows.append((rod, plain, forward))
    return dict(zip(("rod", "plain", "forward"), np.array(rows[WARM_UP:]).T, strict=True))


if __name__ == "__main__":
    run(__doc__, {"steps": steps})
