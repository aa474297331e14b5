"""The paper's claims with thresholds, judged on a run's results.

A check is a measured number, the range it should lie in and a verdict: "holds", "fails" or "not
judged" with the reason. Thresholds leave a margin to what repeated runs of a small recipe showed.
Three kinds: a "claim" is what the method promises; "informative" ones are too noisy or too much a
matter of the setting to promise; a "limitation" is known to fail for small models and is shown so
that nobody has to find out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nemo_rod.report.arms import parse_arm
from nemo_rod.report.run import Run

Verdict = Literal["holds", "fails", "not judged"]
CheckKind = Literal["claim", "informative", "limitation"]
Measurement = tuple[float | None, str]  # the number (None: cannot be judged), a note or reason

CHORD_GAP_MEAN = -0.015  # nats, over seeds


@dataclass(frozen=True)
class Bounds:
    """The range a measured number should lie in; a strict range excludes its ends."""

    low: float | None = None
    high: float | None = None
    strict: bool = False

    def hold(self, value: float) -> bool:
        """Whether a value lies in the range."""
        above = self.low is None or (value > self.low if self.strict else value >= self.low)
        below = self.high is None or (value < self.high if self.strict else value <= self.high)
        return above and below

    def __str__(self) -> str:
        """In plain characters, e.g. "<= 0.85"."""
        if self.low is not None and self.high is not None:
            return f"= {self.low:g}" if self.low == self.high else f"{self.low:g} to {self.high:g}"
        equals = "" if self.strict else "="
        return f">{equals} {self.low:g}" if self.low is not None else f"<{equals} {self.high:g}"


@dataclass(frozen=True)
class _View:
    """What measuring needs of one run."""

    run: Run
    results: Mapping[str, Any]

    def arm(self, name: str | None) -> Mapping[str, Any] | None:
        arm: Mapping[str, Any] | None = self.results["arms"].get(name)
        return arm

    @property
    def reference(self) -> str | None:
        name: str | None = self.results["reference_arm"]
        return name

    def missing(self, *names: str | None) -> str:
        """Why the forgetting of these arms cannot be compared, "" if it can."""
        if None in names:
            return "no fixed-replay arm was run"
        for name in names:
            if name not in self.results["arms"]:
                return f"arm {name} was not run"
        return "" if "base" in self.results["arms"] else "the base model was not evaluated"

    def unmatched(self) -> str:
        """Why RoD and the reference arm cannot be compared at equal trained tokens, "" if so."""
        missing = self.missing("rod", self.reference)
        if missing:
            return missing
        if not self.results["comparisons"]["rod"]["same_tokens"]:
            return f"rod and {self.reference} were not trained on equally many tokens"
        return ""


def judge(run: Run, results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All checks of one run, in the order they are shown, as JSON-ready dictionaries."""
    view = _View(run, results)
    reference = parse_arm(view.reference or "fixed_32").label
    rows = []
    for name, kind, claim, bounds, measure in _RULES:
        value, note = measure(view)
        if value is not None and not math.isfinite(value):
            value, note = None, "the measured number is not finite"
        rows.append(_row(name, kind, claim.format(reference=reference), bounds, value, note))
    return rows


def judge_across_seeds(per_run: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Checks on the mean over runs that differ in their seed; none for a single run."""
    gaps = [
        check["measured"]
        for results in per_run
        for check in results["checks"]
        if check["id"] == "chord_gap" and check["measured"] is not None
    ]
    if len(per_run) < 2:
        return []
    value = math.fsum(gaps) / len(gaps) if len(gaps) > 1 else None
    note = f"mean of {len(gaps)} runs" if value is not None else "fewer than two runs were judged"
    claim = "Mean over seeds: adaptation loss below fixed replay at equal forgetting"
    return [_row("chord_gap_mean", "claim", claim, Bounds(high=CHORD_GAP_MEAN), value, note)]


def overall_verdict(verdicts: Sequence[Verdict]) -> Verdict:
    """Of one check over several runs: fails if it fails in one, holds if it holds in the others."""
    if "fails" in verdicts:
        return "fails"
    return "holds" if "holds" in verdicts else "not judged"


def format_checks(results: Mapping[str, Any]) -> str:
    """The checks as a text table, one column of measurements per run."""
    runs = [results, *results.get("replicates", [])]
    header = ["check", "bound", *(run_label(run, i) for i, run in enumerate(runs)), "verdict"]
    table, notes = [header], []
    for rows in zip(*(run["checks"] for run in runs), strict=True):
        verdict = overall_verdict([row["verdict"] for row in rows])
        values = [format_measured(row["measured"]) for row in rows]
        first = rows[0]
        shown = verdict if first["kind"] == "claim" else f"{verdict} ({first['kind']})"
        table.append([first["claim"], bounds_of(first), *values, shown])
        for i, row in enumerate(rows):
            if row["note"]:
                of_run = f", {run_label(runs[i], i)}" if len(runs) > 1 else ""
                notes.append(f"  {row['id']}{of_run}: {row['note']}")
    for row in results.get("checks_across_seeds", []):
        blanks = [""] * (len(runs) - 1)
        measured = format_measured(row["measured"])
        table.append([row["claim"], bounds_of(row), measured, *blanks, row["verdict"]])
    widths = [max(len(line[i]) for line in table) for i in range(len(header))]
    table.insert(1, ["-" * width for width in widths])
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    ]
    return "\n".join(lines + (["", "notes", *notes] if notes else []))


def run_label(results: Mapping[str, Any], index: int) -> str:
    """What a run is called next to others: by its seed, else by its place."""
    return f"seed {results['seed']}" if results["seed"] is not None else f"run {index + 1}"


def bounds_of(row: Mapping[str, Any]) -> str:
    """The range of a check in plain characters."""
    return str(Bounds(**row["bounds"]))


def format_measured(value: float | None) -> str:
    """A measured number to three decimals."""
    return "-" if value is None else f"{value:.3f}"


def _row(
    name: str, kind: CheckKind, claim: str, bounds: Bounds, value: float | None, note: str
) -> dict[str, Any]:
    verdict: Verdict = "not judged"
    if value is not None:
        verdict = "holds" if bounds.hold(value) else "fails"
    return {
        "id": name,
        "kind": kind,
        "claim": claim,
        "measured": value,
        "bounds": {"low": bounds.low, "high": bounds.high, "strict": bounds.strict},
        "verdict": verdict,
        "note": note,
    }


def _forgetting_ratio(view: _View) -> Measurement:
    if reason := view.unmatched():
        return None, reason
    rod, fixed = view.results["arms"]["rod"], view.results["arms"][view.reference]
    return _ratio(rod["val_forgetting"], fixed["val_forgetting"], f"{view.reference} forgets")


def _chord_gap(view: _View) -> Measurement:
    if reason := view.unmatched():
        return None, reason
    return _gap(view, "rod")


def _max_source_ratio(view: _View) -> Measurement:
    if reason := view.unmatched():
        return None, reason
    worst: list[float | None] = []
    for name in ("rod", view.reference):
        by_source = view.results["arms"][name]["forgetting_by_source"]
        worst.append(max(by_source.values()) if by_source else None)
    return _ratio(worst[0], worst[1], f"some source of {view.reference} is forgotten")


def _slope_ratio(view: _View) -> Measurement:
    if reason := view.unmatched() or view.missing("no_replay"):
        return None, reason
    profile = view.results["profile"]
    slopes = [profile[name]["slope"] for name in ("rod", view.reference)]
    return _ratio(*slopes, f"the profile of {view.reference} rises over three sources or more")


def _r_residual(view: _View) -> Measurement:
    if reason := view.missing("rod", view.reference):
        return None, reason
    return _correlation(view, "pearson_r_residual")


def _r_no_replay(view: _View) -> Measurement:
    if reason := view.missing("rod", "no_replay"):
        return None, reason
    return _correlation(view, "pearson_r")


def _first_step_share(view: _View) -> Measurement:
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


def _decile_growth(view: _View) -> Measurement:
    if "rod" not in view.run.arms:
        return None, "arm rod was not run"
    deciles = view.results["arms"]["rod"]["share_by_decile"]
    if deciles is None:
        return None, "rod has no curriculum.rod of ten steps or more"
    return deciles[-1] - deciles[0], ""


def _mean_share(view: _View) -> Measurement:
    if "rod" not in view.run.arms:
        return None, "arm rod was not run"
    share = view.results["arms"]["rod"]["replay_share"]
    return share, "" if share is not None else "rod has no curriculum.rod"


def _merge_gap(lam: float) -> Callable[[_View], Measurement]:
    def measure(view: _View) -> Measurement:
        for name in view.results["arms"]:
            parsed = parse_arm(name)
            if parsed.kind == "merge" and math.isclose(parsed.value, lam):
                reason = view.missing(name)
                return (None, reason) if reason else _gap(view, name)
        return None, f"arm merge_{lam:g} was not run"

    return measure


def _compute_matched_gap(view: _View) -> Measurement:
    name = "rod_compute_matched"
    if reason := view.missing(name, view.reference):
        return None, reason
    if not view.results["comparisons"][name]["same_compute"]:
        return None, f"{name} and {view.reference} did not use the same compute"
    return _gap(view, name)


def _gap(view: _View, name: str) -> Measurement:
    if not view.results["chord"]:
        return None, "fewer than two fixed-replay arms with forgetting above zero span no chord"
    comparison = view.results["comparisons"][name]
    if comparison["gap"] is None:
        return None, f"{name} shows no forgetting above zero to compare at"
    if comparison["extrapolated"]:
        return comparison["gap"], f"the forgetting of {name} lies beyond the chord: extrapolated"
    return comparison["gap"], ""


def _correlation(view: _View, key: str) -> Measurement:
    value = view.results["profile"]["rod"][key]
    sources = view.results["arms"]["rod"]["sampling_ratio_by_source"] or {}
    if value is None:
        return None, "needs three replay sources that differ in forgetting and in sampling"
    return value, f"over {sum(v is not None for v in sources.values())} sources"


def _ratio(ours: float | None, theirs: float | None, needs: str) -> Measurement:
    if ours is None or theirs is None or theirs <= 0:
        return None, f"only defined if {needs}"
    return ours / theirs, ""


_Rule = tuple[str, CheckKind, str, Bounds, Callable[[_View], Measurement]]
_RULES: tuple[_Rule, ...] = (
    (
        "forgetting_ratio",
        "claim",
        "RoD's forgetting F_val over that of {reference}",
        Bounds(high=0.85),
        _forgetting_ratio,
    ),
    (
        "chord_gap",
        "claim",
        "RoD's adaptation loss minus fixed replay's at equal forgetting (nats)",
        Bounds(high=-0.008),
        _chord_gap,
    ),
    (
        "max_source_ratio",
        "claim",
        "Forgetting of the worst source, RoD over {reference}",
        Bounds(high=0.8),
        _max_source_ratio,
    ),
    (
        "slope_ratio",
        "claim",
        "Slope of the forgetting profile, RoD over {reference}",
        Bounds(high=0.5),
        _slope_ratio,
    ),
    (
        "r_residual",
        "claim",
        "Pearson r of sampling ratio with forgetting under {reference}",
        Bounds(low=0.75, strict=True),
        _r_residual,
    ),
    (
        "r_no_replay",
        "informative",
        "Pearson r of sampling ratio with forgetting under no replay",
        Bounds(low=0.3, strict=True),
        _r_no_replay,
    ),
    (
        "first_step_share",
        "claim",
        "Replay share of the first step",
        Bounds(low=0.0, high=0.0),
        _first_step_share,
    ),
    (
        "decile_growth",
        "claim",
        "Replay share, last minus first tenth of the run",
        Bounds(low=0.2),
        _decile_growth,
    ),
    (
        "mean_share",
        "informative",
        "Mean replay share",
        Bounds(low=0.25, high=0.45),
        _mean_share,
    ),
    (
        "merge_0.6_gap",
        "claim",
        "Merge 0.6: adaptation loss minus fixed replay's at equal forgetting (nats)",
        Bounds(low=0.03),
        _merge_gap(0.6),
    ),
    (
        "merge_0.8_gap",
        "claim",
        "Merge 0.8: adaptation loss minus fixed replay's at equal forgetting (nats)",
        Bounds(low=0.03),
        _merge_gap(0.8),
    ),
    (
        "compute_matched_gap",
        "limitation",
        "At equal compute: RoD's adaptation loss minus fixed replay's (nats)",
        Bounds(high=0.0),
        _compute_matched_gap,
    ),
)
