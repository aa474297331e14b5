"""The meaning of an arm's name in a configuration: an arm of the paper, or a variant of one.

    variants:
      rod_kappa_0.5: {of: rod, selection: {kappa: 0.5}}

A variant inherits every key from its parent and overrides those that it sets. Keys of `train`,
`selection` and `scoring` are overridden one by one, and a variant with another policy than the
recipe has neither its kappa nor its options.

`ArmSettings` follow from the configuration alone, before any stage has run; `ArmSettings.arm` makes
the `selection.arms.Arm` from them and what stages have found out.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_rod import parts
from nemo_rod.bounds import check_bounds
from nemo_rod.config import Config, Optimisation, Scoring, Selection, Variant, blamed_key
from nemo_rod.files import check_name
from nemo_rod.run import branches
from nemo_rod.selection.arm_names import PAPER, RESIDUAL, parse_arm
from nemo_rod.selection.arms import Arm, arm_kind, make_arm, typed_values
from nemo_rod.selection.policies import reference_roles

SPECIALIST = "no_replay"  # the arm whose losses are the adaptation reference


class Reference(NamedTuple):
    """A reference that a run can compute: of a model, on the blocks of one role."""

    model: str
    role: str


REFERENCES = {
    "base": Reference("base", "replay"),
    "specialist": Reference(SPECIALIST, "adaptation"),
}
Section = TypeVar("Section", Optimisation, Selection, Scoring, Variant)

_CHECKED: dict[str, Any] = {}
_SECTIONS = ("train", "selection", "scoring")
_BUDGETS = ("steps", "budget", "compute")
_OF_ROD = ("selection", "scoring", "share", "follow", "curriculum", "reference")


@dataclass(frozen=True, kw_only=True)
class ArmSettings:
    """An arm with all of its settings."""

    name: str  # name as typed by users
    of: str  # the arm of the paper at the root of its variants
    variant: Variant  # its differences from `of`; empty for an arm of the paper
    selection: Selection  # choice of its batches
    scoring: Scoring  # scoring of its candidates
    train: Optimisation  # its schedule; for a base trained here, that of `pretrain`

    @property
    def kind(self) -> str:
        """Origin of the model: "base", "trained" or "merged"."""
        return arm_kind(self.of)

    def arm(
        self,
        *,
        num_adaptation: int,
        num_replay: int,
        seed: int,
        share: float = 0.5,
        recorded: str = "",
    ) -> Arm:
        """Returns the arm over a number of blocks.

        Args:
            num_adaptation: adaptation blocks in the store.
            num_replay: replay blocks in the store.
            seed: of the candidate stream.
            share: mean replay share of the arm whose share this one has. While it is unknown, a
                half has the same cost.
            recorded: file of the curriculum that it follows; "" while it is unknown.

        Raises:
            ValueError: the store cannot serve the arm.
        """
        variant, sections = self.variant, {"selection": self.selection, "scoring": self.scoring}
        arm = make_arm(
            self.of,
            num_adaptation=num_adaptation,
            num_replay=num_replay,
            batch_size=self.train.batch_size,
            seed=seed,
            **typed_values(sections),
        )
        names = ("retention", "adaptation", "replay", "follow", "curriculum", "reference")
        changed = {name: getattr(variant, name) for name in names if getattr(variant, name)}
        if isinstance(variant.share, str):
            changed |= {"kappa": None, "share": share, "share_of": variant.share}
        elif variant.share is not None:
            changed |= {"kappa": None, "share": variant.share}
        elif variant.follow or variant.curriculum:
            by = {None: "role", "block": None}.get(variant.follow_by, variant.follow_by)
            changed |= {"kappa": None, "recorded": recorded, "follow_by": variant.follow and by}
        return dataclasses.replace(arm, name=self.name, **changed)

    @functools.cached_property
    def planned_arm(self) -> Arm:
        """The arm over one block of each role: its policy and costs do not depend on the blocks."""
        return self.arm(num_adaptation=1, num_replay=1, seed=0)

    @property
    def scores(self) -> bool:
        """Whether training scores candidates."""
        return "losses" in self.planned_arm.needs

    @property
    def own_references(self) -> list[str]:
        """The keys of `REFERENCES` that the arm's own run computes, as its policy needs them."""
        roles = reference_roles(self.planned_arm.needs)
        names = [name for name, made in REFERENCES.items() if made.role in roles]
        return names if self.variant.reference is None else [n for n in names if n == "base"]

    @property
    def trunk(self) -> str | None:
        """The arm of this run of which it is a branch (`branches`); None if it is none."""
        return self.variant.of if self.variant.at is not None else None

    @property
    def waits_for(self) -> str | None:
        """The arm of this run that must be trained first; None if there is none."""
        share = self.variant.share
        return self.trunk or (share if isinstance(share, str) else self.variant.follow)


def arm_settings(config: Config, name: str) -> ArmSettings:
    """Resolves the name of an arm of the paper, or of a variant.

    Raises:
        ValueError: there is no such arm, or its variant is invalid; one sentence.
    """
    root, chain = name, dict[str, Variant]()  # the variant, its parents, up to an arm of the paper
    while root in config.variants:
        if root in chain:
            raise ValueError(f"variants.{root}.of leads back to itself: {' -> '.join(chain)}.")
        if len(chain) > 50:
            raise ValueError(f"variants.{name} has more than 50 parents: name fewer.")
        check_name("variant", root)
        variant = _section(Variant(), config.variants[root] or {}, f"variants.{root}")
        chain[root] = variant
        if variant.of in (None, root):
            break
        root = str(variant.of)
    where, merged = f"variants.{name}", Variant()
    for variant in reversed(chain.values()):  # later ones take precedence
        if any(getattr(variant, key) is not None for key in _BUDGETS):
            for key in _BUDGETS:
                setattr(merged, key, getattr(variant, key))
        for key in _set_keys(variant):
            value = getattr(variant, key)
            setattr(merged, key, getattr(merged, key) | value if key in _SECTIONS else value)
    if arm_kind(root, config.variants) != "trained" and chain:
        raise ValueError(f"{where} varies {root}, which is not trained: vary a trained arm.")
    for other in chain:
        # the specialist may be trained on a mixture
        is_mixture = other == SPECIALIST and parse_arm(root).kind in ("fixed", "max_replay")
        if other != root and parse_arm(other).kind in PAPER and not is_mixture:
            raise ValueError(
                f"variants.{other} has the name of an arm of the paper, but varies "
                f"{chain[other].of}: give it another name."
            )
    if trunk := next((name for name, variant in chain.items() if variant.at is not None), None):
        own, merged.of = chain[trunk], chain[trunk].of
        if trunk != name or {*_set_keys(own)} - {"at", "anneal", "steps"} or own.of in (None, name):
            raise ValueError(
                f"variants.{trunk} is a branch, which has only of, at, anneal and steps, and which "
                "no other arm varies: vary its trunk."
            )
        if merged.converge:
            raise ValueError(f"{where} branches off {own.of}, whose end is open: set its steps.")
    _check_keys(where, name, root, merged)
    selection = config.selection
    if merged.selection.get("policy", selection.policy) != selection.policy:
        selection = dataclasses.replace(selection, kappa=1.0, policy_options={})
    schedule = config.pretrain if root == "base" and config.pretrain else config.train
    settings = ArmSettings(
        name=name,
        of=root,
        variant=merged,
        selection=_section(selection, merged.selection, f"{where}.selection"),
        scoring=_section(config.scoring, merged.scoring, f"{where}.scoring"),
        train=_section(schedule, merged.train, f"{where}.train"),
    )
    if settings.trunk is not None:
        given = arm_settings(config, settings.trunk)
        train = branches.schedule(where, own, given.train, given.variant.at or 0)
        return dataclasses.replace(settings, train=train)
    return dataclasses.replace(settings, train=_schedule(settings, schedule))


def trained_arms(config: Config) -> list[ArmSettings]:
    """Returns every arm that the recipe trains, each after the one that it waits for.

    Besides the trained ones of `config.arms`, these are those that they wait for, or that are
    merged, and the specialist where its losses are needed.
    """
    listed = [arm_settings(config, name) for name in config.arms]
    trained: dict[str, ArmSettings] = {}

    def add(arm: ArmSettings) -> None:
        if arm.waits_for is not None:
            add(arm_settings(config, arm.waits_for))
        trained.setdefault(arm.name, arm)

    for arm in listed:
        if arm.kind == "trained":
            add(arm)
    merged = [arm.name for arm in listed if arm.kind == "merged"]
    needed = [merged_from(name) for name in merged if not RESIDUAL.fullmatch(name)]
    if any("specialist" in arm.own_references for arm in trained.values()):
        needed.append(SPECIALIST)
    for name in needed:
        add(arm_settings(config, name))
    return list(trained.values())


def add_registered_arms(config: Config) -> None:
    """Adds the variants that registered parts make of arms' names, such as `fixed_8_kl_base_1`."""
    varied = [str(v.get("of") or "") for v in config.variants.values() if isinstance(v, dict)]
    named = dict.fromkeys(filter(None, [*config.arms, config.arm, *varied]))
    for name in [*named, *(merged_from(n) for n in named if parse_arm(n).kind == "merge")]:
        meant = (make(config, name) for make in parts.load_all("arms"))
        if name not in config.variants and (variant := next(filter(None, meant), None)):
            config.variants = {**config.variants, name: variant}


def merged_from(name: str) -> str:
    """Returns the trained arm that a merged one combines with the base."""
    return name.rpartition("merge_")[0].removesuffix("_") or SPECIALIST


def scored_lengths(config: Config) -> list[int]:
    """Returns the scored tokens of a block for which the arms need references, descending."""
    size = config.domain.block_size
    arms = [arm.planned_arm for arm in trained_arms(config) if arm.own_references]
    return sorted({size, *(arm.scored_length(size) for arm in arms)}, reverse=True)


def _set_keys(variant: Variant) -> list[str]:
    empty = Variant()
    names = (item.name for item in dataclasses.fields(Variant) if item.name != "of")
    return [name for name in names if getattr(variant, name) != getattr(empty, name)]


def _check_keys(where: str, name: str, root: str, variant: Variant) -> None:
    """Refuses keys that do not apply to the arm of the paper, exclude others or lack them."""
    if variant.anneal is not None and variant.at is None:
        raise ValueError(f"{where}.anneal is set without at: set both, or neither.")
    for key in _set_keys(variant):
        if key in _OF_ROD and root != "rod":
            raise ValueError(f"{where}.{key} is set, but {root} selects nothing: vary rod instead.")
    if variant.converge and root == "rod":
        raise ValueError(
            f"{where}.converge is for arms without selection: vary no_replay, fixed_<percent> or "
            "max_replay."
        )
    if variant.retention is not None and not root.startswith("fixed_"):
        raise ValueError(f"{where}.retention is of fixed replay: vary fixed_<percent>, not {root}.")
    ways = [key for key in ("share", "follow", "curriculum") if getattr(variant, key) is not None]
    if len(ways) > 1:
        raise ValueError(f"{where} sets {' and '.join(ways)}: set one of them.")
    for key, needed in (("adaptation", "share"), ("replay", "share"), ("follow_by", "follow")):
        if getattr(variant, key) is not None and ways != [needed]:
            raise ValueError(f"{where}.{key} is set without {needed}: set both, or neither.")
    if name in (variant.share, variant.follow):
        raise ValueError(f"{where} follows itself: name another trained arm.")


def _schedule(settings: ArmSettings, given: Optimisation) -> Optimisation:
    """Returns an arm's schedule; the recipe's, `given`, is rescaled to the length of its budget."""
    train, variant = settings.train, settings.variant
    steps = float(train.steps)
    if variant.steps is not None:
        steps = variant.steps
    elif variant.compute is not None:
        steps *= variant.compute / settings.planned_arm.compute(1)
    elif variant.budget is not None:
        steps *= variant.budget
    longer = dataclasses.replace(train, steps=max(1, round(steps)))
    if variant.converge:  # the warm-up does not depend on the maximum length
        longer.warmup_steps = train.warmup
    elif train.warmup_steps is not None and "warmup_steps" not in variant.train:
        longer.warmup_steps = round(train.warmup_steps * longer.steps / given.steps)
    if train.decay_steps and "decay_steps" not in variant.train:  # which are of the arm's length
        longer.decay_steps = max(1, round(train.decay_steps * longer.steps / given.steps))
    return longer


def _section(values: Section, replaced: dict[str, Any], where: str) -> Section:
    """Returns a section of the configuration with some keys replaced, types and bounds checked."""
    key = repr((values, replaced, where))  # each is needed many times, and checking is slow
    if not replaced or key in _CHECKED:
        return _CHECKED.get(key, values)
    check_bounds(values, f"{where.rpartition('.')[2]}.")  # they are of the recipe, not of `where`
    try:
        merged: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(values), replaced))
    except (OmegaConfBaseException, ValueError) as error:  # not a mapping
        known, wrong = [field.name for field in dataclasses.fields(values)], blamed_key(error)
        if wrong and wrong not in known:
            near = parts.did_you_mean(wrong, known)
            if wrong.isdigit() and where.count(".") == 1:  # Hydra splits a name at its point
                near = f" (did you mean '+variants={{{where.partition('.')[2]}.{wrong}:{{...}}}}'?)"
            problem = f"There is no key {where}.{wrong}{near}"
            raise ValueError(f"{problem}: expected some of {', '.join(known)}.") from None
        sentence = str(error).splitlines()[0].rstrip(".")
        raise ValueError(f"{where} is not valid ({sentence}): correct its keys.") from None
    check_bounds(merged, f"{where}.")
    _CHECKED[key] = merged
    return merged
