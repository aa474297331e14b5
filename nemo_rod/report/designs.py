"""What sets arms apart, as their `arm.json` says: which belong together in a picture or a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Arms = Mapping[str, Mapping[str, Any]]  # of a results dictionary
OWN = {"specialist", "base"}  # reference losses of the run itself
WHOLE = 0.99  # share of the candidates' tokens from which on they count as scored whole


def varying(arms: Arms, key: str, of: str = "rod") -> list[str]:
    """An arm and its variants that differ in one key alone, by that key's value.

    Empty if the arm was not trained or has no such key; the arm alone if it has no such variant.
    """
    designs = {name: arm["design"] or {} for name, arm in arms.items()}
    if designs.get(of, {}).get(key) is None:
        return []
    skipped = {"of", key, *(("steps",) if key == "budget" else ())}

    def rest(name: str) -> dict[str, Any]:
        return {k: value for k, value in designs[name].items() if k not in skipped}

    variants = [
        name
        for name, design in designs.items()
        if name != of
        and design.get("of") == of
        and rest(name) == rest(of)
        and design[key] not in (None, designs[of][key])
    ]
    return sorted([of, *variants], key=lambda name: float(designs[name][key]))


def continued(arms: Arms) -> list[list[str]]:
    """Every arm that was also trained with another budget, with those, by budget."""
    firsts = [name for name, arm in arms.items() if (arm["design"] or {}).get("of") in (None, name)]
    return [names for of in firsts if len(names := varying(arms, "budget", of)) > 1]


def with_fixed_share(arms: Arms) -> list[str]:
    """Arms whose share of replay is set, or taken from another's record: ablations and controls."""
    return [
        name
        for name, arm in arms.items()
        if arm["design"] and (arm["design"]["share"] is not None or arm["design"]["follow"])
    ]


def helped(arms: Arms) -> list[str]:
    """Arms on another run's curriculum, or with another run's reference losses."""
    return [
        name
        for name, arm in arms.items()
        if arm["design"]
        and (arm["design"]["curriculum"] or {*(arm["design"]["references"] or [])} - OWN)
    ]


def cheaper(arms: Arms) -> list[str]:
    """RoD, arms that choose with less scoring, and shorter RoD beside them; empty without any.

    How they spare it does not matter: fewer tokens are scored than their candidates have.
    """
    choosing = {
        name: arm
        for name, arm in arms.items()
        if (design := arm["design"])
        and design["kappa"] is not None
        and all(design[key] is None for key in ("share", "follow", "curriculum"))
    }
    less = [name for name, arm in choosing.items() if _is_scored_less(arm)]
    budgets = varying(choosing, "budget")
    beside = budgets[: budgets.index("rod") + 1] if budgets and less else []
    return [name for name in arms if name in {*beside, *less}]


def scored_share(arm: Mapping[str, Any]) -> float | None:
    """Tokens that a choosing arm scored over those of its candidates; None if unknown."""
    candidates = (arm["trained_tokens"] or 0) * arm["design"]["multiplier"]
    return arm["scored_tokens"] / candidates if candidates else None


def _is_scored_less(arm: Mapping[str, Any]) -> bool:
    share = scored_share(arm)
    return share is not None and share < WHOLE
