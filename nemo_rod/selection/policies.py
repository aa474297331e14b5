"""Policies, which choose the blocks of a step from its pool.

    policy                chooses                                           paper
    Joint(kappa)          the k highest scores, regardless of role          Eq. "joint selection"
    FixedShare(share)     a fixed number of each role, at random or by rho  ablation of components
    TakeAll()             the whole pool                                    plain training

Others have a file each: `Mix`, `Schedule`, `ODM`. What an arm needs, such as
scoring passes, a specialist and references, follows from `needs` alone.

Every policy returns ascending candidate positions and breaks ties in favor of the earlier
candidate. A score of -inf marks padding, which is never chosen; `choose` refuses or excludes any
other non-finite score beforehand.

Shape suffixes: C = candidates, K = chosen, G = groups of candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

from nemo_rod.roles import ROLES
from nemo_rod.selection.arrays import Floats, Ids, Mask, Nats
from nemo_rod.selection.candidates import Pool

Within = Literal["random", "rho"]
NOTHING: frozenset[str] = frozenset()
LOSSES = frozenset({"losses"})  # a scoring pass
SCORES = frozenset({"losses", "references"})  # a scoring pass, and reference losses for it
REFERENCES = frozenset({"references"})  # reference losses, without a scoring pass
OF_REPLAY = frozenset({"replay_references"})  # reference losses of replay alone: the base's
HELD_OUT = frozenset({"held_out"})  # held-out losses during training, which `measured` hears of
_KNOWN = SCORES | OF_REPLAY | HELD_OUT


class Policy(Protocol):
    """Chooses the blocks of a step from its pool.

    Two members are required. A policy may also have any of these, which are found by name:

        estimate(pool) -> score_C     scores without a scoring pass, recorded as the step's
        weigh(pool, score_C)          the scores as the policy compares them, for tau
        observe(choice, loss_K)       called after every update with the losses of the blocks that
                                      were trained on, nats per token, float32 [K]: from the scoring
                                      pass if there was one, else from the update itself
        measured(step, metrics)       called after the `observe` of a step after which held-out
                                      losses were measured, with its metrics, if it needs "held_out"
        state: dict[str, ndarray]     the values that these two change, and nothing else does
        metrics(choice)               values that are logged with the step, before `observe`, by
                                      names that begin with rod/
        check_sources(sources)        called at setup with the sources of the run, each with `name`
                                      and `role`; refuses those that it has no plan for

    Arrays that it is given cannot be written to. A run works on a copy with a state of its own.
    A resumed run repeats both from its record, once, and gives the resulting state to all ranks:
    the state needs no file, and survives a kill at any step and a change of the layout.
    """

    @property
    def needs(self) -> frozenset[str]:
        """What it chooses by; what a run computes follows from it.

        "losses" of a scoring pass; "references" to compare losses with, or "replay_references" for
        those of replay alone, which need no specialist; "held_out" losses during training.
        """

    def select(self, pool: Pool, score_C: Floats | None, k: int) -> Ids:
        """Returns the chosen candidate positions, int64 [K], ascending.

        It may be called more than once for a step, and on every rank, so it changes nothing.

        Args:
            pool: the candidates, with their roles and sources.
            score_C: scores in nats [C], finite except for padding, which is -inf: loss less
                reference loss, or the loss without references; None if the step has no scores.
            k: number of blocks to choose.

        Raises:
            ValueError: the pool holds too few blocks to choose from (for `TakeAll`, any other
                number than k).
        """


# Returns scores, float32 [C], from losses and reference losses, nats per token [C]. An attribute
# `needs` of LOSSES says that it ignores the references, which are then zero.
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
        >>> pool = Pool(0, np.arange(3), np.array([False, False, True]))
        >>> Joint(kappa=1.0).select(pool, np.array([0.1, 0.4, 0.3]), 2)
        array([1, 2])
    """

    kappa: float = 1.0  # value of one nat of forgetting in nats of learning; scales replay scores
    needs = SCORES

    def __post_init__(self) -> None:
        if not (math.isfinite(self.kappa) and self.kappa >= 0):
            raise ValueError(f"selection.kappa is {self.kappa}, expected a finite number >= 0")

    def weigh(self, pool: Pool, score_C: Floats) -> Floats:
        """Returns the scores [C], those of replay multiplied by kappa; padding stays -inf."""
        weighted_C = np.asarray(score_C, dtype=np.float64).copy()
        scaled_C = np.asarray(pool.is_replay_C, dtype=bool) & np.isfinite(weighted_C)
        weighted_C[scaled_C] *= self.kappa
        return weighted_C

    def select(self, pool: Pool, score_C: Floats | None, k: int) -> Ids:
        """Returns the positions of the k highest weighted scores; see `Policy.select`."""
        assert score_C is not None, "joint selection without scores"
        positions = np.flatnonzero(~padding(pool, score_C))
        return _highest(self.weigh(pool, score_C), positions, k, "any role")


@dataclass(frozen=True)
class FixedShare(Policy):
    """Chooses round(share * k) replay blocks, else adaptation (paper, component ablation).

    In each role, "random" takes the first blocks of the pool (which is shuffled), "rho" those with
    the highest scores.

    Example:
        >>> pool = Pool(0, np.arange(4), np.array([False, False, True, True]))
        >>> FixedShare(0.5).select(pool, None, 2)
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
    def needs(self) -> frozenset[str]:
        """Scores, if they choose within a role."""
        return SCORES if "rho" in (self.adaptation, self.replay) else NOTHING

    def select(self, pool: Pool, score_C: Floats | None, k: int) -> Ids:
        """Returns k positions with the fixed share of replay; see `Policy.select`."""
        assert score_C is not None or not self.needs, "selection by score without scores"
        real_C = ~padding(pool, score_C)
        num_replay = round(self.share * k)
        is_replay_C = np.asarray(pool.is_replay_C, dtype=bool)
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
        >>> TakeAll().select(Pool(0, np.arange(2), np.array([False, True])), None, 2)
        array([0, 1])
    """

    needs = NOTHING

    def select(self, pool: Pool, score_C: Floats | None, k: int) -> Ids:
        """Returns every position that is not padding; see `Policy.select`."""
        positions = np.flatnonzero(~padding(pool, score_C))
        if len(positions) != k:
            raise ValueError(
                f"TakeAll trains on the whole pool, but the pool holds {len(positions)} blocks and "
                f"the batch {k}: draw as many candidates as are trained on, or take the batch size "
                "of the recorded curriculum"
            )
        return positions


def needs_of(policy: Policy, score: Score) -> frozenset[str]:
    """Returns what a policy and the score that it chooses by need together.

    Raises:
        ValueError: one of them is none; see `check_policy`.
    """
    needs, of_score = check_policy(policy).needs, getattr(score, "needs", SCORES)
    is_known = isinstance(of_score, frozenset | set) and LOSSES <= of_score <= SCORES
    if not (callable(score) and is_known):
        raise ValueError(
            f"{getattr(score, '__name__', score)} is no score: expected a function (loss_C, "
            "reference_C) -> score_C, without `needs` or with frozenset({'losses'}), found needs="
            f"{of_score!r}."
        )
    return needs - (SCORES - of_score) if "losses" in needs else needs


def reference_roles(needs: frozenset[str]) -> tuple[str, ...]:
    """Returns the roles whose blocks are compared with reference losses."""
    if "references" in needs:
        return ROLES
    return ("replay",) if needs & OF_REPLAY else ()


def has_scores(policy: Policy) -> bool:
    """Returns whether a policy chooses by scores: of a scoring pass, or its own estimates."""
    return "losses" in policy.needs or hasattr(policy, "estimate")


def observes(policy: Policy) -> bool:
    """Returns whether a policy learns from the losses of the blocks that were trained on."""
    return hasattr(policy, "observe")


def keeps_state(policy: Policy) -> bool:
    """Returns whether a policy's choices depend on what it was told of earlier steps."""
    return observes(policy) or "held_out" in policy.needs


def waits_for_update(policy: Policy) -> bool:
    """Returns whether a policy observes losses that only an update can tell."""
    return observes(policy) and "losses" not in policy.needs


def check_policy(policy: Any) -> Policy:
    """Refuses an object that is no policy.

    Raises:
        ValueError: it lacks a member, or has other needs than the known ones.
    """
    name = type(policy).__name__
    needs: Any = getattr(policy, "needs", None)
    if isinstance(policy, type):
        raise ValueError(f"{policy.__name__} is a class: give a policy, {policy.__name__}().")
    if not (isinstance(needs, frozenset | set) and needs <= _KNOWN) or needs >= LOSSES | OF_REPLAY:
        raise ValueError(
            f"{name} has needs={needs!r}, expected a frozenset of {', '.join(sorted(_KNOWN))}; "
            "'replay_references' are too few for the scores of 'losses'."
        )
    needed = {"select", "measured"} if "held_out" in needs else {"select"}
    optional = ("estimate", "weigh", "observe", "measured", "metrics", "check_sources")
    for method in ("select", *optional):
        if not callable(getattr(policy, method, None if method in needed else NOTHING.union)):
            raise ValueError(f"{name} is no policy: expected a method {method}, as in `Policy`.")
    checked: Policy = policy
    if keeps_state(checked):
        try:
            policy.state = policy.state
        except AttributeError:  # also of a frozen dataclass
            raise ValueError(
                f"{name} learns during training, but has no `state` that can be replaced: expected "
                "a dictionary of arrays, which a resumed run restores."
            ) from None
    return checked


def padding(pool: Pool, score_C: Floats | None) -> Mask:
    """Returns which candidates are padding, bool [C]."""
    if score_C is None:
        return np.zeros(len(pool.is_replay_C), dtype=bool)
    shape, expected = np.shape(score_C), np.shape(pool.is_replay_C)
    assert shape == expected, f"{shape} scores, {expected} roles"
    return np.isneginf(score_C)


def apportion(share_G: Floats, k: int, step: int) -> Ids:
    """Divides k blocks among groups by their shares, int64 [G].

    Each count is share * k rounded up or down. Where a count would be rounded up at some steps and
    down at others follows the golden ratio, so that after any number of steps the counts add up to
    the shares, within a few blocks, without a memory of earlier steps.
    """
    end_G = np.cumsum(share_G, dtype=np.float64)
    offset = (0.5 + step * 0.6180339887498949) % 1.0
    last_G = np.floor(end_G / end_G[-1] * k + offset)
    last_G[-1] = k  # rounding errors of the sum must not lose a block
    return np.diff(np.minimum(last_G, k), prepend=0.0).astype(np.int64)


def first_of_groups(group_C: Ids, count_G: Ids, k: int) -> Ids:
    """Returns the first candidates of each group, as many as counted, int64 [K], ascending.

    Pools are shuffled, so these are random samples. What a group lacks is taken from the first
    candidates that are left.
    """
    taken_C = np.zeros(len(group_C), dtype=bool)
    for group, count in enumerate(count_G.tolist()):
        taken_C[np.flatnonzero(group_C == group)[:count]] = True
    missing = k - int(taken_C.sum())
    if missing > len(group_C) - (k - missing):
        raise ValueError(
            f"{k} blocks are to be chosen but the pool holds {len(group_C)}: draw more candidates."
        )
    taken_C[np.flatnonzero(~taken_C)[:missing]] = True
    return np.flatnonzero(taken_C)


def _highest(score_C: Floats, positions: npt.NDArray[np.intp], k: int, role: str) -> Ids:
    """Returns the k highest-scoring positions, ascending."""
    if len(positions) < k:
        raise ValueError(
            f"{k} blocks of {role} are to be chosen but the pool holds {len(positions)}: draw more "
            "candidates for each, or as many of each role (in a recipe, selection.balance=exact)"
        )
    scores = np.asarray(score_C)[positions]
    assert np.isfinite(scores).all(), f"scores of {role} are not finite: {scores}"
    order = np.argsort(-scores, kind="stable")
    return np.sort(positions[order[:k]]).astype(np.int64)
