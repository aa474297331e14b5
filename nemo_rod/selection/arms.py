"""Arms: every training run in a comparison is a pair (candidate pools, policy).

    name                 pools                                    policy
    rod                  balanced, m = 2                          Joint(kappa)
    no_replay            adaptation alone                         TakeAll
    fixed_<percent>      adaptation + replay at a constant share  TakeAll
    max_replay           the whole corpus                         TakeAll
    base                 replay alone (a base trained here)       TakeAll

Alternatives for a variant of `rod`:

    at a constant share  balanced                                 FixedShare
    following an arm     same counts per role or source           TakeAll
    on its curriculum    the batches that it recorded             TakeAll

`merge_<lambda>` combines the weights of two other arms without training (paper, appendix B.4).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_rod.selection.blocks import Blocks
from nemo_rod.selection.candidates import Balance, Candidates, Pool, Pools, retention_for_share
from nemo_rod.selection.curriculum.header import CurriculumHeader, SourceRow
from nemo_rod.selection.curriculum.log import Curriculum
from nemo_rod.selection.curriculum.recorded_pools import FollowedPools, GroupedBy, RecordedPools
from nemo_rod.selection.estimates import SourceAverages
from nemo_rod.selection.policies import FixedShare, Joint, Policy, TakeAll, Within
from nemo_rod.selection.references import NUM_PARTS, ReferenceLosses


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One training run as plain, serializable values.

    Attributes:
        name: Name of the arm, as users type it.
        num_adaptation: Adaptation blocks in the store.
        num_replay: Replay blocks in the store.
        batch_size: Blocks trained on in one step (k).
        seed: Seed of the candidate stream.
        balance: How the roles are mixed in the pools; "replay" draws from replay alone.
        multiplier: Candidates per trained block (m).
        retention: Fraction of the replay blocks in use; only for balance "corpus".
        kappa: Weight of replay scores; None trains on the whole pool.
        steering: What kappa follows (`kappa_controller.Steering`); None keeps it constant.
        eighths: How many leading eighths of every candidate are scored.
        scored_every: Steps between two scoring passes, 0 for none after the first; at other steps,
            scores are estimated from averages by source. None scores at every step.
        share: Constant share of replay in every batch; None for no constant share.
        adaptation: How adaptation blocks are chosen under a constant share.
        replay: How replay blocks are chosen under a constant share.
        recorded: File of another arm's curriculum; None if the arm follows no other.
        follow_by: Whether to match its counts per "role" or per "source"; None takes its blocks.
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

    def pools(self, store: Blocks | None = None) -> Pools:
        """The candidates of every step.

        Args:
            store: Store that a recorded curriculum must match; None skips the check.

        Raises:
            ValueError: The curriculum is missing or was recorded with another store.
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

    def averages(self, store: Blocks) -> SourceAverages | None:
        """The estimator of scores between scoring passes; None if every pool is scored."""
        if self.scored_every is None:
            return None
        count = len(store.sources)
        return SourceAverages(store.source_index, count, every=self.scored_every, seed=self.seed)

    @property
    def num_candidates(self) -> int:
        """Candidates per step (C); does not require a recorded curriculum to exist yet."""
        return self.batch_size if self.recorded is not None else self._drawn().size

    @property
    def epoch_blocks(self) -> int:
        """Blocks in one pass over the data of a plain arm: its "epoch"."""
        drawn = self._drawn()
        assert isinstance(drawn, Candidates)
        return drawn.epoch_size

    def compute(self, steps: int) -> float:
        """Cost of a run in plain steps, where a forward pass of one trained batch counts 1/3.

        Scoring m*k candidates costs m/3 of a step (paper, appendix on computational requirements);
        scoring only their prefixes costs proportionally less.
        """
        return steps * (1 + self.scored_blocks / self.batch_size / 3)

    @property
    def scored_blocks(self) -> float:
        """Candidates scored per step; a prefix counts as its fraction of a candidate.

        This is the mean over all steps if only some have a scoring pass.
        """
        if not self.policy().needs_scores:
            return 0.0
        return self.num_candidates * self.eighths / NUM_PARTS * self.scored_share

    @property
    def scored_share(self) -> float:
        """Fraction of the steps, not counting the first, that have a scoring pass."""
        if self.scored_every is None:
            return 1.0
        return 1 / self.scored_every if self.scored_every else 0.0


def curriculum_header(
    arm: Arm, store: Blocks, references: ReferenceLosses | None, *, config: str
) -> CurriculumHeader:
    """Returns the provenance of an arm's curriculum, which must match when it is used.

    Args:
        arm: The run.
        store: The block store it draws from.
        references: The reference losses, if it scores.
        config: Digest of everything else that affects the choices.
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
    """Replay blocks alone, reshuffled every epoch: the data of a base trained here."""

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
        """The candidates of a step, all of them replay."""
        ids = self._stream.pool(step).block_ids
        return Pool(step, ids + self._first, np.ones(len(ids), dtype=bool))


def arm_kind(name: str) -> str:
    """Returns how an arm is produced: "base", "trained" or "merged".

    Raises:
        ValueError: No arm has this name.
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
    """Builds one of the paper's trained arms from its name.

    Args:
        name: One of base, no_replay, fixed_<percent>, max_replay and rod.
        num_adaptation: See `Arm`.
        num_replay: See `Arm`.
        batch_size: See `Arm`.
        seed: See `Arm`.
        selecting: Attributes of `Arm` that only rod has, such as its multiplier and kappa.

    Raises:
        ValueError: The store cannot serve the arm.
    """
    common: dict[str, Any] = {
        "name": name,
        "num_adaptation": num_adaptation,
        "num_replay": num_replay,
        "batch_size": batch_size,
        "seed": seed,
    }
    if name == "rod":
        assert "kappa" in selecting  # without kappa, an arm trains on its whole pools
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
