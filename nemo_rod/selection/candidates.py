"""Draws the candidate blocks of a step as a pure function of (seed, step).

The step is the only state to save, and nothing depends on the number of ranks. Block ids are
dense: adaptation is [0, num_adaptation), replay is [num_adaptation, num_adaptation + num_replay).
Every epoch has its own keyed permutation (`permutation.py`), so blocks recur in every epoch but in
a new order.

    balance   one epoch is                                     a pool is
    exact     every block of a role, each role by itself       ceil(C/2) adaptation, the rest replay
    expected  adaptation + equally many replay, one shuffle    C of them, half of each on average
    corpus    adaptation + a fraction `retention` of replay    C of them
    replay    replay alone, for a base trained here            C of them

"expected" is the paper's (Appendix A, "Candidate construction").

The order of a pool carries no meaning: pools are shuffled, so the first n candidates of a role are
a random sample of n. Near the end of an epoch, and in a store smaller than a pool, a block may
appear twice in one pool.

Shape suffixes: C = candidates, K = chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, get_args

import numpy as np

from nemo_rod.bounds import check_bounds, key
from nemo_rod.roles import ROLES, SourceRow
from nemo_rod.selection.arrays import Ids, Mask, read_only
from nemo_rod.selection.blocks import Blocks
from nemo_rod.selection.permutation import derive_key, permute

Balance = Literal["exact", "expected", "corpus", "replay"]


@dataclass(frozen=True)
class Pool:
    """The candidate blocks of one step.

    Without a store (`of`), the sources are unknown, and each role counts as one.

    Example:
        >>> Pool(step=0, block_ids=np.array([3, 8]), is_replay_C=np.array([False, True])).source_C
        array([0, 1])
    """

    step: int  # optimizer step, from 0
    block_ids: Ids  # int64 [C]
    is_replay_C: Mask  # bool [C]
    source_C: Ids = field(default_factory=lambda: np.empty(0, np.int64))  # rows of `sources`, [C]
    sources: Sequence[Any] = ()  # each with `name` and `role`
    seed: int = 0  # the arm's, for policies that draw at random
    steps: int = 0  # steps of the whole run, for policies that look ahead; 0: unknown

    def __post_init__(self) -> None:
        if not self.sources:
            object.__setattr__(self, "source_C", np.asarray(self.is_replay_C, dtype=np.int64))
            roles = [SourceRow(role, role, 0, 0) for role in ROLES]
            object.__setattr__(self, "sources", roles)
        for name in ("block_ids", "is_replay_C", "source_C"):
            object.__setattr__(self, name, read_only(getattr(self, name)))

    def of(self, store: Blocks, seed: int, steps: int = 0) -> Pool:
        """Returns the pool with the sources of its blocks in a store, and facts about its run."""
        source_C = store.source_index(self.block_ids)
        return replace(self, source_C=source_C, sources=store.sources, seed=seed, steps=steps)


class Pools(Protocol):
    """Provides the pool of every step."""

    @property
    def size(self) -> int:
        """Number of candidates C at every step."""

    def pool(self, step: int) -> Pool:
        """Returns the candidates of a step."""


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Stateless candidate stream over a block store; see the module docstring.

    Example:
        >>> candidates = Candidates(num_adaptation=6, num_replay=4, batch_size=2, balance="exact")
        >>> candidates.pool(step=0).is_replay_C.sum(), candidates.size
        (np.int64(2), 4)

    Raises:
        ValueError: a value is out of range, or the store cannot serve the balance.
    """

    num_adaptation: int  # adaptation blocks in the store
    num_replay: int  # replay blocks in the store
    batch_size: int  # blocks trained on per step (k)
    multiplier: float = key(2.0, "in [1, 1024]")  # candidates per trained block (m), also broken
    balance: Balance = "expected"
    # Replay blocks in an epoch, as a fraction of the store's; only for balance "corpus". The blocks
    # at one retention are a subset of those at any larger one; above 1, blocks recur.
    retention: float = 1.0
    seed: int = 42  # seeds every permutation

    def __post_init__(self) -> None:
        check_bounds(self, "selection.")
        balance, retention, adaptation = self.balance, self.retention, self.num_adaptation
        replay = self.num_replay
        for is_broken, problem in (
            (self.batch_size < 1,
             f"batch_size is {self.batch_size}, expected at least 1 block per step"),
            (balance not in get_args(Balance),
             f"selection.balance is {balance!r}, expected one of exact, expected, corpus"),
            (not (math.isfinite(retention) and retention >= 0),
             f"retention is {retention}, expected a fraction of replay, at least 0"),
            (balance != "corpus" and retention != 1,
             f"retention is {retention} with balance {balance!r}, which takes no retention: use "
             "balance 'corpus' or leave retention at 1"),
            (min(adaptation, replay) < 0,
             f"num_adaptation is {adaptation} and num_replay {replay}, expected counts >= 0"),
            (balance in ("exact", "expected") and not (adaptation and replay),
             f"balance {balance!r} needs blocks of both roles, but the store has {adaptation} "
             f"adaptation and {replay} replay blocks: add a source or use balance 'corpus'"),
            (math.isfinite(retention) and self.epoch_size == 0,
             f"no blocks to draw from: {adaptation} adaptation blocks and retention {retention} of "
             f"{replay} replay blocks"),
        ):  # fmt: skip
            if is_broken:
                raise ValueError(problem)

    @property
    def size(self) -> int:
        """Number of candidates C = round(multiplier * batch_size) at every step."""
        return round(self.multiplier * self.batch_size)

    @property
    def num_kept_replay(self) -> int:
        """Number of replay blocks in an epoch under balance "corpus"."""
        return round(self.retention * self.num_replay)

    @property
    def epoch_size(self) -> int:
        """Candidates in one shuffle (under balance "exact", in one of the adaptation role)."""
        if self.balance == "exact":
            return self.num_adaptation
        if self.balance == "expected":
            return 2 * self.num_adaptation
        if self.balance == "replay":
            return self.num_replay
        return self.num_adaptation + self.num_kept_replay

    def pool(self, step: int) -> Pool:
        """Returns the `size` candidates of a step, counted from 0."""
        assert step >= 0, f"pool of step {step}"
        if self.balance == "exact":
            order = permute(np.arange(self.size), self.size, derive_key(self.seed, "pool", step))
            ids = self._roles(step, 1)[order]
        else:
            ids = self._stream(step * self.size, self.size)
        return Pool(step=step, block_ids=ids, is_replay_C=ids >= self.num_adaptation)

    def drawn(self, steps: int, roles: Collection[str] = ROLES) -> Mask:
        """Returns a mask of the candidates of some roles in the first steps, bool [all blocks]."""
        drawn = np.zeros(self.num_adaptation + self.num_replay, dtype=bool)
        if self.balance == "exact":
            drawn[self._roles(0, steps)] = True
        else:  # no later epoch draws other blocks
            drawn[self._stream(0, min(steps * self.size, self.epoch_size))] = True
        for role, part in zip(ROLES, np.split(drawn, [self.num_adaptation]), strict=True):
            part &= role in roles
        return drawn

    def _roles(self, first: int, steps: int) -> Ids:
        """Returns the candidates of several steps under balance "exact", role by role."""
        ids, num_replay = [], self.size // 2
        for role, start, count, size in (
            ("adaptation", 0, self.size - num_replay, self.num_adaptation),
            ("replay", self.num_adaptation, num_replay, self.num_replay),
        ):
            drawn = min(steps * count, max(count, size))  # no later epoch draws other blocks
            ids.append(start + _draw(first * count, drawn, size, self._permutation(role, size)))
        return np.concatenate(ids)

    def _stream(self, start: int, count: int) -> Ids:
        """Returns the candidates of a shuffle of both roles, or of replay alone.

        Replay slots of the shuffle index a fixed subsample, the first of a keyed permutation; if
        there are more slots than replay blocks, new permutations follow, to favor no block.
        """
        num_slots = self.num_adaptation if self.balance == "expected" else self.num_kept_replay
        permuted = self._permutation("stream", self.epoch_size)
        subsample = self._permutation("subsample", self.num_replay)

        def blocks(epoch: int, index: Ids) -> Ids:
            ids = permuted(epoch, index)
            if self.balance == "replay":
                return self.num_adaptation + ids
            replay = np.flatnonzero(ids >= self.num_adaptation)
            slot_n = ids[replay] - self.num_adaptation
            if num_slots > self.num_replay:
                slot_n += epoch * num_slots
            pass_n = slot_n // max(1, self.num_replay)
            for number in np.unique(pass_n).tolist():
                slots = slot_n[pass_n == number] % self.num_replay
                ids[replay[pass_n == number]] = self.num_adaptation + subsample(number, slots)
            return ids

        return _draw(start, count, self.epoch_size, blocks)

    def _permutation(self, name: str, size: int) -> Callable[[int, Ids], Ids]:
        """Returns the function (epoch, index) -> index of the shuffle called `name`."""
        return lambda epoch, index: permute(index, size, derive_key(self.seed, name, epoch))


def _draw(start: int, count: int, size: int, epoch_blocks: Callable[[int, Ids], Ids]) -> Ids:
    """Takes `count` elements, from `start`, of an endless series of epochs of `size` each."""
    parts = [np.empty(0, dtype=np.int64)]
    while count:
        epoch, first = divmod(start, size)
        taken = min(count, size - first)
        parts.append(epoch_blocks(epoch, np.arange(first, first + taken)))
        start, count = start + taken, count - taken
    return np.concatenate(parts)


def retention_for_share(share: float, num_adaptation: int, num_replay: int) -> float:
    """Returns the retention at which replay makes up `share` of a corpus stream, >= 0.

    Raises:
        ValueError: the share is not in [0, 1), or the store has no replay blocks for it.
    """
    if not 0 <= share < 1:
        raise ValueError(f"the replay share is {share}, expected a fraction in [0, 1)")
    needed = share * num_adaptation / (1 - share)
    if round(needed) and not num_replay:
        raise ValueError(
            f"a replay share of {share} needs replay blocks, but the store has none: add a source "
            "with role=replay"
        )
    return needed / num_replay if num_replay else 0.0
