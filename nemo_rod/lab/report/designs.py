"""Selects the arms of a figure or table by their designs in `arm.json`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nemo_rod.selection.arm_names import Kind, parse_arm
from nemo_rod.selection.arms import SWEPT

Arms = Mapping[str, Mapping[str, Any]]  # part of a results dictionary
OWN = {"specialist", "base"}  # references of the run itself
WHOLE = 0.99  # scored share of the candidates' tokens that counts as whole


def filter_kinds(names: Iterable[str], *kinds: Kind) -> list[str]:
    """Returns the names of arms of these kinds."""
    return [name for name in names if parse_arm(name).kind in kinds]


def varying(arms: Arms, key: str, of: str = "rod") -> list[str]:
    """Returns an arm and its variants that differ in one key alone, sorted by its value.

    Variants with other pools may also have other budgets, as in the paper. An equal arm with the
    steps of more variants replaces the arm itself.

    Empty if the arm was not trained or lacks the key; the arm alone if it has no such variant.
    """
    designs = _designs(arms)
    if designs.get(of, {}).get(key) is None:
        return []
    lengths = {"budget": ("steps",), SWEPT["pool_size"]: ("steps", "budget")}.get(key, ())
    skipped = {"of", key, *lengths}

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
    steps = [designs[name].get("steps") for name in variants]
    alike = [n for n, d in designs.items() if rest(n) == rest(of) and d[key] == designs[of][key]]
    # the first of equals is the arm itself
    first = max([of, *alike], key=lambda name: steps.count(designs[name].get("steps")))
    return sorted([first, *variants], key=lambda name: float(designs[name][key]))


def continued_arms(arms: Arms) -> list[list[str]]:
    """Returns arms that were also trained with other budgets, each with these, by budget."""
    firsts = [name for name, design in _designs(arms).items() if design.get("of") in (None, name)]
    return [names for of in firsts if len(names := varying(arms, "budget", of)) > 1]


def with_fixed_share(arms: Arms) -> list[str]:
    """Returns arms with a set or recorded share of replay: ablations and controls."""
    return [n for n, d in _designs(arms).items() if d["share"] is not None or d["follow"]]


def helped_arms(arms: Arms) -> list[str]:
    """Returns arms with another run's curriculum or reference losses."""
    return [
        n for n, d in _designs(arms).items() if d["curriculum"] or {*(d["references"] or [])} - OWN
    ]


def scored_share(arm: Mapping[str, Any]) -> float | None:
    """Returns scored tokens of an arm that chooses over its candidates' tokens; None of others."""
    design = arm["design"] or {}
    follows = any(design.get(key) is not None for key in ("share", "follow", "curriculum"))
    if design.get("kappa") is None or follows:
        return None
    candidates = (arm["trained_tokens"] or 0) * design[SWEPT["pool_size"]]
    return arm["scored_tokens"] / candidates if candidates else None


def _designs(arms: Arms) -> dict[str, Mapping[str, Any]]:
    return {name: arm["design"] for name, arm in arms.items() if arm["design"]}


def frontier_arms(arms: Arms) -> list[str]:
    """Returns the arms of the frontier: also variants that choose or train in another way."""
    designs = {name: arm["design"] or {} for name, arm in arms.items() if name != "base"}
    usual = [("joint", d.get("train")) for name, d in designs.items() if d.get("of") == name]
    return [
        name
        for name, d in designs.items()
        if d.get("of") in (None, name)
        or name == "rod_compute_matched"
        or (d.get("policy_name"), d.get("train")) not in usual
    ]
