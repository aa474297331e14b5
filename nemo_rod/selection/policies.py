"""Policies, which turn scores into the chosen blocks.

    policy                chooses                                           paper
    Joint(kappa)          the k highest scores, regardless of role          Eq. "joint selection"
    FixedShare(share)     a fixed number of each role, at random or by rho  ablation of components
    TakeAll()             the whole pool                                    plain training

Every policy returns ascending candidate positions and breaks ties in favor of the earlier
candidate. A score of -inf marks padding, which is never chosen; any other non-finite score is
refused, since a NaN sorts to an arbitrary place and would silently affect what is trained on.

Shape suffixes: C = candidates, K = chosen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

Within = Literal["random", "rho"]


class Policy(Protocol):
    """Turns the scores of a pool into the chosen blocks."""

    @property
    def needs_scores(self) -> bool:
        """Whether `select` uses scores; if not, they may be None and no scoring is needed."""

    def weigh(
        self, score_C: npt.NDArray[np.floating], is_replay_C: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.floating]:
        """Return the scores as the policy compares them, for `threshold`."""

    def select(
        self, score_C: npt.NDArray[np.floating] | None, is_replay_C: npt.NDArray[np.bool_], k: int
    ) -> npt.NDArray[np.int64]:
        """Return the k chosen candidate positions, ascending."""


def reducible_loss(
    loss_C: npt.NDArray[np.floating], reference_C: npt.NDArray[np.floating]
) -> npt.NDArray[np.float32]:
    """Return rho = loss - reference loss, in nats (paper, Eq. "rho").

    Args:
        loss_C: Loss of the current model, nats per token [C].
        reference_C: Loss of the reference model, nats per token [C].

    Returns:
        The scores, float32 [C]; exactly 0 where both losses are equal.
    """
    loss_C = np.asarray(loss_C, dtype=np.float32)
    reference_C = np.asarray(reference_C, dtype=np.float32)
    assert loss_C.shape == reference_C.shape, (
        f"{loss_C.shape} losses, {reference_C.shape} references"
    )
    return loss_C - reference_C


def threshold(weighted_C: npt.NDArray[np.floating] | None, chosen: npt.NDArray[np.int64]) -> float:
    """Return tau, the smallest chosen score (paper, Appendix: the price of a training slot).

    Args:
        weighted_C: Scores as the policy compares them (`Policy.weigh`) [C], or None if nothing was
            scored.
        chosen: Chosen positions [K].

    Returns:
        tau in nats; NaN without scores.
    """
    return float(np.min(weighted_C[chosen])) if weighted_C is not None else math.nan


@dataclass(frozen=True)
class Joint:
    """Chooses the k highest scores: adaptation and replay compete for the same slots.

    Attributes:
        kappa: Value of one nat of forgetting in nats of learning; multiplies replay scores.
    """

    kappa: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.kappa) and self.kappa >= 0):
            raise ValueError(f"selection.kappa is {self.kappa}, expected a finite number >= 0")

    @property
    def needs_scores(self) -> bool:
        """Always True."""
        return True

    def weigh(
        self, score_C: npt.NDArray[np.floating], is_replay_C: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.floating]:
        """Return the scores [C], those of replay multiplied by kappa; padding stays -inf."""
        weighted_C = np.asarray(score_C, dtype=np.float64).copy()
        scaled_C = np.asarray(is_replay_C, dtype=bool) & np.isfinite(weighted_C)
        weighted_C[scaled_C] *= self.kappa
        return weighted_C

    def select(
        self, score_C: npt.NDArray[np.floating] | None, is_replay_C: npt.NDArray[np.bool_], k: int
    ) -> npt.NDArray[np.int64]:
        """Return the positions of the k highest weighted scores.

        Args:
            score_C: Scores in nats [C]; -inf is padding.
            is_replay_C: bool [C].
            k: Number of blocks to choose.

        Returns:
            int64 [K], ascending.

        Raises:
            ValueError: A score is NaN or +inf, or fewer than k scores are above -inf.
        """
        assert score_C is not None, "joint selection without scores"
        real_C = _real_candidates(score_C, is_replay_C)
        return _highest(self.weigh(score_C, is_replay_C), np.flatnonzero(real_C), k, "any role")


@dataclass(frozen=True)
class FixedShare:
    """Chooses round(share * k) replay blocks, else adaptation (paper, component ablation).

    Attributes:
        share: Fraction of replay in the batch.
        adaptation: How adaptation blocks are chosen: "random" takes the first ones of the pool
            (which is shuffled), "rho" those with the highest scores.
        replay: How replay blocks are chosen, likewise.
    """

    share: float
    adaptation: Within = "random"
    replay: Within = "random"

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"the replay share is {self.share}, expected a fraction in [0, 1]")
        for role, within in (("adaptation", self.adaptation), ("replay", self.replay)):
            if within not in get_args(Within):
                raise ValueError(
                    f"{role} blocks are chosen by {within!r}, expected 'random' or 'rho'"
                )

    @property
    def needs_scores(self) -> bool:
        """Whether a role is chosen by score."""
        return "rho" in (self.adaptation, self.replay)

    def weigh(
        self, score_C: npt.NDArray[np.floating], is_replay_C: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.floating]:
        """Return the scores unchanged."""
        return score_C

    def select(
        self, score_C: npt.NDArray[np.floating] | None, is_replay_C: npt.NDArray[np.bool_], k: int
    ) -> npt.NDArray[np.int64]:
        """Return k positions with the fixed share of replay.

        Args:
            score_C: Scores in nats [C]; -inf is padding. None if both roles are chosen at random.
            is_replay_C: bool [C].
            k: Number of blocks to choose.

        Returns:
            int64 [K], ascending.

        Raises:
            ValueError: A score is NaN or +inf, or a role has too few candidates.
        """
        assert score_C is not None or not self.needs_scores, "choosing by score without scores"
        if score_C is not None and self.needs_scores:
            real_C = _real_candidates(score_C, is_replay_C)
        else:
            real_C = ~_padding(score_C, is_replay_C)
        num_replay = round(self.share * k)
        is_replay_C = np.asarray(is_replay_C, dtype=bool)
        parts = []
        for role, within, of_role_C, wanted in (
            ("adaptation", self.adaptation, ~is_replay_C, k - num_replay),
            ("replay", self.replay, is_replay_C, num_replay),
        ):
            rank_by_C = (
                score_C if score_C is not None and within == "rho" else np.zeros(len(real_C))
            )
            parts.append(_highest(rank_by_C, np.flatnonzero(real_C & of_role_C), wanted, role))
        return np.sort(np.concatenate(parts))


@dataclass(frozen=True)
class TakeAll:
    """Takes the whole pool: plain training on a corpus stream or on a recorded curriculum."""

    @property
    def needs_scores(self) -> bool:
        """Always False."""
        return False

    def weigh(
        self, score_C: npt.NDArray[np.floating], is_replay_C: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.floating]:
        """Return the scores unchanged."""
        return score_C

    def select(
        self, score_C: npt.NDArray[np.floating] | None, is_replay_C: npt.NDArray[np.bool_], k: int
    ) -> npt.NDArray[np.int64]:
        """Return every position that is not padding.

        Args:
            score_C: None, or scores [C], of which only -inf (padding) matters.
            is_replay_C: bool [C].
            k: Number of blocks to choose; the pool must hold exactly as many.

        Returns:
            int64 [K], ascending.

        Raises:
            ValueError: The pool does not hold exactly k blocks.
        """
        positions = np.flatnonzero(~_padding(score_C, is_replay_C))
        if len(positions) != k:
            raise ValueError(
                f"TakeAll trains on the whole pool, but the pool holds {len(positions)} blocks and "
                f"the batch {k}: set selection.multiplier=1, or the batch size of the recorded "
                "curriculum"
            )
        return positions


def _padding(
    score_C: npt.NDArray[np.floating] | None, is_replay_C: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Return which candidates are padding, bool [C]."""
    if score_C is None:
        return np.zeros(len(is_replay_C), dtype=bool)
    shape, expected = np.shape(score_C), np.shape(is_replay_C)
    assert shape == expected, f"{shape} scores, {expected} roles"
    return np.isneginf(score_C)


def _real_candidates(
    score_C: npt.NDArray[np.floating], is_replay_C: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Return which candidates are not padding, bool [C]; refuse NaN and +inf."""
    padding_C = _padding(score_C, is_replay_C)
    bad = np.flatnonzero(~np.isfinite(score_C) & ~padding_C)
    if bad.size:
        shown = ", ".join(str(i) for i in bad[:8]) + (", ..." if bad.size > 8 else "")
        raise ValueError(
            f"{bad.size} of {len(score_C)} scores are not finite (NaN or +inf), at candidate "
            f"positions {shown}: the model diverged or a loss overflowed; resume from an earlier "
            "checkpoint, or see selection.on_nonfinite"
        )
    return ~padding_C


def _highest(
    score_C: npt.NDArray[np.floating], positions: npt.NDArray[np.intp], k: int, role: str
) -> npt.NDArray[np.int64]:
    """Return the k highest-scoring `positions`, ascending; ties go to the earlier one."""
    if len(positions) < k:
        raise ValueError(
            f"{k} blocks of {role} are to be chosen but the pool holds {len(positions)}: raise "
            "selection.multiplier, or set selection.balance=exact"
        )
    order = np.argsort(-np.asarray(score_C)[positions], kind="stable")
    return np.sort(positions[order[:k]]).astype(np.int64)
