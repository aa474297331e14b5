"""One process of the job whose steps are measured: torchrun _step_worker.py JOB ROUNDS OUT."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

import nemo_rod.megatron  # noqa: F401  makes Megatron importable without CUDA
from nemo_rod.config import Checkpoint
from nemo_rod.corpus.store import BlockStore
from nemo_rod.jobs import TrainJob, read_job
from nemo_rod.selection import Choice, Curriculum, CurriculumHeader, Selector, choose
from nemo_rod.selection.arms import Arm, curriculum_header
from nemo_rod.selection.curriculum.journal import Journal
from nemo_rod.selection.policies import reference_roles
from nemo_rod.selection.references import References

WARM_UP = 4  # rounds
# plain has transfer and mix beside it, whatever the turn begins with
KINDS = ("transfer", "plain", "mix", "rod", "prefix_half", "prefix_quarter", "forward")
PREFIXES = {"rod": "1", "prefix_half": "1/2", "prefix_quarter": "1/4"}


class Clock:
    """Seconds of named parts, added up until they are taken.

    On a CPU it is the processor's time of this rank, so that other work on the machine, and waiting
    for other ranks that are held up by it, do not count; on a GPU wall time.
    """

    def __init__(self) -> None:
        self.now = time.perf_counter if torch.cuda.is_available() else time.process_time
        self.parts: dict[str, float] = defaultdict(float)

    def around(self, name: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = self.now()
            try:
                return function(*args, **kwargs)
            finally:
                self.parts[name] += self.now() - begin

        return timed

    def in_thread(self, name: str, function: Callable) -> Callable:
        """The same of a function that another thread runs while the step goes on."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            result = function(*args, **kwargs)
            self.parts[name] += time.thread_time() - begin
            return result

        return timed

    def reading(self, function: Callable[..., Iterator]) -> Callable[..., Iterator]:
        def timed(*args: Any, **kwargs: Any) -> Iterator:
            batches = function(*args, **kwargs)
            following = self.around("reading", lambda: next(batches, None))
            while (batch := following()) is not None:
                yield batch

        return timed

    def take(self) -> dict[str, float]:
        parts, self.parts = self.parts, defaultdict(float)
        return parts


def main() -> None:
    from megatron.bridge.training import train as loop
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    from nemo_rod.megatron import batches
    from nemo_rod.megatron import rod_selector as selector
    from nemo_rod.megatron.bridge_config import bridge_config
    from nemo_rod.megatron.identity import header_identity
    from nemo_rod.megatron.models import model_provider
    from nemo_rod.megatron.scoring import scorer as losses

    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    job, rounds, out = read_job(Path(sys.argv[1])), int(sys.argv[2]), Path(sys.argv[3])
    assert isinstance(job, TrainJob)
    steps = len(KINDS) * (WARM_UP + rounds)
    job = dataclasses.replace(
        job,
        out=tempfile.mkdtemp(dir=out.parent),
        config=dataclasses.replace(
            job.config,
            train=dataclasses.replace(job.config.train, steps=steps),
            checkpoint=Checkpoint(every=10 * steps),
        ),
    )
    store, arm = BlockStore(job.blocks), job.arm
    references = References.open(job.references, store)
    clock = Clock()

    # before there is any selector: each takes it along
    Selector._draw = clock.in_thread("ahead", Selector._draw)  # type: ignore[method-assign]

    def selecting(arm: Arm) -> Any:
        length = arm.scored_length(store.block_size)
        opened = References.open(job.references, store, length=length)
        compares = reference_roles(arm.needs)
        chooses = Selector.for_arm(arm, store, opened if compares else None, steps=steps)
        return selector.RoDSelector(
            chooses, store, scoring_micro_batch_size=job.config.scoring.micro_batch_size
        )

    header = curriculum_header(arm, store, references, config="benchmark")
    recorded = Path(job.out) / "recorded.rod"
    if dist.get_rank() == 0:
        record_all(recorded, arm, header, steps)
    folders: list[Any] = [recorded]
    dist.broadcast_object_list(folders)
    plain_arm = dataclasses.replace(arm, balance="corpus", multiplier=1.0, kappa=None)
    transfer_arm = dataclasses.replace(plain_arm, recorded=str(folders[0]))
    mix_arm = dataclasses.replace(arm, policy_name="mix")
    without_scoring = {"plain": plain_arm, "transfer": transfer_arm, "mix": mix_arm}
    selectors = {kind: selecting(arm) for kind, arm in without_scoring.items()} | {
        kind: selecting(dataclasses.replace(arm, prefix=p)) for kind, p in PREFIXES.items()
    }
    wrapped = {kind: s.wrap(loop.train_step) for kind, s in selectors.items()}
    wrapped["forward"] = with_forward_alone(
        selecting(plain_arm).wrap(loop.train_step), inspect.signature(loop.train_step), clock
    )
    journal = Journal(Path(job.out), header, step=0) if dist.get_rank() == 0 else None
    rows: dict[str, list[float]] = defaultdict(list)

    def begin_record(choice: Choice) -> None:
        begin = time.perf_counter()
        if journal is not None:
            journal.begin(choice)
        clock.parts["recording"] += time.perf_counter() - begin

    ended: list[Choice] = []
    selectors["rod"].on_choice = begin_record
    selectors["rod"].on_step = lambda choice, seconds: ended.append(choice)

    def timed(*args: Any, **kwargs: Any) -> Any:
        done, turn = divmod(len(rows["order"]), len(KINDS))
        order = KINDS if done % 2 else KINDS[::-1]  # neither of two neighbours always comes first
        kind = order[turn]
        rows["order"].append(0.0)
        synchronise()
        clock.take()
        wall, begin = time.perf_counter(), clock.now()
        result = wrapped[kind](*args, **kwargs)
        synchronise()
        seconds, parts = clock.now() - begin, clock.take()
        wall = time.perf_counter() - wall
        if kind in ("plain", "rod"):
            rows[f"{kind} on the wall"].append(wall)
        if kind == "forward":
            seconds = parts["forward"]
        if kind == "rod":
            choice = ended[-1]
            begin = time.perf_counter()  # also on a CPU: it waits for the disk
            if journal is not None:
                record(journal, choice, wall)
            parts["recording"] += time.perf_counter() - begin
            # reading what is trained on belongs to the update, in a plain step as well
            parts["reading"] = parts["read to score"]
            parts["model"] = parts["scoring pass"] - parts["reading"]
            rows["outside"].append(parts["choose"] - parts["model"] + parts["recording"])
            rows["scoring"].append(parts["model"])
            for part in ("reading", "recording", "ahead"):
                rows[part].append(parts[part])
            for part in ("lookup", "selection"):
                rows[part].append(choice.seconds[part])
        rows[kind].append(seconds)
        return result

    def choose_of_round(selector: Selector, step: int, scorer: Any) -> Choice:
        """Of each kind, steps follow each other."""
        return plain_choose(selector, step // len(KINDS), scorer)

    def scoring_pass(*args: Any, **kwargs: Any) -> Any:
        """The real one; what was read until it ends was read to score."""
        result = plain_pass(*args, **kwargs)
        synchronise()
        clock.parts["read to score"] += clock.parts.pop("reading", 0.0)
        return result

    plain_pass, plain_choose = vars(losses)["scoring_pass"], Selector.choose
    _, provider = model_provider(
        job.start, job.parallel, job.config.model, block_size=store.block_size
    )
    config = bridge_config(job, provider, store, header_identity(header))
    config.checkpoint.save = config.checkpoint.load = None
    config.train.exit_signal_handler = False
    with (
        patch.object(loop, "train_step", timed),
        patch.object(Selector, "choose", clock.around("choose", choose_of_round)),
        patch.object(losses, "scoring_pass", clock.around("scoring pass", scoring_pass)),
        patch.object(batches, "micro_batches", clock.reading(batches.micro_batches)),
    ):
        pretrain(config, forward_step)
    write(out, rows, arm)


def with_forward_alone(
    train_step: Callable, signature: inspect.Signature, clock: Clock
) -> Callable:
    """A step whose schedule first goes forward, as training does, and not back."""

    def step(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs).arguments
        schedule = call["forward_backward_func"]

        def forward_first(**options: Any) -> Any:
            batches = list(options["data_iterator"])
            alone = options | {"data_iterator": iter(batches), "forward_only": True}

            def forward() -> None:
                schedule(**alone)
                synchronise()

            synchronise()
            clock.around("forward", forward)()
            return schedule(**options | {"data_iterator": iter(batches)})

        return train_step(**call | {"forward_backward_func": forward_first})

    return step


def record_all(path: Path, arm: Arm, header: CurriculumHeader, steps: int) -> None:
    """A curriculum to train on; which blocks it has does not matter for the time."""
    pools, rng = arm.pools(), np.random.default_rng(0)
    with Curriculum.create(path, header) as curriculum:
        for step in range(steps):
            score_C = rng.random(arm.num_candidates, dtype=np.float32)
            choice = choose(pools.pool(step), arm.policy(), arm.batch_size, score_C, 0 * score_C)
            curriculum.append(choice)


def record(journal: Journal, choice: Choice, seconds: float) -> None:
    update = seconds - sum(choice.seconds.values())
    metrics = {"timing/train/total": seconds, "timing/train/update": update}
    journal.append(choice.pool.step, choice, metrics)


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def write(out: Path, rows: dict[str, list[float]], arm: Arm) -> None:
    """The slowest rank of every step, but of what lies outside the model the least waiting."""
    rows.pop("order")
    mine = {name: values[WARM_UP:] for name, values in rows.items()}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    if dist.get_rank() == 0:
        result: dict[str, Any] = {
            name: (np.min if name == "outside" else np.max)([r[name] for r in every], axis=0)
            for name in mine
        }
        # rank 0 alone records
        waited_least = np.min([np.subtract(r["outside"], r["recording"]) for r in every], axis=0)
        result["outside"] = waited_least + result["recording"]
        sizes = {"num_candidates": arm.num_candidates, "num_chosen": arm.batch_size}
        out.write_text(json.dumps({n: v.tolist() for n, v in result.items()} | sizes))
    dist.barrier()


if __name__ == "__main__":
    main()
