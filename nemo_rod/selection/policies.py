"""Policies, which turn scores into the chosen blocks.

    policy                chooses                                           paper
    Joint(kappa)          the k highest scores, regardless of role          Eq. "joint selection"
    FixedShare(share)     a fixed number of each role, at random or by rho  ablation of components
    TakeAll()             the whole pool                                    plain training

Every policy returns ascending candidate positions and breaks ties in favor of the earlier
candidate. A score of -inf marks padding, which is never chosen; `choose` refuses or excludes any
other non-finite score beforehand.

Shape suffixes: C = candidates, K = chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

from nemo_rod.selection.arrays import Floats, Ids, Mask, Nats

Within = Literal["random", "rho"]


class Policy(Protocol):
    """Turns the scores of a pool into the chosen blocks."""

    @property
    def needs_scores(self) -> bool:
        """Whether `select` uses scores; if not, they may be None and no scoring is needed."""

    def weigh(self, score_C: Floats, is_replay_C: Mask) -> Floats:
        """Returns the scores as the policy compares them, for tau."""
        return score_C

    def select(self, score_C: Floats | None, is_replay_C: Mask, k: int) -> Ids:
        """Returns the chosen candidate positions, int64 [K], ascending.

        Args:
            score_C: scores in nats [C], finite except for padding, which is -inf.
            is_replay_C: bool [C].
            k: number of blocks to choose.

        Raises:
            ValueError: the pool holds too few blocks to choose from (for `TakeAll`, any other
                number than k).
        """


# Returns scores, float32 [C], from losses and reference losses, nats per token [C].
Score = Callable[[Floats, Floats], Nats]


def reducible_loss(loss_C: Floats, reference_C: Floats) -> Nats:
    """Returns rho = loss - reference loss, in nats (paper, Eq. "rho").

    Losses are those of the current and of the reference model, nats per token [C]. Scores are
    float32 [C], and exactly 0 where both losses are equal.

    Example:
        >>> reducible_loss(np.array([2.5, 1.0]), np.array([2.0, 1.0]))
        array([0.5, 0. ], dtype=float32)
    """
    losses: Nats = np.asarray(loss_C, dtype=np.float32)
    references: Nats = np.asarray(reference_C, dtype=np.float32)
    assert losses.shape == references.shape, f"{losses.shape} losses, {references.shape} references"
    return losses - references


@dataclass(frozen=True)
class Joint(Policy):
    """Chooses the k highest scores: adaptation and replay compete for the same slots.

    Example:
        >>> Joint(kappa=1.0).select(np.array([0.1, 0.4, 0.3]), np.array([False, False, True]), 2)
        array([1, 2])
    """

    kappa: float = 1.0  # value of one nat of forgetting in nats of learning; scales replay scores
    needs_scores = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.kappa) and self.kappa >= 0):
            raise ValueError(f"selection.kappa is {self.kappa}, expected a finite number >= 0")

    def weigh(self, score_C: Floats, is_replay_C: Mask) -> Floats:
        """Returns the scores [C], those of replay multiplied by kappa; padding stays -inf."""
        weighted_C = np.asarray(score_C, dtype=np.float64).copy()
        scaled_C = np.asarray(is_replay_C, dtype=bool) & np.isfinite(weighted_C)
        weighted_C[scaled_C] *= self.kappa
        return weighted_C

    def select(self, score_C: Floats | None, is_replay_C: Mask, k: int) -> Ids:
        """Returns the positions of the k highest weighted scores; see `Policy.select`."""
        assert score_C is not None, "joint selection without scores"
        positions = np.flatnonzero(~_padding(score_C, is_replay_C))
        return _highest(self.weigh(score_C, is_replay_C), positions, k, "any role")


@dataclass(frozen=True)
class FixedShare(Policy):
    """Chooses round(share * k) replay blocks, else adaptation (paper, component ablation).

    In each role, "random" takes the first blocks of the pool (which is shuffled), "rho" those with
    the highest scores.

    Example:
        >>> FixedShare(0.5).select(None, np.array([False, False, True, True]), 2)
        array([0, 2])
    """

    share: float  # fraction of replay in the batch
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

    def select(self, score_C: Floats | None, is_replay_C: Mask, k: int) -> Ids:
        """Returns k positions with the fixed share of replay; see `Policy.select`."""
        assert score_C is not None or not self.needs_scores, "selection by score without scores"
        real_C = ~_padding(score_C, is_replay_C)
        num_replay = round(self.share * k)
        is_replay_C = np.asarray(is_replay_C, dtype=bool)
        parts = []
        for role, within, in_role_C, count in (
            ("adaptation", self.adaptation, ~is_replay_C, k - num_replay),
            ("replay", self.replay, is_replay_C, num_replay),
        ):
            rank_by_C = score_C if within == "rho" else np.zeros(len(real_C))
            assert rank_by_C is not None
            parts.append(_highest(rank_by_C, np.flatnonzero(real_C & in_role_C), count, role))
        return np.sort(np.concatenate(parts))


@dataclass(frozen=True)
class TakeAll(Policy):
    """Takes the whole pool: plain training on a corpus stream or on a recorded curriculum.

    Example:
        >>> TakeAll().select(None, np.array([False, True]), 2)
        array([0, 1])
    """

    needs_scores = False

    def select(self, score_C: Floats | None, is_replay_C: Mask, k: int) -> Ids:
        """Returns every position that is not padding; see `Policy.select`."""
        positions = np.flatnonzero(~_padding(score_C, is_replay_C))
        if len(positions) != k:
            raise ValueError(
                f"TakeAll trains on the whole pool, but the pool holds {len(positions)} blocks and "
                f"the batch {k}: set selection.multiplier=1, or the batch size of the recorded "
                "curriculum"
            )
        return positions


def _padding(score_C: Floats | None, is_replay_C: Mask) -> Mask:
    """Returns which candidates are padding, bool [C]."""
    if score_C is None:
        return np.zeros(len(is_replay_C), dtype=bool)
    shape, expected = np.shape(score_C), np.shape(is_replay_C)
    assert shape == expected, f"{shape} scores, {expected} roles"
    return np.isneginf(score_C)


def _highest(score_C: Floats, positions: npt.NDArray[np.intp], k: int, role: str) -> Ids:
    """Returns the k highest-scoring positions, ascending."""
    if len(positions) < k:
        raise ValueError(
            f"{k} blocks of {role} are to be chosen but the pool holds {len(positions)}: raise "
            "selection.multiplier, or set selection.balance=exact"
        )
    scores = np.asarray(score_C)[positions]
    assert np.isfinite(scores).all(), f"scores of {role} are not finite: {scores}"
    order = np.argsort(-scores, kind="stable")
    return np.sort(positions[order[:k]]).astype(np.int64)
