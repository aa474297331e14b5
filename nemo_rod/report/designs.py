"""What sets arms apart, as their `arm.json` says: which belong together in a picture or a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Arms = Mapping[str, Mapping[str, Any]]  # of a results dictionary
OWN = {"specialist", "base"}  # reference losses of the run itself


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
