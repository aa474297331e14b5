"""What the name of an arm stands for in a configuration: an arm of the paper, or a variant of one.

    variants:
      rod_m4: {of: rod, selection: {multiplier: 4}}

A variant takes every key from the arm that it varies and replaces those that it sets. Keys of
`train`, `selection` and `scoring` are replaced one by one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_rod.config import PREFIXES, Config, Optimisation, Scoring, Selection, Variant
from nemo_rod.selection.arms import arm_kind

SPECIALIST = "no_replay"  # the arm whose losses are the adaptation reference
# what else `score arm=` takes: the base on replay, on new blocks, and its predictions on replay
BASE_REFERENCES = ("base", "base_adaptation", "base_distillation")
Section = TypeVar("Section", Optimisation, Selection, Scoring, Variant)

_SECTIONS = ("train", "selection", "scoring")
_BUDGETS = ("steps", "budget", "compute")
_OF_ROD = ("selection", "scoring", "share", "follow", "curriculum", "references")


@dataclass(frozen=True, kw_only=True)
class ArmSettings:
    """An arm with every key of its own.

    Attributes:
        name: as users type it.
        of: the arm of the paper that it is, or varies in the end.
        kind: how it comes about: "base", "trained" or "merged".
        train: its schedule.
        selection: how its batches are chosen.
        scoring: how its candidates are scored.
        converge: whether it ends when its adaptation loss has converged, `train.steps` at most.
        retention: share of the replay blocks kept; None where `of` says it.
        share: constant share of replay, or the arm whose recorded mean it is; None for none.
        adaptation: with a constant share: new blocks are chosen at "random" or by "rho".
        replay: the same of replay.
        follow: arm whose recorded counts it repeats; None for none.
        follow_by: whether those are counts by "role" or by "source".
        curriculum: folder of the run or arm on whose batches it trains; None for none.
        references: whose lowest loss on new blocks is taken off.
        scores: whether candidates are scored while it trains.
    """

    name: str
    of: str
    kind: str
    train: Optimisation
    selection: Selection
    scoring: Scoring
    converge: bool = False
    retention: float | None = None
    share: float | str | None = None
    adaptation: str = "random"
    replay: str = "random"
    follow: str | None = None
    follow_by: str = "role"
    curriculum: str | None = None
    references: tuple[str, ...] = ("specialist",)
    scores: bool = False

    @property
    def recorded_by(self) -> str | None:
        """The arm of this run whose curriculum must be there before; None for none."""
        return self.share if isinstance(self.share, str) else self.follow

    @property
    def distilled(self) -> bool:
        """Whether replay is scored by distillation from the base."""
        return self.scores and self.selection.replay_score == "distillation"


def arm_settings(config: Config, name: str) -> ArmSettings:
    """Resolves the name of an arm.

    Args:
        config: where the variants are.
        name: an arm of the paper or a variant.

    Raises:
        ValueError: if there is no such arm, or the variant cannot be; one sentence.
    """
    root, variants = _chain(config, name)
    kind = arm_kind(root)
    where = f"variants.{name}"
    merged = _merged(variants)
    if variants and kind != "trained":
        raise ValueError(f"{where} varies {root}, which is not trained: vary a trained arm.")
    for key in _set_keys(merged):
        if key in _OF_ROD and root != "rod":
            raise ValueError(f"{where}.{key} is set, but {root} selects nothing: vary rod instead.")
    if merged.converge and root == "rod":
        raise ValueError(
            f"{where}.converge is for arms without selection: vary no_replay, fixed_<percent> or "
            "max_replay."
        )
    if merged.retention is not None and not root.startswith("fixed_"):
        raise ValueError(f"{where}.retention is of fixed replay: vary fixed_<percent>, not {root}.")
    _check_choices(where, name, merged)
    scores = root == "rod" and not (merged.follow or merged.curriculum)
    if merged.share is not None:
        scores = "rho" in (merged.adaptation, merged.replay)
    selection = _section(config.selection, merged.selection, f"{where}.selection")
    scoring = _section(config.scoring, merged.scoring, f"{where}.scoring")
    # a prefix that is none is refused where the whole configuration is checked
    share = PREFIXES.get(scoring.prefix, 8) / 8 / scoring.every if scoring.every > 0 else 0.0
    scored = selection.multiplier * share if scores else 0.0
    return ArmSettings(
        name=name,
        of=root,
        kind=kind,
        train=_schedule(config, where, merged, scored),
        selection=selection,
        scoring=scoring,
        converge=bool(merged.converge),
        retention=merged.retention,
        share=merged.share,
        adaptation=merged.adaptation or "random",
        replay=merged.replay or "random",
        follow=merged.follow,
        follow_by=merged.follow_by or "role",
        curriculum=merged.curriculum,
        references=tuple(merged.references or ["specialist"]),
        scores=scores,
    )


def _chain(config: Config, name: str) -> tuple[str, list[Variant]]:
    """The arm of the paper at the end, and the variants on the way from it to `name`."""
    chain: list[Variant] = []
    seen: list[str] = []
    while name in config.variants:
        if name in seen:
            raise ValueError(f"variants.{name}.of leads back to itself: {' -> '.join(seen)}.")
        seen.append(name)
        variant = _section(Variant(), config.variants[name] or {}, f"variants.{name}")
        chain.insert(0, variant)
        if variant.of in (None, name):
            break
        name = str(variant.of)
    return name, chain


def _merged(variants: list[Variant]) -> Variant:
    """One variant with everything that several in a row set; the last one counts."""
    merged = Variant()
    for variant in variants:
        if any(getattr(variant, key) is not None for key in _BUDGETS):
            for key in _BUDGETS:
                setattr(merged, key, getattr(variant, key))
        for key in _set_keys(variant):
            value = getattr(variant, key)
            setattr(merged, key, getattr(merged, key) | value if key in _SECTIONS else value)
    return merged


def _set_keys(variant: Variant) -> list[str]:
    empty = Variant()
    names = (item.name for item in dataclasses.fields(Variant) if item.name != "of")
    return [name for name in names if getattr(variant, name) != getattr(empty, name)]


def _check_choices(where: str, name: str, variant: Variant) -> None:
    ways = [key for key in ("share", "follow", "curriculum") if getattr(variant, key) is not None]
    if len(ways) > 1:
        raise ValueError(f"{where} sets {' and '.join(ways)}: set one of them.")
    for key, needed, allowed in (
        ("adaptation", "share", ("random", "rho")),
        ("replay", "share", ("random", "rho")),
        ("follow_by", "follow", ("role", "source")),
    ):
        value = getattr(variant, key)
        if value is not None and (ways != [needed] or value not in allowed):
            raise ValueError(
                f"{where}.{key}={value!r} is not valid: expected {' or '.join(allowed)}, "
                f"together with {needed}."
            )
    share = variant.share
    is_share = isinstance(share, int | float) and 0 <= share <= 1
    if not (share is None or isinstance(share, str) or is_share):
        raise ValueError(
            f"{where}.share={share} is not valid: expected a share in [0, 1], or a trained arm."
        )
    if variant.retention is not None and not 0 < variant.retention <= 1:
        raise ValueError(
            f"{where}.retention={variant.retention} is not valid: expected a share in (0, 1]."
        )
    if name in (share, variant.follow):
        raise ValueError(f"{where} follows itself: name another trained arm.")


def _schedule(config: Config, where: str, variant: Variant, scored: float) -> Optimisation:
    """The schedule of an arm that scores `scored` candidates for every block it trains on."""
    train = _section(config.train, variant.train, f"{where}.train")
    for key in _BUDGETS:
        value = getattr(variant, key)
        if value is not None and not value > 0:
            raise ValueError(f"{where}.{key}={value} is not valid: expected > 0.")
    steps = float(train.steps)
    if variant.steps is not None:
        steps = variant.steps
    elif variant.compute is not None:  # a forward pass costs a third of an update
        steps *= variant.compute / (1 + scored / 3)
    elif variant.budget is not None:
        steps *= variant.budget
    longer = dataclasses.replace(train, steps=max(1, round(steps)))
    if variant.converge:  # the warm-up does not depend on how long it may last at most
        longer.warmup_fraction = train.warmup_fraction * train.steps / longer.steps
    return longer


def _section(values: Section, replaced: dict[str, Any], where: str) -> Section:
    """A section of the configuration with some keys replaced, types checked."""
    if not replaced:
        return values
    try:
        merged: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(values), replaced))
    except OmegaConfBaseException as error:
        sentence = str(error).splitlines()[0].rstrip(".")
        raise ValueError(f"{where}: {sentence}; docs/configuration.md has its keys.") from None
    return merged
