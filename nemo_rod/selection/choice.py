"""Selection at one step, given the losses of the candidates (paper, algorithm 1).

Shape suffixes: C = candidates, K = chosen.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from nemo_rod.selection.arrays import Ids, Nats, read_only
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
        for name in ("loss", "score", "chosen", "reference"):
            object.__setattr__(self, name, read_only(getattr(self, name)))

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
        ValueError: a score is not finite and not excluded, too few candidates remain, or the policy
            or the score returns something else.
    """
    start, size, score_C, num_bad = time.perf_counter(), len(pool.block_ids), None, 0
    part, given = getattr(policy, "estimate", None), tuple[Any, ...]((pool,))
    is_padding_C, cause = np.zeros(size, dtype=bool), f"{_name(part)} is at fault"
    if loss_C is not None:
        compared_C = np.zeros_like(loss_C) if reference_C is None else reference_C
        part, given = score, (read_only(loss_C), read_only(compared_C))
        is_padding_C, cause = np.isneginf(loss_C), "the model diverged"
    if part is not None:
        score_C = _answer(part, "biuf", size, f"{size} numbers", pool, *given).astype(np.float32)
        score_C[is_padding_C] = -np.inf
        bad_C = ~np.isfinite(score_C) & ~is_padding_C
        if num_bad := int(bad_C.sum()):  # a NaN would sort to an arbitrary place
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
    given, size = read_only(score_C), len(pool.block_ids)
    expected = f"{k} ascending positions below {size}"
    chosen: Ids = _answer(policy.select, "iu", k, expected, pool, pool, given, k).astype(np.int64)
    if (np.diff(chosen, prepend=-1) <= 0).any() or chosen[-1] >= size:
        raise _mistake(policy.select, chosen, expected, pool)
    if score_C is None:
        return chosen, math.nan
    weighed_C: Any = score_C
    if hasattr(policy, "weigh"):
        weighed_C = _answer(policy.weigh, "biuf", size, f"{size} numbers", pool, pool, given)
    if not np.isfinite(score_C + weighed_C)[chosen].all():
        raise _mistake(policy.select, chosen, "no padding and none that was excluded", pool)
    return chosen, float(np.min(weighed_C[chosen]))


def policy_metrics(policy: Policy, choice: Choice) -> dict[str, float | None]:
    """Returns the metrics that a policy has of a choice, by names that begin with rod/."""
    if not hasattr(policy, "metrics"):
        return {}
    found = ask(policy.metrics, choice.pool.step, choice)
    try:
        values = {name: None if v is None else float(0.0 + v) for name, v in found.items()}
        is_right = all(name.startswith("rod/") for name in values)
    except (AttributeError, TypeError):
        is_right = False
    if not is_right:
        expected = "numbers by names that begin with rod/"
        raise _mistake(policy.metrics, found, expected, choice.pool)
    return values


def _answer(
    part: Any, kinds: str, size: int, expected: str, pool: Pool, *given: Any
) -> npt.NDArray[Any]:
    """Returns the answer of a part, which may be a stranger's, as a new array of this size."""
    answer = ask(part, pool.step, *given)
    try:
        array: npt.NDArray[Any] = np.array(answer)
    except (RuntimeError, TypeError, ValueError):  # ragged, or a tensor of a GPU
        array = np.empty(())
    if array.shape != (size,) or array.dtype.kind not in kinds:
        raise _mistake(part, answer, expected, pool)
    return array


def ask(part: Any, step: int, *given: Any) -> Any:
    """Returns the answer of a part; says so if it writes into the arrays it is given, or exits."""
    try:
        return part(*given)
    except (ValueError, SystemExit) as error:  # a job that exits with 0 would pass for stopped
        does, cure = "ends the process", "let it raise an error"
        if isinstance(error, ValueError):
            if "read-only" not in str(error):
                raise
            does, cure = "writes into an array that it is given", "let it write into a copy"
        raise ValueError(f"step {step}: {_name(part)} {does} ({error}): {cure}.") from error


def _mistake(part: Any, answer: Any, expected: str, pool: Pool) -> ValueError:
    shown = " ".join(repr(answer).split())[:100]
    problem = f"{_name(part)} returned {shown}, expected {expected}"
    return ValueError(f"step {pool.step}: {problem}: correct it.")


def _name(part: Any) -> str:
    return str(getattr(part, "__qualname__", type(part).__name__))
