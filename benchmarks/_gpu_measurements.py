"""The measurements of gpu.py: one model, what is timed with it, and the rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest.mock import patch

import _one_gpu as one
import numpy as np
import torch
from _made_up import make_references, make_store
from _memory import peak_beyond
from _roofline import Point
from _rows import Row, over, under

from nemo_rod.megatron.rod_selector import RoDSelector
from nemo_rod.megatron.scoring import logits
from nemo_rod.megatron.scoring.low_precision import refuse_unavailable
from nemo_rod.megatron.scoring.scorer import MegatronScorer
from nemo_rod.megatron.scoring.training_losses import TrainingLosses
from nemo_rod.selection import References, Selector
from nemo_rod.selection.arms import make_arm
from nemo_rod.selection.dealing import scoring_passes

MULTIPLIER = 2
MIB = 2**20


@dataclass(frozen=True)
class Setting:
    """What is measured; of `--size tiny` all is small."""

    size: str
    seq: int
    vocab: int
    layers: str
    batch: int
    micro_batch: int
    scoring_micro_batch: int
    repeats: int
    matrix: int
    copied: int
    slices: tuple[int, ...]

    @property
    def shape(self) -> one.Size:
        return one.SIZES[self.size]

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if one.on_gpu() else torch.float32


class Bench:
    """One model, its training and its selector, and the rows measured so far."""

    def __init__(self, s: Setting, folder: Path, groups: Any) -> None:
        self.s, self.groups = s, groups
        self.rows, self.points = list[Row](), list[Point]()
        blocks = 8 * s.batch
        self.store = make_store(folder / "blocks", length=s.seq, blocks=blocks)
        self.references = make_references(folder / "references", self.store)
        self.allocated = torch.cuda.memory_allocated() if one.on_gpu() else 0
        model = one.make_model(
            s.shape, vocabulary=s.vocab, length=s.seq, dtype=s.dtype, layers=s.layers
        )
        self.training = one.Training(model, self.store, groups, micro_batch_size=s.micro_batch)
        self.pool = np.random.default_rng(1).choice(
            len(self.store), MULTIPLIER * s.batch, replace=False
        )
        self.forward_flops = s.shape.forward_flops(s.vocab, s.seq)
        self.ceiling = self.bandwidth = 0.0

    def add(self, row: Row) -> Row:
        """Prints a row and keeps it."""
        row = replace(row, value=float(row.value))
        goal = "" if row.goal is None else f"{row.goal:g}"
        holds = {None: "", True: "yes", False: "NO"}[row.holds]
        text = f"{row.what:<50} {row.value:>12.4g} {row.unit:<12} {goal:>8}  {holds}"
        print(text.rstrip(), flush=True)
        self.rows.append(row)
        return row

    def time(
        self,
        what: str,
        action: Callable[[], object],
        tokens: float,
        flops: float,
        *beside: Callable[[], object],
    ) -> list[float]:
        """Adds time, tokens/s, FLOP/s and memory of an action.

        Returns its seconds and those of the actions that took turns with it.
        """
        seconds, *others = timed(self.s.repeats, action, *beside)
        with peak_beyond() as peak:
            action()
        reached = flops / seconds / 1e12
        self.add(Row(f"{what}: time", 1e3 * seconds, "ms"))
        self.add(Row(f"{what}: tokens", tokens / seconds, "tokens/s"))
        self.add(Row(f"{what}: model FLOPs", reached, "TFLOP/s"))
        self.add(Row(f"{what}: of the ceiling", 100 * reached / self.ceiling, "%"))
        self.add(Row(f"{what}: memory beyond weights, gradients, optimizer", peak[0], "GiB"))
        return [seconds, *others]

    def scorer(
        self, micro_batch: int | None = None, *, share: float = 1, precision: str | None = None
    ) -> MegatronScorer:
        return MegatronScorer(
            self.training.chunks,
            self.store,
            self.groups,
            micro_batch_size=micro_batch or self.s.scoring_micro_batch,
            length=int(self.s.seq * share),
            precision=precision,
        )

    def selector(self, share: float = 1) -> RoDSelector:
        counts = (self.store.num_adaptation, self.store.num_replay)
        arm = make_arm(
            "rod", num_adaptation=counts[0], num_replay=counts[1], batch_size=self.s.batch,
            seed=0, multiplier=MULTIPLIER, balance="expected", kappa=1.0,
            prefix=str(Fraction(share)),
        )  # fmt: skip
        chooses = Selector.for_arm(
            arm,
            self.store,
            References.open(self.references, self.store, length=int(self.s.seq * share)),
        )
        size = self.s.scoring_micro_batch
        return RoDSelector(chooses, self.store, scoring_micro_batch_size=size)


def timed(repeats: int, *actions: Callable[[], object]) -> list[float]:
    """Median seconds of each action, the device's work included.

    They take turns: a device that has become warm, and slower, is so for all of them.
    """
    taken = np.empty((repeats + 2, len(actions)))
    for times in taken:
        for place, action in enumerate(actions):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            action()
            torch.cuda.synchronize()
            times[place] = time.perf_counter() - begin
    return np.median(taken[2:], axis=0).tolist()  # the first ones warm up


def limits(bench: Bench) -> None:
    """What the device reaches in a matrix product and in a copy: the roof of everything else."""
    n, dtype = bench.s.matrix, bench.s.dtype
    left, right = (torch.randn(n, n, dtype=dtype).cuda() for _ in range(2))
    bench.ceiling = 2 * n**3 / timed(10, lambda: left @ right)[0] / 1e12
    source = torch.empty(bench.s.copied, dtype=torch.uint8).cuda()
    target = torch.empty_like(source)
    bench.bandwidth = 2 * bench.s.copied / timed(10, lambda: target.copy_(source))[0] / 1e12
    bench.add(Row(f"ceiling: product of {n} x {n} matrices", bench.ceiling, "TFLOP/s"))
    bench.add(Row("ceiling: copy, read and written", bench.bandwidth, "TB/s"))


def steps(bench: Bench) -> None:
    """Plain steps, forward passes, scoring, RoD's steps and the other arms, with their ratios."""
    s, training = bench.s, bench.training
    trained, forward = s.batch * s.seq, bench.forward_flops
    ids = bench.pool[: s.batch]
    training.plain(ids)  # the optimizer's moments are allocated here, before memory is measured
    _state(bench)

    def step() -> None:
        training.plain(ids)

    def pass_alone() -> None:
        training.forward(ids)

    (plain,) = bench.time("plain step", step, trained, 3 * trained * forward)
    (alone,) = bench.time("forward of training", pass_alone, trained, trained * forward)
    reads = s.batch // s.micro_batch
    for name, seconds, passes in (("plain step", plain, 3), ("forward", alone, 1)):
        flops = passes * trained * forward
        point = _point(name, bench, seconds, tokens=trained, flops=flops, passes=passes * reads)
        bench.points.append(point)
    for share in (1, 1 / 2, 1 / 4, 1 / 8):
        tokens = MULTIPLIER * trained * share
        flops = tokens * s.shape.forward_flops(s.vocab, int(s.seq * share))
        scorer = bench.scorer(share=share)

        def score(scorer: MegatronScorer = scorer) -> object:
            return scorer.losses(bench.pool)

        name = f"scoring {8 * share:g}/8"
        beside = [pass_alone] if share == 1 else []
        seconds, *others = bench.time(name, score, tokens, flops, *beside)
        _, passes = scoring_passes(
            len(bench.pool), micro_batch_size=s.scoring_micro_batch, replicas=1, prefix=share
        )
        point = _point(name, bench, seconds, tokens=tokens, flops=flops, passes=passes)
        bench.points.append(point)
        if share == 1:
            speed = MULTIPLIER * others[0] / seconds
            bench.add(over("scoring_over_forward", speed, "x", 1.0))
            _fp8(bench, score, tokens, flops)
    for share in (1, 1 / 2, 1 / 4, 1 / 8):
        _rod(bench, share, step, pass_alone)
    _without_scoring(bench, ids, step)


def _state(bench: Bench) -> None:
    """What weights, gradients and optimizer take; on a GPU, where it can be told exactly."""
    if one.on_gpu():
        torch.cuda.synchronize()
        count = sum(weight.numel() for weight in bench.training.chunks[0].parameters())
        taken = torch.cuda.memory_allocated() - bench.allocated
        bench.add(Row("weights, gradients and optimizer", taken / count, "B/parameter"))


def _fp8(bench: Bench, score: Callable[[], object], tokens: float, flops: float) -> None:
    """Scoring in FP8 beside scoring in the model's precision, where the GPU and its layers can."""
    if bench.s.layers != "te":
        return
    try:
        refuse_unavailable("fp8")
        scorer = bench.scorer(precision="fp8")
    except ValueError as error:
        print(f"scoring in fp8 is left out: {error}", flush=True)
        return

    def in_fp8() -> object:
        return scorer.losses(bench.pool)

    fp8, seconds = bench.time("scoring 8/8 in fp8", in_fp8, tokens, flops, score)
    bench.add(Row("fp8_over_bf16: candidates a second", seconds / fp8, "x"))


def _rod(
    bench: Bench, share: float, plain: Callable[[], object], forward: Callable[[], object]
) -> None:
    """RoD's whole step: pool, references, scoring, choice, update."""
    s, selector = bench.s, bench.selector(share)
    step, numbers = selector.wrap(bench.training.train_step), iter(range(10**6))
    trained = s.batch * s.seq
    scored = MULTIPLIER * trained * share
    flops = 3 * trained * bench.forward_flops
    flops += scored * s.shape.forward_flops(s.vocab, int(s.seq * share))

    def rod() -> None:
        bench.training.rod(step, next(numbers), s.batch)

    beside = [plain, forward] if share == 1 else [plain]
    seconds, of_plain, *of_forward = bench.time(
        f"rod step {8 * share:g}/8", rod, trained, flops, *beside
    )
    bench.add(Row(f"rod_over_plain {8 * share:g}/8", seconds / of_plain, "x"))
    if of_forward:
        limit = 1 + MULTIPLIER * of_forward[0] / of_plain
        bench.add(Row("limit", limit, "x"))
        bench.add(under("rod_over_limit", seconds / of_plain / limit, "x", 1.03))


def _without_scoring(bench: Bench, ids: np.ndarray, plain: Callable[[], object]) -> None:
    """What listening to the training losses, and reading chosen blocks, cost beside a step."""
    s, training = bench.s, bench.training

    def listening() -> None:
        training_losses = TrainingLosses(training.forward_step, bench.groups)
        training.plain(ids, training_losses.forward_step)
        training_losses.gather(s.batch, s.micro_batch)

    counts = (bench.store.num_adaptation, bench.store.num_replay)
    arm = make_arm(
        "max_replay", num_adaptation=counts[0], num_replay=counts[1], batch_size=s.batch, seed=0
    )
    step = RoDSelector(Selector.for_arm(arm, bench.store), bench.store).wrap(training.train_step)
    numbers = iter(range(10**6))

    def chosen() -> None:
        training.rod(step, next(numbers), s.batch)

    of_plain, averages, transfer = timed(s.repeats, plain, listening, chosen)
    bench.add(under("averages_over_plain", averages / of_plain, "x", 1.01))
    bench.add(under("transfer_over_plain", transfer / of_plain, "x", 1.01))


def exactness(bench: Bench) -> None:
    """How much a block's score depends on what it is scored with, in nats per token."""
    s = bench.s
    base = bench.scorer().losses(bench.pool)
    again = bench.scorer().losses(bench.pool)
    bench.add(under("score moves: same call twice", np.abs(again - base).max(), "nats", 0.0))
    for size in (1, 2, 8):
        other = bench.scorer(size).losses(bench.pool)
        moved = np.abs(other - base).max()
        bench.add(Row(f"score moves: micro-batch {s.scoring_micro_batch} -> {size}", moved, "nats"))
    for share in (1 / 2, 1 / 4, 1 / 8):
        part = bench.scorer(share=share).losses(bench.pool)
        cut = bench.scorer().losses_at(bench.pool, [s.seq, int(s.seq * share)])[:, 1]
        moved = np.abs(part - cut).max()
        bench.add(Row(f"score moves: {8 * share:g}/8 alone or in the whole", moved, "nats"))


def slices(bench: Bench) -> None:
    """Scoring with other limits of how many logits are held at once."""
    s = bench.s
    tokens = MULTIPLIER * s.batch * s.seq
    for mib in s.slices:
        with patch.object(logits, "MAX_LOGITS_BYTES", mib * MIB), peak_beyond() as peak:
            length = logits.slice_length(s.scoring_micro_batch, s.vocab)
            scorer = bench.scorer()

            def score(scorer: MegatronScorer = scorer) -> object:
                return scorer.losses(bench.pool)

            (seconds,) = timed(s.repeats, score)
        bench.add(Row(f"logits in slices of {mib} MiB: time", 1e3 * seconds, "ms"))
        bench.add(Row(f"logits in slices of {mib} MiB: memory", peak[0], "GiB"))
        product = _output_layer(bench, min(length, s.seq) * s.scoring_micro_batch)
        bench.points.append(replace(product, name=f"logits, {mib} MiB"))
        bench.add(Row(f"tokens/s in slices of {mib} MiB", tokens / seconds, "tokens/s"))


def _output_layer(bench: Bench, tokens: int) -> Point:
    """The product that makes the logits of one slice, by itself."""
    s = bench.s
    hidden = torch.randn(tokens, s.shape.hidden, dtype=s.dtype).cuda()
    weight = torch.randn(s.vocab, s.shape.hidden, dtype=s.dtype).cuda()
    (seconds,) = timed(s.repeats, lambda: hidden @ weight.T)
    flops = 2.0 * tokens * s.vocab * s.shape.hidden
    moved = hidden.nbytes + weight.nbytes + tokens * s.vocab * hidden.element_size()
    return Point("", flops / moved, flops / seconds / 1e12)


def _point(
    name: str, bench: Bench, seconds: float, *, tokens: float, flops: float, passes: int
) -> Point:
    """Work in the roofline, at the least traffic that it must have.

    Each of its `passes` reads all weights once, and every token moves some twelve activations of
    hidden size in every layer, in each of the passes over it.
    """
    s, element = bench.s, torch.finfo(bench.s.dtype).bits // 8
    over_tokens = flops / (tokens * bench.forward_flops)  # 1 forward, 3 with the backward pass
    moved = float(passes * s.shape.parameters(s.vocab) * element)
    moved += max(1.0, over_tokens) * 12.0 * tokens * s.shape.hidden * s.shape.layers * element
    return Point(name, flops / moved, flops / seconds / 1e12)


MEASUREMENTS: dict[str, Callable[[Bench], None]] = {
    "limits": limits,
    "steps": steps,
    "exactness": exactness,
    "slices": slices,
}
