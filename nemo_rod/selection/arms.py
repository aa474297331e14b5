"""Arms: every training run in a comparison is a pair (candidate pools, policy).

    name                 pools                                    policy
    rod                  balanced, m = 2                          Joint(kappa)
    no_replay            adaptation alone                         TakeAll
    fixed_<percent>      adaptation + replay at a constant share  TakeAll
    max_replay           the whole corpus                         TakeAll
    base                 replay alone (a base trained here)       TakeAll

Alternatives for a variant of `rod`:

    another policy       balanced                                 a registered one, or FILE.py:NAME
    at a constant share  balanced                                 FixedShare
    following an arm     same counts per role or source           TakeAll
    on its curriculum    the batches that it recorded             TakeAll

`merge_<lambda>` combines the weights of two other arms without training (paper, appendix B.4).

An arm is described once, by `Arm`. What others say of a field stands beside it: the key that users
type, the bound, and whether the field is only a note, which changes no batch.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

from nemo_rod import parts
from nemo_rod.bounds import key, one_of, same
from nemo_rod.files import digest
from nemo_rod.selection.arm_names import PAPER, parse_arm
from nemo_rod.selection.blocks import Blocks
from nemo_rod.selection.candidates import Balance, Candidates, Pools, retention_for_share
from nemo_rod.selection.competition import FORWARD
from nemo_rod.selection.curriculum.header import CurriculumHeader
from nemo_rod.selection.curriculum.log import Curriculum
from nemo_rod.selection.curriculum.recorded_pools import FollowedPools, GroupedBy, RecordedPools
from nemo_rod.selection.policies import (
    FixedShare,
    Policy,
    Score,
    TakeAll,
    Within,
    has_scores,
    needs_of,
)
from nemo_rod.selection.references import References


def _field(default: Any = dataclasses.MISSING, *, typed: str = "", note: bool = False) -> Any:
    """Returns a field of `Arm` with the key that users type for it.

    A note says where a value comes from; without an effect of its own, it is no input of an arm.
    """
    return dataclasses.field(default=default, metadata={"typed": typed, "note": note})


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One training run as plain, serializable values."""

    name: str = _field(note=True)  # what users type
    of: str = _field("", note=True)  # the arm of the paper that it varies
    num_adaptation: int  # adaptation blocks in the store
    num_replay: int  # replay blocks in the store
    batch_size: int = _field(typed="train.batch_size")  # blocks trained on in one step (k)
    seed: int = _field(typed="seed")  # seeds the candidate stream
    # how the roles are mixed in the pools; see `Candidates`, as for the next two
    balance: Balance = _field(typed="selection.balance")
    multiplier: float = same(
        Candidates, "multiplier", typed="selection.multiplier", label="m", figure="pool_size"
    )
    retention: float = _field(1.0)  # fraction of the replay blocks in use
    # weight of the replay scores against the adaptation scores; None trains on the whole pool
    kappa: float | None = key(
        None, ">= 0", typed="selection.kappa", label="\u03ba", figure="weighting"
    )
    policy_name: str = _field("joint", typed="selection.policy")  # registered, or FILE.py:NAME
    policy_options: dict[str, Any] | None = _field(None, typed="selection.policy_options")
    score_name: str = _field("reducible_loss", typed="selection.score")  # likewise
    # scored share of every candidate, from its start
    prefix: str = one_of("1", "1/2", "1/4", "1/8", typed="scoring.prefix")
    share: float | None = _field(None)  # constant share of replay in every batch
    share_of: str | None = _field(None, note=True)  # the arm whose mean share that is
    adaptation: Within = _field("random")  # how adaptation blocks are chosen at a constant share
    replay: Within = _field("random")  # how replay blocks are chosen at a constant share
    recorded: str | None = _field(None)  # file of the curriculum of another arm, which it follows
    follow: str | None = _field(None, note=True)  # an arm of this run whose curriculum it follows
    follow_by: GroupedBy | None = _field(None)  # counts per "role" or "source"; None: its blocks
    curriculum: str | None = _field(None, note=True)  # folder of another run, which has that arm
    reference: str | None = _field(None, note=True)  # run of its specialist; None: its own

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
        """Returns the rule that chooses the batch from a pool.

        Raises:
            ValueError: no policy has this name, or it does not take the options.
        """
        if self.recorded is None and self.share is not None:
            return FixedShare(self.share, self.adaptation, self.replay)
        if self.recorded is not None or self.kappa is None:
            return TakeAll()
        return registered_policy(self.policy_name, self.policy_options, kappa=self.kappa)

    def score(self) -> Score:
        """Returns the function from losses and reference losses to scores."""
        score: Score = parts.load("scores", self.score_name, key="selection.score")
        return score

    @property
    def needs(self) -> frozenset[str]:
        """What its policy and its score need; see `policies.Policy.needs`."""
        return needs_of(self.policy(), self.score())

    def inputs(self) -> dict[str, Any]:
        """Returns the values that determine its batches; files by their content.

        Values that have their default are left out, so that a new field changes none.
        """
        values = {
            item.name: value
            for item in fields(self)
            if not item.metadata.get("note") and (value := getattr(self, item.name)) != item.default
        }
        if self.recorded is not None:
            values["recorded"] = digest(Path(self.recorded).read_bytes())
        for name in ("policy_name", "score_name"):
            if file := parts.file_of(getattr(self, name)):
                values[f"{name}.file"] = digest(file.read_bytes())
        for name, value in (self.policy_options or {}).items():
            if isinstance(value, str) and Path(value).is_file():
                values[f"policy_options.{name}.file"] = digest(Path(value).read_bytes())
        return values

    @property
    def num_candidates(self) -> int:
        """Candidates per step (C); does not require a recorded curriculum to exist yet."""
        return self.batch_size if self.recorded is not None else self.candidates.size

    @property
    def scored_blocks(self) -> float:
        """Candidates scored per step; a prefix counts as its fraction of one."""
        return self.num_candidates * self.scored_prefix if "losses" in self.needs else 0.0

    @property
    def scored_prefix(self) -> float:
        """Scored share of every candidate."""
        return float(Fraction(self.prefix))

    def scored_length(self, block_size: int) -> int:
        """Returns the scored tokens of a candidate, from its start."""
        return int(block_size * self.scored_prefix)

    def compute(self, steps: float) -> float:
        """Returns the cost of a run in plain steps; see `costs`."""
        return steps * (1 + FORWARD * self.scored_blocks / self.batch_size)

    @property
    def candidates(self) -> Candidates:
        """The stream of its pools, unless they are recorded."""
        names = [item.name for item in fields(Candidates)]
        return Candidates(**{name: getattr(self, name) for name in names})


# attributes that arms are swept in, by the name of their figure
SWEPT = {f.metadata["figure"]: f.name for f in fields(Arm) if "figure" in f.metadata}
TYPED = {item.name: item.metadata.get("typed", "") for item in fields(Arm)}  # keys, by attribute
# attributes that tell the designs of two arms of one run apart
DESIGN = tuple(
    item.name
    for item in fields(Arm)
    if item.name not in ("name", "num_adaptation", "num_replay", "batch_size", "seed", "recorded")
)


def typed_values(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the attributes of `Arm` that users type in sections of the configuration.

    `sections` are those of `selection` and `scoring`, by name.
    """
    typed = ((name, *where.partition(".")[::2]) for name, where in TYPED.items())
    values = {name: getattr(sections[s], own) for name, s, own in typed if s in sections}
    return {name: value if value != {} else None for name, value in values.items()}


def costs(*, steps: int, batch_size: int, block_size: int, scored_tokens: float) -> dict[str, Any]:
    """Returns what an arm of some steps has cost, as `arm.json` has it.

    Compute is in plain steps, of which a forward pass of a batch is a third: scoring m*k
    candidates costs m/3 of a step, and prefixes proportionally less (paper, appendix on
    computational requirements).

    Args:
        steps: its updates.
        batch_size: blocks of a step.
        block_size: tokens of a block.
        scored_tokens: scored tokens of a step, on average.
    """
    tokens = batch_size * block_size
    return {
        "steps": steps,
        "batch_size": batch_size,
        "block_size": block_size,
        "trained_tokens": steps * tokens,
        "scored_tokens": round(steps * scored_tokens),
        "compute": steps * (1 + FORWARD * scored_tokens / tokens),
    }


def registered_policy(name: str, options: dict[str, Any] | None, *, kappa: float = 1.0) -> Policy:
    """Returns a policy by its registered name, or FILE.py:NAME; only "joint" has a `kappa`.

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
    except ValueError:
        raise
    except parts.FAILURES as error:
        raise ValueError(
            f"selection.policy={name} does not take selection.policy_options={options} "
            f"({type(error).__name__}: {error}): correct the options, or name a class "
            "or a function that makes the policy."
        ) from error
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
        scored=has_scores(arm.policy()),
        score=arm.score_name,
    )


def arm_kind(name: str, variants: Iterable[str] = ()) -> str:
    """Returns how an arm is produced: "base", "trained" or "merged".

    `variants` are other names that a user may have meant.

    Raises:
        ValueError: no arm of the paper has this name.
    """
    if (kind := parse_arm(name).kind) in PAPER:
        return {"base": "base", "merge": "merged"}.get(kind, "trained")
    # fixed_<percent> and merge_<lambda> are easily mixed up
    if share := re.fullmatch(r"fixed_(0\.\d+)", name):
        meant = f" (did you mean fixed_{float(share[1]) * 100:g}? It is a percentage, of 1 or more)"
    elif re.fullmatch(r"merge_[1-9]\d?", name):
        meant = f" (did you mean merge_{int(name[6:]) / 100:g}? It is a weight from 0 to 1)"
    elif share := re.fullmatch(r"fi?x?e?d[_-]?([1-9]\d?)%?", name.lower()):
        meant = f" (did you mean fixed_{share[1]}?)"
    elif (short := re.sub(r"\d+\.\d*$", lambda n: f"{float(n[0]):g}", name)) != name and (
        parse_arm(short).kind in PAPER
    ):
        meant = f" (did you mean {short}?)"
    elif name in parts.names("policies") or parts.file_of(name):
        variant = f"+variants.mine={{of:rod,selection:{{policy:{name}}}}}"
        meant = f" (it is a policy, with which {variant} makes the arm 'mine')"
    elif name in {*variants}:
        meant = f" (variants.{name}.of is to name the arm that it varies)"
    elif " " in name:
        meant = f" (did you mean [{','.join(name.split())}]?)"
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

    The arguments are attributes of `Arm`; `selecting` has those of rod alone, such as its kappa
    and its policy.

    Raises:
        ValueError: the store cannot serve the arm.
    """
    parsed = parse_arm(name)
    if name == "rod":
        assert "kappa" in selecting  # without kappa, an arm trains on its whole pools
    elif name == "base":
        selecting = {"balance": "replay", "multiplier": 1.0}
    else:
        retention = 1.0
        if parsed.kind in ("no_replay", "fixed"):
            retention = retention_for_share(parsed.value / 100, num_adaptation, num_replay)
        selecting = {"balance": "corpus", "multiplier": 1.0, "retention": retention}
    return Arm(
        name=name,
        of=name,
        num_adaptation=num_adaptation,
        num_replay=num_replay,
        batch_size=batch_size,
        seed=seed,
        **selecting,
    )
