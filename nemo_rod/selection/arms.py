"""Arms: every training run that is compared is a pair (candidate pools, policy).

    name                 pools                                    policy
    rod                  balanced, m = 2                          Joint(kappa)
    no_replay            adaptation alone                         TakeAll
    fixed_<percent>      adaptation + replay at a constant share  TakeAll
    max_replay           the whole corpus                         TakeAll
    base                 replay alone (a base trained here)       TakeAll

What a variant of `rod` may be instead:

    at a constant share  balanced                                 FixedShare
    following an arm     as many of each role or source as it     TakeAll
    on its curriculum    the batches that it recorded             TakeAll

`merge_<lambda>` is made of two others' weights and trains nothing (paper, appendix B.4).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from nemo_rod.selection.candidates import Balance, Candidates, Pool, Pools, retention_for_share
from nemo_rod.selection.curriculum.header import CurriculumHeader, SourceRow, Store
from nemo_rod.selection.curriculum.log import Curriculum
from nemo_rod.selection.curriculum.recorded_pools import FollowedPools, GroupedBy, RecordedPools
from nemo_rod.selection.estimates import SourceAverages
from nemo_rod.selection.policies import FixedShare, Joint, Policy, TakeAll, Within
from nemo_rod.selection.references import NUM_PARTS, ReferenceLosses


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One training run, as plain values that can be written down.

    Attributes:
        name: as users type it.
        num_adaptation: adaptation blocks in the store.
        num_replay: replay blocks in the store.
        batch_size: blocks trained on in one step (k).
        seed: of the candidate stream.
        balance: how the roles are mixed in the pools; "replay" draws from replay alone.
        multiplier: candidates per trained block (m).
        retention: share of the replay blocks that takes part; only for balance "corpus".
        kappa: weight of replay scores; None trains on the whole pool.
        steering: what kappa follows (`steering.Steering`); None keeps it.
        eighths: how much of every candidate is scored, from its beginning.
        scored_every: steps between two scoring passes, 0 for none after the first; scores of other
            steps are estimated from averages by source. None scores at every step.
        share: constant share of replay in every batch; None for none.
        adaptation: with a constant share, how new blocks are chosen.
        replay: the same of replay.
        recorded: file of another arm's curriculum; None for none.
        follow_by: counts that are taken from it, of each "role" or "source"; None takes its blocks.
    """

    name: str
    num_adaptation: int
    num_replay: int
    batch_size: int
    seed: int
    balance: Balance | str
    multiplier: float = 1.0
    retention: float = 1.0
    kappa: float | None = None
    steering: dict[str, Any] | None = None
    eighths: int = NUM_PARTS
    scored_every: int | None = None
    share: float | None = None
    adaptation: Within = "random"
    replay: Within = "random"
    recorded: str | None = None
    follow_by: GroupedBy | None = None

    def pools(self, store: Store | None = None) -> Pools:
        """The candidates of every step.

        Args:
            store: what a recorded curriculum must have been recorded with; None checks nothing.

        Raises:
            ValueError: a curriculum that is missing, or was recorded with something else.
        """
        if self.recorded is None:
            return self._drawn()
        curriculum = Curriculum.open(self.recorded, read_only=True)
        if self.follow_by is None:
            return RecordedPools(curriculum, store)
        return FollowedPools(self._drawn(), curriculum, by=self.follow_by, store=store)

    def _drawn(self) -> Pools:
        if self.balance == "replay":
            return ReplayStream(self)
        return Candidates(
            num_adaptation=self.num_adaptation,
            num_replay=self.num_replay,
            batch_size=self.batch_size,
            multiplier=self.multiplier,
            balance=self.balance,  # type: ignore[arg-type]
            retention=self.retention,
            seed=self.seed,
        )

    def policy(self) -> Policy:
        """How the batch is chosen from a pool."""
        if self.recorded is not None or (self.kappa is None and self.share is None):
            return TakeAll()
        if self.share is not None:
            return FixedShare(self.share, self.adaptation, self.replay)
        assert self.kappa is not None
        return Joint(self.kappa)

    def averages(self, store: StoreWithSources) -> SourceAverages | None:
        """What estimates scores between scoring passes; None if every pool is scored."""
        if self.scored_every is None:
            return None
        count = len(store.sources)
        return SourceAverages(store.source_index, count, every=self.scored_every, seed=self.seed)

    @property
    def num_candidates(self) -> int:
        """Candidates at every step (C), whether or not a recorded curriculum is there yet."""
        return self.batch_size if self.recorded is not None else self._drawn().size

    @property
    def epoch_blocks(self) -> int:
        """Blocks of one pass over what a plain arm trains on: its "epoch"."""
        drawn = self._drawn()
        assert isinstance(drawn, Candidates)
        return drawn.epoch_size

    def compute(self, steps: int) -> float:
        """Cost of a run in plain steps, where a forward pass of one trained batch counts 1/3.

        Scoring m*k candidates costs m/3 of a step (paper, appendix on computational requirements),
        scoring a prefix of them that share of it.
        """
        return steps * (1 + self.scored_blocks / self.batch_size / 3)

    @property
    def scored_blocks(self) -> float:
        """Candidates that are scored in one step, a prefix of one counted as that share of it.

        A mean over the steps, where not every one has a scoring pass.
        """
        if not self.policy().needs_scores:
            return 0.0
        return self.num_candidates * self.eighths / NUM_PARTS * self.scored_share

    @property
    def scored_share(self) -> float:
        """Share of the steps that have a scoring pass, the first one left out."""
        if self.scored_every is None:
            return 1.0
        return 1 / self.scored_every if self.scored_every else 0.0


class StoreWithSources(Store, Protocol):
    """What a curriculum's header says of a block store."""

    @property
    def sources(self) -> Sequence[Any]:
        """The sources, each with `name`, `role`, `start` and `count`."""

    def source_index(self, block_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the index in `sources` of each block's source, int64 [N]."""


def curriculum_header(
    arm: Arm, store: StoreWithSources, references: ReferenceLosses | None, *, config: str
) -> CurriculumHeader:
    """Returns what an arm's curriculum is only valid with.

    Args:
        arm: the run.
        store: where its blocks are.
        references: what it scores with, if it scores.
        config: digest of whatever else decides the choices.
    """
    return CurriculumHeader(
        num_candidates=arm.num_candidates,
        num_chosen=arm.batch_size,
        block_size=store.block_size,
        store=store.digest,
        tokenizer=store.tokenizer_fingerprint,
        references=references.digest if references else "",
        config=config,
        seed=arm.seed,
        sources=tuple(SourceRow(s.name, s.role, s.start, s.count) for s in store.sources),
        scored=arm.policy().needs_scores,
    )


class ReplayStream:
    """Replay blocks alone, shuffled anew every epoch: what a base trained here learns from."""

    def __init__(self, arm: Arm) -> None:
        self._first = arm.num_adaptation
        self._stream = Candidates(
            num_adaptation=arm.num_replay,
            num_replay=0,
            batch_size=arm.batch_size,
            multiplier=arm.multiplier,
            balance="corpus",
            seed=arm.seed,
        )
        self.size = self._stream.size

    def pool(self, step: int) -> Pool:
        """The candidates of step `step`, all of them replay."""
        ids = self._stream.pool(step).block_ids
        return Pool(step, ids + self._first, np.ones(len(ids), dtype=bool))


def arm_kind(name: str) -> str:
    """Says how an arm comes about: "base", "trained" or "merged".

    Raises:
        ValueError: for a name that no arm has.
    """
    if name == "base":
        return "base"
    if re.fullmatch(r"merge_(0(\.\d+)?|1(\.0+)?)", name):
        return "merged"
    if name in ("no_replay", "max_replay", "rod") or _fixed_share(name):
        return "trained"
    raise ValueError(
        f"There is no arm '{name}': expected base, no_replay, fixed_<percent>, max_replay, "
        "merge_<lambda>, rod, or a name in 'variants'; change 'arms' or 'arm'."
    )


def merge_weight(name: str) -> float:
    """The weight of `merge_<lambda>`: 0 is the base, 1 the specialist."""
    return float(name.removeprefix("merge_"))


def make_arm(
    name: str, *, num_adaptation: int, num_replay: int, batch_size: int, seed: int, **selecting: Any
) -> Arm:
    """Builds a trained arm of the paper from its name.

    Args:
        name: base, no_replay, fixed_<percent>, max_replay or rod.
        num_adaptation: see `Arm`.
        num_replay: see `Arm`.
        batch_size: see `Arm`.
        seed: see `Arm`.
        selecting: attributes of `Arm` that only rod has, such as its multiplier and kappa.

    Raises:
        ValueError: if the store cannot serve the arm.
    """
    common: dict[str, Any] = {
        "name": name,
        "num_adaptation": num_adaptation,
        "num_replay": num_replay,
        "batch_size": batch_size,
        "seed": seed,
    }
    if name == "rod":
        assert "kappa" in selecting  # without it, an arm trains on its whole pools
        return Arm(**common, **selecting)
    if name == "base":
        return Arm(**common, balance="replay")
    share = _fixed_share(name)
    if share is not None:
        retention = retention_for_share(share, num_adaptation, num_replay)
    else:
        retention = 0.0 if name == "no_replay" else 1.0
    return Arm(**common, balance="corpus", retention=retention)


def _fixed_share(name: str) -> float | None:
    match = re.fullmatch(r"fixed_(\d{1,2}(\.\d+)?)", name)
    return float(match[1]) / 100 if match else None
