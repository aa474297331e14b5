"""How faithful scores are whose forward pass rounds to FP8: choices, replay share, ranks.

A small model in fp32 learns one source of made-up text and then, by RoD, another, over three seeds.
FP8 is simulated as `scoring.precision=fp8` has it: the weights and inputs of all linear layers are
rounded to E4M3 with one scale per tensor, taken from that tensor; products accumulate in fp32.
MXFP8 has a power of two for every 32 values instead.
References are made by the same rounded passes. Rounding to bf16 in the same way stands beside it,
as what a run in bf16 does to the same scores anyway.

    same states   a run that chooses by exact scores also computes the others at every step
    own runs      a run that chooses by rounded scores, beside the one that chooses by exact ones

    python benchmarks/fp8_fidelity.py [--quick] [--json FILE]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import _one_gpu as one
import numpy as np
import torch
from _made_up import make_store
from _rows import Row, Setting, run

from nemo_rod.corpus import BlockStore
from nemo_rod.megatron.scoring.scorer import MegatronScorer
from nemo_rod.selection import Joint, reducible_loss
from nemo_rod.selection.arms import make_arm
from nemo_rod.selection.arrays import Floats
from nemo_rod.selection.choice import Choice, choose
from nemo_rod.selection.policies import Policy

SEEDS = (0, 1, 2)
LENGTH, VOCABULARY, BATCH = 64, 256, 16
LARGEST = 448.0  # of E4M3
LAYERS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
Rounding = Callable[[torch.Tensor], torch.Tensor]


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Rounds to FP8 with one scale, as TransformerEngine's current scaling does."""
    largest = x.abs().max()
    if largest == 0:
        return x
    scale = LARGEST / largest
    return (x * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale


def to_mxfp8(x: torch.Tensor) -> torch.Tensor:
    """Rounds to FP8 with a power of two as the scale of 32 values along the summed dimension."""
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    largest = blocks.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    scale = torch.exp2(torch.ceil(torch.log2(largest / LARGEST)))
    return ((blocks / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale).reshape(x.shape)


def to_bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().to(x.dtype)


ROUNDINGS: dict[str, Rounding] = {"fp8": to_e4m3, "mxfp8": to_mxfp8, "bf16": to_bf16}


@contextmanager
def rounded(model: list, rounding: Rounding | None) -> Iterator[None]:
    """Rounds weights and inputs of the linear layers while a block runs."""
    layers = [m for c in model for name, m in c.named_modules() if name.endswith(LAYERS)]
    assert layers, "the model has no layer of these names"
    if rounding is None:
        yield
        return
    weights = [layer.weight.detach().clone() for layer in layers]

    def inputs(_: Any, arguments: tuple) -> tuple:
        return rounding(arguments[0]), *arguments[1:]

    hooks = [layer.register_forward_pre_hook(inputs) for layer in layers]
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(rounding(layer.weight))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            for layer, weight in zip(layers, weights, strict=True):
                layer.weight.copy_(weight)


@dataclass(frozen=True)
class Steps:
    """Updates of the base, of the specialist, and of RoD."""

    base: int
    specialist: int
    rod: int


class Study:
    """One seed: a base, a specialist, and references in every precision."""

    def __init__(self, store: BlockStore, groups: Any, seed: int, steps: Steps) -> None:
        self.store, self.groups, self.seed, self.steps = store, groups, seed, steps
        self.adaptation = np.arange(store.num_adaptation)
        self.replay = np.arange(store.num_adaptation, len(store))
        base = self._new()
        self._train(base, self.replay, steps.base)
        self.base = [w.detach().clone() for c in base.chunks for w in c.parameters()]
        replay = {name: self.losses(base, self.replay, name) for name in (None, *ROUNDINGS)}
        specialist = self._from_base()
        self._train(specialist, self.adaptation, steps.specialist)
        self.references = {
            name: np.concatenate([self.losses(specialist, self.adaptation, name), replay[name]])
            for name in (None, *ROUNDINGS)
        }

    def _new(self) -> one.Training:
        # the seed of the weights is added to what make_model draws from
        model = one.make_model(
            one.SIZES["tiny"], vocabulary=VOCABULARY, length=LENGTH, dtype=torch.float32
        )
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() > 1:
                    weight.copy_(torch.randn(weight.shape, generator=generator) * 0.05)
        return one.Training(model, self.store, self.groups, micro_batch_size=BATCH, lr=3e-3)

    def _from_base(self) -> one.Training:
        training = self._new()
        weights = [w for chunk in training.chunks for w in chunk.parameters()]
        with torch.no_grad():
            for weight, begin in zip(weights, self.base, strict=True):
                weight.copy_(begin)
        return training

    def _train(self, training: one.Training, ids: np.ndarray, steps: int) -> None:
        rng = np.random.default_rng(self.seed)
        for _ in range(steps):
            training.plain(rng.choice(ids, BATCH, replace=False))

    def losses(self, training: one.Training, ids: np.ndarray, name: str | None) -> np.ndarray:
        """Losses of blocks by a pass that rounds, or by an exact one; nats per token."""
        chunks = training.chunks
        scorer = MegatronScorer(chunks, self.store, self.groups, micro_batch_size=2 * BATCH)
        with rounded(chunks, None if name is None else ROUNDINGS[name]):
            return scorer.losses(ids)

    def rod(self, by: str | None) -> tuple[list[dict[str, dict[str, float]]], list[float]]:
        """Trains RoD by scores of a precision; compares the others if `by` is None.

        Returns:
            Per step, how faithful each rounding is; and the share of replay in each batch.
        """
        arm = make_arm(
            "rod", num_adaptation=len(self.adaptation), num_replay=len(self.replay),
            batch_size=BATCH, seed=self.seed, multiplier=2, balance="expected", kappa=1.0,
        )  # fmt: skip
        pools, policy, training = arm.pools(self.store), Joint(), self._from_base()
        compared, shares = [], []
        for step in range(self.steps.rod):
            pool = pools.pool(step)
            ids = pool.block_ids
            loss_C = self.losses(training, ids, by)
            choice = choose(pool, policy, BATCH, loss_C, self.references[by][ids])
            if by is None:
                others = {
                    name: reducible_loss(
                        self.losses(training, ids, name), self.references[name][ids]
                    )
                    for name in ROUNDINGS
                }
                compared.append({n: fidelity(choice, s, policy) for n, s in others.items()})
            shares.append(float(pool.is_replay_C[choice.chosen].mean()))
            training.plain(choice.block_ids)
        self.end = [
            float(self.losses(training, ids, None).mean()) for ids in (self.adaptation, self.replay)
        ]
        return compared, shares


def fidelity(choice: Choice, score_C: Floats, policy: Policy) -> dict[str, float]:
    """Compares a scored choice with the one that other scores [C] make by the same policy.

    Returns:
        `overlap`: fraction of the chosen blocks that both choices share; `share_drift`: replay
        share of the other choice minus that of the choice that was made; `rank_correlation`:
        Spearman's, over all candidates, NaN if either score is constant.
    """
    assert choice.score is not None
    is_replay_C, padding_C = choice.pool.is_replay_C, np.isneginf(choice.score)
    score_C = np.where(padding_C, -np.inf, score_C)
    chosen = policy.select(choice.pool, score_C, len(choice.chosen))
    shared = len(np.intersect1d(chosen, choice.chosen))
    return {
        "overlap": shared / len(chosen),
        "share_drift": float(is_replay_C[chosen].mean() - is_replay_C[choice.chosen].mean()),
        "rank_correlation": rank_correlation(choice.score[~padding_C], score_C[~padding_C]),
    }


def rank_correlation(a_N: Floats, b_N: Floats) -> float:
    """Returns Spearman's rank correlation; equal values share their mean rank."""
    ranks = []
    for values_N in (a_N, b_N):
        _, inverse_N, counts = np.unique(values_N, return_inverse=True, return_counts=True)
        rank_N = (np.cumsum(counts) - (counts - 1) / 2)[inverse_N]
        ranks.append(rank_N - rank_N.mean())
    a, b = ranks
    scale = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / scale if scale else math.nan


@cache
def groups() -> Any:
    torch.set_num_threads(1)
    return one.start()


def choices(setting: Setting) -> Iterator[Row]:
    """The table, seed by seed, and its means."""
    steps = Steps(40, 20, 10) if setting.quick else Steps(150, 60, 60)
    store = make_store(setting.folder / "blocks", length=LENGTH, blocks=16 * BATCH)
    rows: dict[str, list[float]] = {}

    def add(what: str, value: float, unit: str, seed: int) -> Row:
        rows.setdefault(f"{what}|{unit}", []).append(value)
        return Row(f"{what}, seed {seed}", value, unit)

    for seed in SEEDS:
        study = Study(store, groups(), seed, steps)
        compared, exact = study.rod(None)
        ends: dict[str | None, list[float]] = {None: study.end}
        for name in ROUNDINGS:
            same = {
                key: float(np.mean([c[name][key] for c in compared])) for key in compared[0][name]
            }
            yield add(f"{name}: overlap of choices, same states", same["overlap"], "share", seed)
            yield add(f"{name}: drift of replay share, same states", same["share_drift"], "", seed)
            yield add(f"{name}: rank correlation", same["rank_correlation"], "", seed)
            _, shares = study.rod(name)
            ends[name] = study.end
            drift = float(np.mean(shares) - np.mean(exact))
            yield add(f"{name}: drift of replay share, own runs", drift, "", seed)
            for role, is_, was in zip(("adaptation", "replay"), study.end, ends[None], strict=True):
                yield add(f"{name}: final {role} loss, own runs", is_ - was, "nats", seed)
        yield add("exact: replay share", float(np.mean(exact)), "share", seed)
    for key, values in rows.items():
        what, unit = key.split("|")
        yield Row(f"{what}, mean", float(np.mean(values)), unit)


if __name__ == "__main__":
    run(__doc__ or "", {"choices": choices})
