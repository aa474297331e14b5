"""Selection at one step, given the losses of the candidates (paper, algorithm 1).

Shape suffixes: C = candidates, K = chosen.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from nemo_rod.selection.arrays import Ids, Nats
from nemo_rod.selection.candidates import Pool
from nemo_rod.selection.policies import Policy, Score, reducible_loss, weigh

OnNonfinite = Literal["refuse", "exclude"]


@dataclass(frozen=True)
class Choice:
    """The blocks chosen at a step, with the reasons."""

    pool: Pool
    # Nats per token, float32 `[C]`; None without a scoring pass. Once the policy has observed the
    # update, it has the losses of the blocks that were trained on, and NaN for the others.
    loss: Nats | None
    score: Nats | None  # float32 `[C]`; None if the policy chooses without scores
    chosen: Ids  # int64 `[K]`, positions in the pool, ascending
    threshold: float = math.nan  # tau, the smallest chosen score
    # Time spent in "scoring" and "selection", and, under a `Selector`, in "lookup": the remaining
    # wait for the pool and its references.
    seconds: dict[str, float] = field(default_factory=dict)
    is_estimated: bool = False  # whether the scores are the policy's own, not a model's
    excluded: int = 0  # number of candidates whose score was not finite
    reference: Nats | None = None  # float32 `[C]`; None if the policy needs none
    is_pending: bool = False  # whether its losses are still to come, from the update
    metrics: dict[str, float | None] = field(default_factory=dict)  # the policy's own

    @property
    def block_ids(self) -> Ids:
        """The chosen blocks, int64 `[K]`."""
        return self.pool.block_ids[self.chosen]


def choose(
    pool: Pool,
    policy: Policy,
    batch_size: int,
    loss_C: Nats | None = None,
    reference_C: Nats | None = None,
    on_nonfinite: OnNonfinite = "refuse",
    score: Score = reducible_loss,
) -> Choice:
    """Selects from a pool: by its losses, or by what the policy has without any.

    Args:
        pool: the candidates.
        policy: chooses the blocks.
        batch_size: number of blocks to choose (K).
        loss_C: losses under the current weights, float32 `[C]`, nats per token; None without a
            scoring pass. A loss of -inf marks padding, which is never chosen: no model has such a
            loss.
        reference_C: reference losses, of the same shape, dtype and unit; None for a policy that
            needs none.
        on_nonfinite: "refuse" a pool with another non-finite score, or "exclude" such candidates
            as if they were padding, and count them.
        score: turns losses into scores.

    Raises:
        ValueError: a score is not finite and not excluded, or too few candidates remain.
    """
    start = time.perf_counter()
    if loss_C is None:
        estimate = getattr(policy, "estimate", None)
        estimate_C = None if estimate is None else estimate(pool)
        chosen, tau = _select(policy, estimate_C, pool, batch_size)
        seconds = {"scoring": 0.0, "selection": time.perf_counter() - start}
        is_estimated = estimate is not None
        return Choice(
            pool, None, estimate_C, chosen, tau, seconds, is_estimated, reference=reference_C
        )
    compared_C = np.zeros_like(loss_C) if reference_C is None else reference_C
    score_C = np.array(score(loss_C, compared_C), dtype=np.float32)  # perhaps loss_C itself
    score_C[np.isneginf(loss_C)] = -np.inf
    bad_C = ~np.isfinite(score_C) & ~np.isneginf(loss_C)
    if bad_C.any():  # a NaN would sort to an arbitrary place
        problem = (
            f"step {pool.step}: {bad_C.sum()} of {len(bad_C)} scores are not finite, the first "
            f"that of block {pool.block_ids[np.argmax(bad_C)]}"
        )
        if on_nonfinite == "refuse":
            raise ValueError(
                f"{problem}: the model diverged or a loss overflowed; look at train/loss and "
                "resume from an earlier checkpoint, or continue without such blocks by "
                "on_nonfinite=exclude (in a recipe, selection.on_nonfinite)."
            )
        if np.isfinite(score_C).sum() < batch_size:
            raise ValueError(
                f"{problem}, and too few are left for a batch of {batch_size}: the model diverged; "
                "resume from an earlier checkpoint with a lower train.lr."
            )
        score_C[bad_C] = -np.inf
    chosen, tau = _select(policy, score_C, pool, batch_size)
    seconds, num_bad = {"selection": time.perf_counter() - start}, int(bad_C.sum())
    return Choice(pool, loss_C, score_C, chosen, tau, seconds, False, num_bad, reference_C)


def _select(policy: Policy, score_C: Nats | None, pool: Pool, k: int) -> tuple[Ids, float]:
    """Returns the choice of a policy, which may be a stranger's, checked; and tau in nats.

    Tau, the paper's price of a training slot, is the least weighted score chosen, or else NaN.
    """
    chosen: Ids = np.asarray(policy.select(pool, score_C, k))
    ascends = chosen.ndim == 1 and bool((np.diff(chosen, prepend=-1) > 0).all())
    if not (len(chosen) == k and ascends and chosen[-1] < len(pool.block_ids)):
        raise ValueError(
            f"step {pool.step}: {type(policy).__name__}.select returned {chosen}, expected {k} "
            f"ascending positions below {len(pool.block_ids)}: correct the policy."
        )
    if score_C is None:
        return chosen, math.nan
    return chosen, float(np.min(weigh(policy, pool, score_C)[chosen]))
