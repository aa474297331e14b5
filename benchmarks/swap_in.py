"""What a swapped-in selector costs a Megatron-Bridge job beside the scoring itself.

One job trains; every other step goes through the selector with `TakeAll` and multiplier 1, which
draws, identifies, passes on and records, but scores nothing. The two kinds of steps alternate, so
that whatever else the machine does meets both, and each is compared with its neighbour.

    python benchmarks/swap_in.py --json rows.json [--quick]
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from _rows import Row, Setting, run, under

RECIPE = Path(__file__).parent.parent / "recipes" / "swap_in" / "megatron_bridge"
WARM_UP = 6  # steps of each kind


def overhead(setting: Setting) -> Iterator[Row]:
    stock, selecting = step_seconds(setting.folder, pairs=12 if setting.quick else 60)
    ratio = float(np.median(selecting / stock))
    yield under("step with TakeAll, multiplier 1 / stock step", ratio, "x", 1.02)
    yield Row("stock step", 1e3 * float(np.median(stock)), "ms")


def step_seconds(folder: Path, *, pairs: int) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of neighbouring steps, without the selector and with it, float64 `[pairs]` each."""
    import torch
    import torch.distributed as dist

    from nemo_rod import cpu

    cpu.prepare()  # before the first import of Megatron-Bridge
    from nemo_rod.cpu import trainers

    trainers.install_megatron_bridge()
    sys.path.insert(0, str(RECIPE))
    import make_data  # type: ignore[import-not-found]
    from before import make_config  # type: ignore[import-not-found]
    from megatron.bridge.training import train
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    import nemo_rod
    from nemo_rod.hosts.job_record import JobRecord
    from nemo_rod.selection import Choice

    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}.items():
        os.environ.setdefault(name, str(value))
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        rendezvous = f"file://{folder}/rendezvous"
        dist.init_process_group(backend, init_method=rendezvous, rank=0, world_size=1)
    make_data.make(folder / "data", documents=2000)
    cfg = make_config(folder / "data", folder, ["new", "old"], steps=2 * (WARM_UP + pairs))
    cfg.model.num_layers, cfg.model.hidden_size, cfg.model.ffn_hidden_size = 4, 256, 1024
    cfg.model.seq_length = cfg.dataset.seq_length = 256
    cfg.train.eval_iters = 0
    cfg.checkpoint.save = cfg.checkpoint.load = None
    roles = {f"{folder}/data/new": "adaptation", f"{folder}/data/old": "replay"}
    seconds: dict[str, list[float]] = {"stock": [], "selecting": []}
    steps = {"stock": train.train_step}

    def timed(*args: Any, **kwargs: Any) -> Any:
        done = sum(map(len, seconds.values()))
        # stock, selecting; selecting, stock; ...: neither kind always comes first
        kind = "selecting" if done % 4 in (1, 2) else "stock"
        begin = time.perf_counter()
        result = steps[kind](*args, **kwargs)
        seconds[kind].append(time.perf_counter() - begin)
        return result

    numbers: dict[int, int] = {}

    def renumbered(call: Callable) -> Callable:
        """A record has every step, of which the job's are every other one."""

        def with_number(record: JobRecord, choice: Choice, *more: Any) -> Any:
            number = numbers.setdefault(choice.pool.step, 1 + len(numbers))  # after a stock one
            pool = dataclasses.replace(choice.pool, step=number)
            return call(record, dataclasses.replace(choice, pool=pool), *more)

        return with_number

    JobRecord.begin_step = renumbered(JobRecord.begin_step)  # type: ignore[method-assign]
    JobRecord.end_step = renumbered(JobRecord.end_step)  # type: ignore[method-assign]
    with nemo_rod.install(
        "megatron_bridge",
        cfg,
        roles=roles,
        policy=nemo_rod.TakeAll(),
        multiplier=1,
        out=folder / "rod",
    ):
        steps["selecting"], train.train_step = train.train_step, timed
        pretrain(cfg, forward_step)
    return np.array(seconds["stock"][WARM_UP:]), np.array(seconds["selecting"][WARM_UP:])


if __name__ == "__main__":
    run(__doc__, {"overhead": overhead})
