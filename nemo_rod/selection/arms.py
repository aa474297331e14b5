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
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from typing import Any

from nemo_rod import parts
from nemo_rod.selection.blocks import Blocks
from nemo_rod.selection.candidates import Balance, Candidates, Pools, retention_for_share
from nemo_rod.selection.curriculum.header import CurriculumHeader
from nemo_rod.selection.curriculum.log import Curriculum
from nemo_rod.selection.curriculum.recorded_pools import FollowedPools, GroupedBy, RecordedPools
from nemo_rod.selection.policies import FixedShare, Policy, Score, TakeAll, Within
from nemo_rod.selection.references import References


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One training run as plain, serializable values."""

    name: str  # as users type it
    num_adaptation: int  # adaptation blocks in the store
    num_replay: int  # replay blocks in the store
    batch_size: int  # blocks trained on in one step (k)
    seed: int  # of the candidate stream
    balance: Balance  # how the roles are mixed in the pools; see `Candidates`, as for the next two
    multiplier: float = 1.0  # candidates per trained block (m)
    retention: float = 1.0  # fraction of the replay blocks in use
    kappa: float | None = None  # weight of replay scores; None trains on the whole pool
    policy_name: str = "joint"  # registered policy that chooses from the scores (`nemo_rod.parts`)
    policy_options: dict[str, Any] | None = None  # arguments of a registered policy
    score_name: str = "reducible_loss"  # registered score, of losses and reference losses
    prefix: str = "1"  # scored share of every candidate, from its start, such as "1/4"
    # Steps between two scoring passes, 0 for none after the first: at other steps, scores are
    # estimated from averages by source. None scores at every step.
    scored_every: int | None = None
    share: float | None = None  # constant share of replay in every batch
    adaptation: Within = "random"  # how adaptation blocks are chosen under a constant share
    replay: Within = "random"  # how replay blocks are chosen under a constant share
    recorded: str | None = None  # file of the curriculum of another arm, which this one follows
    follow_by: GroupedBy | None = None  # match its counts per "role" or "source"; None: its blocks

    def pools(self, store: Blocks | None = None) -> Pools:
        """Returns the candidates of every step.

        Raises:
            ValueError: the recorded curriculum is missing or was recorded with another store.
        """
        if self.recorded is None:
            return self.candidates
        curriculum = Curriculum.open(self.recorded, read_only=True)
        if self.follow_by is None:
            return RecordedPools(curriculum, store)
        return FollowedPools(self.candidates, curriculum, by=self.follow_by, store=store)

    def policy(self) -> Policy:
        """Returns the rule that chooses the batch from a pool."""
        if self.recorded is None and self.share is not None:
            return FixedShare(self.share, self.adaptation, self.replay)
        if self.recorded is None and self.kappa is not None:
            return registered_policy(self.policy_name, self.policy_options, kappa=self.kappa)
        return TakeAll()

    def score(self) -> Score:
        """Returns the function from losses and reference losses to scores."""
        score: Score = parts.load("scores", self.score_name, key="selection.score")
        return score

    def as_digested(self) -> dict[str, Any]:
        """Returns the values that enter digests: no defaults, so that a new field changes none."""
        defaults = {item.name: item.default for item in fields(self)}
        return {name: value for name, value in asdict(self).items() if value != defaults[name]}

    @property
    def num_candidates(self) -> int:
        """Candidates per step (C); does not require a recorded curriculum to exist yet."""
        return self.batch_size if self.recorded is not None else self.candidates.size

    def compute(self, steps: int) -> float:
        """Returns the cost of a run in plain steps, of which a forward pass of a batch is 1/3.

        Scoring m*k candidates costs m/3 of a step (paper, appendix on computational requirements);
        scoring only their prefixes costs proportionally less.
        """
        return steps * (1 + self.scored_blocks / self.batch_size / 3)

    @property
    def scored_blocks(self) -> float:
        """Candidates scored per step, on average; a prefix counts as its fraction of one."""
        if not self.policy().needs_scores:
            return 0.0
        return self.num_candidates * self.scored_part * self.scored_share

    def scored_length(self, block_size: int) -> int:
        """Returns the scored tokens of a candidate, from its start."""
        return int(block_size * self.scored_part)

    @property
    def scored_part(self) -> float:
        """Scored share of every candidate."""
        return float(Fraction(self.prefix))

    @property
    def scored_share(self) -> float:
        """Fraction of the steps, not counting the first, that have a scoring pass."""
        every = 1 if self.scored_every is None else self.scored_every
        return 1 / every if every else 0.0

    @property
    def candidates(self) -> Candidates:
        """The stream of its pools, unless they are recorded."""
        names = [item.name for item in fields(Candidates)]
        return Candidates(**{name: getattr(self, name) for name in names})


def registered_policy(name: str, options: dict[str, Any] | None, *, kappa: float) -> Policy:
    """Returns a policy by its registered name; only "joint" has a `kappa`.

    Raises:
        ValueError: no policy has this name, or it does not take the options.
    """
    make = parts.load("policies", name, key="selection.policy")
    weights = {"kappa": kappa} if name == "joint" else {}
    if kappa != 1 and not weights:
        raise ValueError(
            f"selection.kappa={kappa} weighs the scores of selection.policy=joint, not of {name}: "
            "remove it, or set selection.policy_options."
        )
    try:
        policy: Policy = make(**weights, **(options or {}))
    except TypeError as error:
        raise ValueError(
            f"selection.policy={name} does not take selection.policy_options={options} ({error}): "
            "correct the options."
        ) from None
    return policy


def curriculum_header(
    arm: Arm, store: Blocks, references: References | None, *, config: str
) -> CurriculumHeader:
    """Returns the provenance of an arm's curriculum; see `CurriculumHeader` for `config`."""
    return CurriculumHeader.of(
        store,
        references,
        num_candidates=arm.num_candidates,
        num_chosen=arm.batch_size,
        config=config,
        seed=arm.seed,
        scored=arm.policy().needs_scores,
        score=arm.score_name,
    )


def arm_kind(name: str, variants: Iterable[str] = ()) -> str:
    """Returns how an arm is produced: "base", "trained" or "merged".

    `variants` are other names that a user may have meant.

    Raises:
        ValueError: no arm has this name.
    """
    if name == "base":
        return "base"
    if re.fullmatch(r"merge_(0(\.\d+)?|1(\.0+)?)", name):
        return "merged"
    share: Any = _fixed_share(name)
    if name in ("no_replay", "max_replay", "rod") or (share or 0) >= 0.01:
        return "trained"
    # fixed_<percent> and merge_<lambda> are easily mixed up
    if share:
        meant = f" (did you mean fixed_{share * 1e4:g}? It is a percentage, of 1 or more)"
    elif re.fullmatch(r"merge_[1-9]\d?", name):
        meant = f" (did you mean merge_{int(name[6:]) / 100:g}? It is a weight from 0 to 1)"
    elif share := re.fullmatch(r"fi?x?e?d[_-]?([1-9]\d?)%?", name.lower()):
        meant = f" (did you mean fixed_{share[1]}?)"
    else:
        meant = parts.did_you_mean(name, ["base", "no_replay", "max_replay", "rod", *variants])
    raise ValueError(
        f"There is no arm '{name}'{meant}: expected base, no_replay, fixed_<percent>, max_replay, "
        "merge_<lambda>, rod, or a name in 'variants'; change 'arms' or 'arm'."
    )


def make_arm(
    name: str, *, num_adaptation: int, num_replay: int, batch_size: int, seed: int, **selecting: Any
) -> Arm:
    """Builds one of the paper's trained arms from its name.

    The arguments are attributes of `Arm`; `selecting` has those of rod alone, such as
    its multiplier and kappa.

    Raises:
        ValueError: the store cannot serve the arm.
    """
    if name == "rod":
        assert "kappa" in selecting  # without kappa, an arm trains on its whole pools
    elif name == "base":
        selecting = {"balance": "replay"}
    else:
        share = 0.0 if name == "no_replay" else _fixed_share(name)
        retention = 1.0
        if share is not None:
            retention = retention_for_share(share, num_adaptation, num_replay)
        selecting = {"balance": "corpus", "retention": retention}
    return Arm(
        name=name,
        num_adaptation=num_adaptation,
        num_replay=num_replay,
        batch_size=batch_size,
        seed=seed,
        **selecting,
    )


def _fixed_share(name: str) -> float | None:
    match = re.fullmatch(r"fixed_(\d{1,2}(\.\d+)?)", name)
    return float(match[1]) / 100 if match else None
