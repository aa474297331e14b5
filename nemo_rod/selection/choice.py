"""Selection at one step, given the losses of the candidates (paper, algorithm 1).

Shape suffixes: C = candidates, K = chosen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from nemo_rod.selection.arrays import Ids, Nats, freeze, read_only
from nemo_rod.selection.candidates import Pool
from nemo_rod.selection.policies import Policy, Score, reducible_loss

OnNonfinite = Literal["refuse", "exclude"]


@dataclass(frozen=True)
class Choice:
    """The blocks chosen at a step, with the reasons. The arrays cannot be written to."""

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

    def __post_init__(self) -> None:
        freeze(self, "loss", "score", "chosen", "reference")

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
        ValueError: a score is not finite and not excluded, too few candidates remain, or a part
            returns something else than it is to.
    """
    start, score_C, num_bad = time.perf_counter(), None, 0
    part: Any = getattr(policy, "estimate", None) if loss_C is None else score
    if part is not None:
        given: Any = (pool,)
        if loss_C is not None:
            compared_C = np.zeros_like(loss_C) if reference_C is None else reference_C
            given = read_only(loss_C), read_only(compared_C)
        score_C = _of_candidates(part, pool, *given)
        is_padding_C = np.zeros(len(score_C), bool) if loss_C is None else np.isneginf(loss_C)
        score_C[is_padding_C] = -np.inf
        bad_C = ~np.isfinite(score_C) & ~is_padding_C
        if num_bad := int(bad_C.sum()):  # a NaN would sort to an arbitrary place
            cause = "the model diverged" if loss_C is not None else f"{_name(part)} is at fault"
            problem = (
                f"step {pool.step}: {num_bad} of {len(bad_C)} scores are not finite, the first "
                f"that of block {pool.block_ids[np.argmax(bad_C)]}"
            )
            if on_nonfinite == "refuse":
                raise ValueError(
                    f"{problem}: {cause} or a loss overflowed; look at train/loss and resume from "
                    "an earlier checkpoint, or continue without such blocks by "
                    "on_nonfinite=exclude (in a recipe, selection.on_nonfinite)."
                )
            if np.isfinite(score_C).sum() < batch_size:
                raise ValueError(
                    f"{problem}, and too few are left for a batch of {batch_size}: {cause}; resume "
                    "from an earlier checkpoint with a lower train.lr."
                )
            score_C[bad_C] = -np.inf
    chosen, tau = _select(policy, score_C, pool, batch_size)
    seconds = {} if loss_C is not None else {"scoring": 0.0}
    seconds["selection"] = time.perf_counter() - start
    is_estimated = loss_C is None and score_C is not None
    return Choice(pool, loss_C, score_C, chosen, tau, seconds, is_estimated, num_bad, reference_C)


def _select(policy: Policy, score_C: Nats | None, pool: Pool, k: int) -> tuple[Ids, float]:
    """Returns the choice of a policy; and tau in nats.

    Tau, the paper's price of a training slot, is the least weighted score chosen, or else NaN.
    """

    def fits(chosen: npt.NDArray[Any]) -> bool:
        is_batch = chosen.shape == (k,) and chosen.dtype.kind in "iu"
        ascends = is_batch and (np.diff(chosen.astype(np.int64), prepend=-1) > 0).all()
        return bool(ascends and chosen[-1] < len(pool.block_ids))

    given = None if score_C is None else read_only(score_C)
    expected = f"{k} ascending positions below {len(pool.block_ids)}"
    answer = _checked(policy.select, pool.step, fits, expected, pool, given, k)
    chosen: Ids = answer.astype(np.int64)
    if score_C is None:
        return chosen, math.nan
    own = getattr(policy, "weigh", None)
    weighed_C = score_C if own is None else _of_candidates(own, pool, pool, given, dtype=np.float64)
    lost_K = ~np.isfinite(score_C[chosen]) | ~np.isfinite(weighed_C[chosen])
    if lost_K.any():
        raise ValueError(
            f"step {pool.step}: {type(policy).__name__} chose candidate "
            f"{chosen[np.argmax(lost_K)]}, whose score is not finite: padding and excluded "
            "candidates must not be chosen; correct the policy."
        )
    return chosen, float(np.min(weighed_C[chosen]))


def _of_candidates(
    part: Any, pool: Pool, *given: Any, dtype: type = np.float32
) -> npt.NDArray[Any]:
    """Returns what a part computes of every candidate, a new array [C]."""

    def fits(value: npt.NDArray[Any]) -> bool:
        return value.shape == pool.block_ids.shape and value.dtype.kind in "biuf"

    expected = f"{len(pool.block_ids)} numbers, one for every candidate"
    return _checked(part, pool.step, fits, expected, *given).astype(dtype)


def policy_metrics(policy: Policy, choice: Choice) -> dict[str, float | None]:
    """Returns the metrics that a policy has of a choice, by names that begin with rod/."""

    def fits(found: npt.NDArray[Any]) -> bool:
        values = found.item().items()  # an AttributeError, or a TypeError, of another answer
        numbers = [np.asarray(0.0 if value is None else value) for _, value in values]
        are_plain = all(each.ndim == 0 and each.dtype.kind in "biuf" for each in numbers)
        return are_plain and all(name.startswith("rod/") for name, _ in values)

    if not hasattr(policy, "metrics"):
        return {}
    expected = "numbers by names that begin with rod/"
    found = _checked(policy.metrics, choice.pool.step, fits, expected, choice).item()
    return {name: None if value is None else float(value) for name, value in found.items()}


def _checked(
    part: Any, step: int, fits: Callable[[npt.NDArray[Any]], bool], expected: str, *given: Any
) -> npt.NDArray[Any]:
    """Returns the answer of a part, which may be a stranger's, as a new array, if it fits."""
    answer = ask(part, step, *given)
    try:
        array: npt.NDArray[Any] = np.array(answer)
        is_right = fits(array)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # ragged, or a GPU's
        is_right = False
    if not is_right:
        raise ValueError(
            f"step {step}: {_name(part)} returned {' '.join(repr(answer).split())[:100]}, expected "
            f"{expected}: correct it."
        )
    return array


def ask(part: Any, step: int, *given: Any) -> Any:
    """Returns the answer of a part; says so if it writes into the arrays that it is given."""
    try:
        return part(*given)
    except ValueError as error:
        if "read-only" in str(error):
            reason = f"{_name(part)} writes into an array that it is given ({error})"
            raise ValueError(f"step {step}: {reason}: let it write into a copy.") from error
        raise


def _name(part: Any) -> str:
    return str(getattr(part, "__qualname__", type(part).__name__))
