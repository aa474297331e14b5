"""The claims: the measurement of each number and its expected range.

A measurement returns the number, or None with the reason why it cannot be judged in this run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from nemo_rod.report.arm_names import parse_arm
from nemo_rod.report.run_files import Run

CheckKind = Literal["claim", "informative", "limitation"]
Measurement = tuple[float | None, str]  # number (None: cannot be judged), note or reason


@dataclass(frozen=True)
class Bounds:
    """The expected range of a measured number; a strict range excludes its ends."""

    low: float | None = None
    high: float | None = None
    strict: bool = False

    def hold(self, value: float) -> bool:
        """Returns whether a value is in the range."""
        above = self.low is None or (value > self.low if self.strict else value >= self.low)
        below = self.high is None or (value < self.high if self.strict else value <= self.high)
        return above and below

    def __str__(self) -> str:
        """Returns the range in plain characters, e.g. "<= 0.85"."""
        if self.low is not None and self.high is not None:
            return f"= {self.low:g}" if self.low == self.high else f"{self.low:g} to {self.high:g}"
        equals = "" if self.strict else "="
        return f">{equals} {self.low:g}" if self.low is not None else f"<{equals} {self.high:g}"


@dataclass(frozen=True)
class View:
    """The input of a measurement: a run's files and the results computed from them."""

    run: Run
    results: Mapping[str, Any]

    @property
    def reference(self) -> str | None:
        """The fixed-replay arm with which RoD is compared."""
        name: str | None = self.results["reference_arm"]
        return name

    def missing(self, *names: str | None) -> str:
        """Returns why the forgetting of these arms cannot be compared, "" if it can."""
        if None in names:
            return "no fixed-replay arm was run"
        for name in names:
            if name not in self.results["arms"]:
                return f"arm {name} was not run"
        return "" if "base" in self.results["arms"] else "the base model was not evaluated"

    def unmatched(self) -> str:
        """Returns why RoD and the reference arm do not compare at equal tokens, "" if they do."""
        missing = self.missing("rod", self.reference)
        if missing:
            return missing
        if not self.results["comparisons"]["rod"]["same_tokens"]:
            return f"rod and {self.reference} were not trained on equally many tokens"
        return ""


def _forgetting_ratio(view: View) -> Measurement:
    if reason := view.unmatched():
        return None, reason
    rod, fixed = view.results["arms"]["rod"], view.results["arms"][view.reference]
    return _ratio(rod["val_forgetting"], fixed["val_forgetting"], f"{view.reference} forgets")


def _chord_gap(view: View) -> Measurement:
    if reason := view.unmatched():
        return None, reason
    return _gap(view, "rod")


def _max_source_ratio(view: View) -> Measurement:
    if reason := view.unmatched():
        return None, reason
    worst: list[float | None] = []
    for name in ("rod", view.reference):
        by_source = view.results["arms"][name]["forgetting_by_source"]
        worst.append(max(by_source.values()) if by_source else None)
    return _ratio(worst[0], worst[1], f"some source of {view.reference} is forgotten")


def _slope_ratio(view: View) -> Measurement:
    if reason := view.unmatched() or view.missing("no_replay"):
        return None, reason
    profile = view.results["profile"]
    needs = f"the profile of {view.reference} rises over three sources or more"
    return _ratio(profile["rod"]["slope"], profile[view.reference]["slope"], needs)


def _r_residual(view: View) -> Measurement:
    if reason := view.missing("rod", view.reference):
        return None, reason
    return _correlation(view, "pearson_r_residual")


def _r_no_replay(view: View) -> Measurement:
    if reason := view.missing("rod", "no_replay"):
        return None, reason
    return _correlation(view, "pearson_r")


def _first_step_share(view: View) -> Measurement:
    if "rod" not in view.run.arms:
        return None, "arm rod was not run"
    history = view.run.arms["rod"].history
    if history is None:
        return None, "rod has no curriculum.rod"
    if history.step_T[0] != 0:
        return None, f"the curriculum begins at step {history.step_T[0]}"
    num_adaptation = int(history.candidates_TO[0, ~history.is_replay_O].sum())
    forced = history.batch_size - num_adaptation
    note = f"the first pool held {forced} adaptation block(s) too few to fill the batch"
    return float(history.share_T[0]), note if forced > 0 else ""


def _decile_growth(view: View) -> Measurement:
    if "rod" not in view.run.arms:
        return None, "arm rod was not run"
    deciles = view.results["arms"]["rod"]["share_by_decile"]
    if deciles is None:
        return None, "rod has no curriculum.rod of ten steps or more"
    return deciles[-1] - deciles[0], ""


def _mean_share(view: View) -> Measurement:
    if "rod" not in view.run.arms:
        return None, "arm rod was not run"
    share = view.results["arms"]["rod"]["replay_share"]
    return share, "" if share is not None else "rod has no curriculum.rod"


def _merge_gap(lam: float) -> Callable[[View], Measurement]:
    def measure(view: View) -> Measurement:
        for name in view.results["arms"]:
            parsed = parse_arm(name)
            if parsed.kind == "merge" and math.isclose(parsed.value, lam):
                reason = view.missing(name)
                return (None, reason) if reason else _gap(view, name)
        return None, f"arm merge_{lam:g} was not run"

    return measure


def _compute_matched_gap(name: str) -> Callable[[View], Measurement]:
    def measure(view: View) -> Measurement:
        if reason := view.missing(name, view.reference):
            return None, reason
        if not view.results["comparisons"][name]["same_compute"]:
            return None, f"{name} and {view.reference} did not use the same compute"
        return _gap(view, name)

    return measure


def _gap(view: View, name: str) -> Measurement:
    if not view.results["chord"]:
        return None, "fewer than two fixed-replay arms with forgetting above zero span no chord"
    comparison = view.results["comparisons"][name]
    if comparison["gap"] is None:
        return None, f"{name} shows no forgetting above zero to compare at"
    if comparison["extrapolated"]:
        return comparison["gap"], f"the forgetting of {name} lies beyond the chord: extrapolated"
    return comparison["gap"], ""


def _correlation(view: View, key: str) -> Measurement:
    value = view.results["profile"]["rod"][key]
    sources = view.results["arms"]["rod"]["sampling_ratio_by_source"] or {}
    if value is None:
        return None, "needs three replay sources that differ in forgetting and in sampling"
    return value, f"over {sum(v is not None for v in sources.values())} sources"


def _ratio(ours: float | None, theirs: float | None, needs: str) -> Measurement:
    if ours is None or theirs is None or theirs <= 0:
        return None, f"only defined if {needs}"
    return ours / theirs, ""


class Rule(NamedTuple):
    """A check: its id, kind, wording (`{reference}` is the fixed arm), range and measurement."""

    id: str
    kind: CheckKind
    claim: str
    bounds: Bounds
    measure: Callable[[View], Measurement]


RULES: tuple[Rule, ...] = (
    Rule(
        "forgetting_ratio",
        "claim",
        "RoD's forgetting F_val over that of {reference}",
        Bounds(high=0.85),
        _forgetting_ratio,
    ),
    Rule(
        "chord_gap",
        "claim",
        "RoD's adaptation loss minus fixed replay's at equal forgetting (nats)",
        Bounds(high=-0.008),
        _chord_gap,
    ),
    Rule(
        "max_source_ratio",
        "claim",
        "Forgetting of the worst source, RoD over {reference}",
        Bounds(high=0.8),
        _max_source_ratio,
    ),
    Rule(
        "slope_ratio",
        "claim",
        "Slope of the forgetting profile, RoD over {reference}",
        Bounds(high=0.5),
        _slope_ratio,
    ),
    Rule(
        "r_residual",
        "claim",
        "Pearson r of sampling ratio with forgetting under {reference}",
        Bounds(low=0.75, strict=True),
        _r_residual,
    ),
    Rule(
        "r_no_replay",
        "informative",
        "Pearson r of sampling ratio with forgetting under no replay",
        Bounds(low=0.3, strict=True),
        _r_no_replay,
    ),
    Rule(
        "first_step_share",
        "claim",
        "Replay share of the first step",
        Bounds(low=0.0, high=0.0),
        _first_step_share,
    ),
    Rule(
        "decile_growth",
        "claim",
        "Replay share, last minus first tenth of the run",
        Bounds(low=0.2),
        _decile_growth,
    ),
    Rule(
        "mean_share",
        "informative",
        "Mean replay share",
        Bounds(low=0.25, high=0.45),
        _mean_share,
    ),
    Rule(
        "merge_0.6_gap",
        "claim",
        "Merge 0.6: adaptation loss minus fixed replay's at equal forgetting (nats)",
        Bounds(low=0.03),
        _merge_gap(0.6),
    ),
    Rule(
        "merge_0.8_gap",
        "claim",
        "Merge 0.8: adaptation loss minus fixed replay's at equal forgetting (nats)",
        Bounds(low=0.03),
        _merge_gap(0.8),
    ),
    Rule(
        "compute_matched_gap",
        "limitation",
        "At equal compute: RoD's adaptation loss minus fixed replay's (nats)",
        Bounds(high=0.0),
        _compute_matched_gap("rod_compute_matched"),
    ),
    Rule(
        "averages_gap",
        "claim",
        "The same of RoD that estimates scores from averages by source (nats)",
        Bounds(high=0.0),
        _compute_matched_gap("rod_averages"),
    ),
)
