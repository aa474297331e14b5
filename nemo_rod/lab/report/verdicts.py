"""Verdicts on the paper's claims, from a run's results and thresholds.

A check is a measured number, its expected range and a verdict: "holds", "fails" or "not judged",
with the reason. Thresholds have a margin to the results of repeated runs of a small recipe. There
are three kinds: a "claim" is a promise of the method; "informative" checks are too noisy or too
dependent on the setting to promise; a "limitation" is known to fail for small models and is shown
for transparency.

A measurement returns the number and a note, or raises `NotJudged` with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from nemo_rod.commands.text import table
from nemo_rod.lab.report.results import Results, known
from nemo_rod.lab.report.run_files import Run
from nemo_rod.selection.arm_names import parse_arm

Verdict = Literal["holds", "fails", "not judged"]
CheckKind = Literal["claim", "informative", "limitation"]
Measurement = tuple[float, str]  # number, note


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


class NotJudged(Exception):
    """A number cannot be judged in a run; the message is the reason."""


@dataclass(frozen=True)
class View:
    """The input of a measurement: a run's files and the results computed from them."""

    run: Run
    results: Results

    @property
    def reference(self) -> Any:
        """Name of the fixed-replay arm with which RoD is compared; None without any."""
        return self.results["reference_arm"]

    def arms(self, *names: str | None) -> list[Results]:
        """Returns the results of arms whose forgetting can be compared."""
        arms = self.results["arms"]
        if None in names:
            raise NotJudged("no fixed-replay arm was run")
        if missing := [name for name in names if name not in arms]:
            raise NotJudged(f"arm {missing[0]} was not run")
        if "base" not in arms:
            raise NotJudged("the base model was not evaluated")
        return [arms[name] for name in names]

    def pair(self) -> list[Results]:
        """Returns the results of RoD and of the reference arm, trained on equally many tokens."""
        arms = self.arms("rod", self.reference)
        if not self.results["comparisons"]["rod"]["same_tokens"]:
            raise NotJudged(f"rod and {self.reference} were not trained on equally many tokens")
        return arms

    def rod(self) -> Results:
        """Returns the results of RoD, for measurements without a comparison."""
        if "rod" not in self.run.arms:
            raise NotJudged("arm rod was not run")
        arm: Results = self.results["arms"]["rod"]
        return arm


def _forgetting_ratio(view: View) -> Measurement:
    rod, fixed = view.pair()
    return _ratio(rod["val_forgetting"], fixed["val_forgetting"], f"{view.reference} forgets")


def _chord_gap(view: View) -> Measurement:
    view.pair()
    return _gap(view, "rod")


def _max_source_ratio(view: View) -> Measurement:
    worst = [max((arm["forgetting_by_source"] or {}).values(), default=None) for arm in view.pair()]
    return _ratio(worst[0], worst[1], f"some source of {view.reference} is forgotten")


def _slope_ratio(view: View) -> Measurement:
    view.pair()
    view.arms("no_replay")
    profile = view.results["profile"]
    needs = f"the profile of {view.reference} rises over three sources or more"
    return _ratio(profile["rod"]["slope"], profile[view.reference]["slope"], needs)


def _ratio(ours: float | None, theirs: float | None, needs: str) -> Measurement:
    if ours is None or theirs is None or theirs <= 0:
        raise NotJudged(f"only defined if {needs}")
    return ours / theirs, ""


def _correlation(key: str) -> Callable[[View], Measurement]:
    def measure(view: View) -> Measurement:
        view.arms("rod", "no_replay" if key == "pearson_r" else view.reference)
        value = view.results["profile"]["rod"][key]
        if value is None:
            raise NotJudged("needs three replay sources that differ in forgetting and in sampling")
        rod = view.results["arms"]["rod"]  # a source may lack candidates, or held-out blocks
        both = {*known(rod["sampling_ratio_by_source"])} & {*(rod["forgetting_by_source"] or {})}
        return value, f"over {len(both)} sources"

    return measure


def _first_step_share(view: View) -> Measurement:
    view.rod()
    history = view.run.arms["rod"].history
    if history is None:
        raise NotJudged("rod has no curriculum.rod")
    if history.step_T[0] != 0:
        raise NotJudged(f"the curriculum begins at step {history.step_T[0]}")
    num_adaptation = int(history.drawn_TR[0, 0])
    forced = history.batch_size - num_adaptation
    note = f"the first pool held {forced} adaptation block(s) too few to fill the batch"
    return float(history.share_T[0]), note if forced > 0 else ""


def _decile_growth(view: View) -> Measurement:
    if deciles := view.rod()["share_by_decile"]:
        return deciles[-1] - deciles[0], ""
    raise NotJudged("rod has no curriculum.rod of ten steps or more")


def _mean_share(view: View) -> Measurement:
    if (share := view.rod()["replay_share"]) is not None:
        return share, ""
    raise NotJudged("rod has no curriculum.rod")


def _merge_gap(lam: float) -> Callable[[View], Measurement]:
    def measure(view: View) -> Measurement:
        for name in view.results["arms"]:
            parsed = parse_arm(name)
            if parsed.kind == "merge" and math.isclose(parsed.value, lam):
                view.arms(name)
                return _gap(view, name)
        raise NotJudged(f"arm merge_{lam:g} was not run")

    return measure


def _at_equal_compute(name: str) -> Callable[[View], Measurement]:
    def measure(view: View) -> Measurement:
        view.arms(name, view.reference)
        if not view.results["comparisons"][name]["same_compute"]:
            raise NotJudged(f"{name} and {view.reference} did not use the same compute")
        return _gap(view, name)

    return measure


def _gap(view: View, name: str) -> Measurement:
    if not view.results["chord"]:
        raise NotJudged("fewer than two fixed-replay arms with forgetting above zero span no chord")
    comparison = view.results["comparisons"][name]
    if comparison["gap"] is None:
        raise NotJudged(f"{name} shows no forgetting above zero to compare at")
    if comparison["extrapolated"]:
        raise NotJudged(f"the forgetting of {name} lies beyond that of all fixed-replay arms")
    return comparison["gap"], ""


def _mean_gap(per_run: Sequence[Results]) -> Measurement:
    checks = [check for run in per_run for check in run["checks"] if check["id"] == "chord_gap"]
    gaps = [check["measured"] for check in checks if check["measured"] is not None]
    if len(gaps) < 2:
        raise NotJudged("fewer than two runs were judged")
    return math.fsum(gaps) / len(gaps), f"mean of {len(gaps)} runs"


class Rule(NamedTuple):
    """A check: its id, kind, range, measurement and wording (`{reference}` is the fixed arm)."""

    id: str
    kind: CheckKind
    bounds: Bounds
    measure: Callable[[Any], Measurement]  # of a `View`, or of results over seeds
    claim: str


RULES: tuple[Rule, ...] = (
    Rule("forgetting_ratio", "claim", Bounds(high=0.85), _forgetting_ratio,
         "RoD's forgetting F_val over that of {reference}"),
    Rule("chord_gap", "claim", Bounds(high=-0.008), _chord_gap,
         "RoD's adaptation loss minus fixed replay's at equal forgetting (nats)"),
    Rule("max_source_ratio", "claim", Bounds(high=0.8), _max_source_ratio,
         "Forgetting of the worst source, RoD over {reference}"),
    Rule("slope_ratio", "claim", Bounds(high=0.5), _slope_ratio,
         "Slope of the forgetting profile, RoD over {reference}"),
    Rule("r_residual", "claim", Bounds(low=0.75, strict=True),
         _correlation("pearson_r_residual"),
         "Pearson r of sampling ratio with forgetting under {reference}"),
    Rule("r_no_replay", "informative", Bounds(low=0.3, strict=True),
         _correlation("pearson_r"),
         "Pearson r of sampling ratio with forgetting under no replay"),
    Rule("first_step_share", "claim", Bounds(low=0.0, high=0.0), _first_step_share,
         "Replay share of the first step"),
    Rule("decile_growth", "claim", Bounds(low=0.2), _decile_growth,
         "Replay share, last minus first tenth of the run"),
    Rule("mean_share", "informative", Bounds(low=0.25, high=0.45), _mean_share,
         "Mean replay share"),
    Rule("merge_0.6_gap", "claim", Bounds(low=0.03), _merge_gap(0.6),
         "Merge 0.6: adaptation loss minus fixed replay's at equal forgetting (nats)"),
    Rule("merge_0.8_gap", "claim", Bounds(low=0.03), _merge_gap(0.8),
         "Merge 0.8: adaptation loss minus fixed replay's at equal forgetting (nats)"),
    Rule("compute_matched_gap", "limitation", Bounds(high=0.0),
         _at_equal_compute("rod_compute_matched"),
         "At equal compute: RoD's adaptation loss minus fixed replay's (nats)"),
    Rule("averages_gap", "claim", Bounds(high=0.0), _at_equal_compute("rod_averages"),
         "The same of RoD that estimates scores from averages by source (nats)"),
)  # fmt: skip

ACROSS_SEEDS = Rule(
    "chord_gap_mean", "claim", Bounds(high=-0.015), _mean_gap,
    "Mean over seeds: adaptation loss below fixed replay at equal forgetting",
)  # fmt: skip


def is_calibrated(recipe: str) -> bool:
    """Returns whether the bounds of the checks were set for recipes like this one: the toys."""
    return recipe.split("_")[0] == "toy"


def judge(run: Run, results: Results, *, is_smoke_test: bool = False) -> list[dict[str, Any]]:
    """Returns all checks of one run, in display order, as JSON-ready dictionaries.

    Those of a smoke test are not judged: its runs are too short to show anything of the method.
    """
    view = View(run, results)
    reference = parse_arm(view.reference or "fixed_32").label
    too_small = "this recipe checks the installation; it is too small to judge the method by"
    reason = too_small if is_smoke_test else ""
    return [_judged(rule, view, reference, reason) for rule in RULES]


def judge_across_seeds(per_run: Sequence[Results]) -> list[dict[str, Any]]:
    """Returns checks on the mean over runs with different seeds; none for a single run."""
    return [_judged(ACROSS_SEEDS, per_run)] if len(per_run) > 1 else []


def check_rows(results: Results) -> list[dict[str, Any]]:
    """Returns every check with its verdict over all runs, and the number and note of each run.

    One failure fails a check, else one "holds" suffices. Equal notes of all runs appear once. A run
    with another fixed arm than the first has its own claim as a note.
    """
    runs, labels = [results, *results["replicates"]], run_labels(results)
    groups = [*zip(*(run["checks"] for run in runs), strict=True)]
    groups += [(check,) for check in results["checks_across_seeds"]]
    rows = []
    for checks in groups:
        verdicts, notes = ([check[key] for check in checks] for key in ("verdict", "note"))
        claims = ["" if c["claim"] == checks[0]["claim"] else c["claim"] for c in checks]
        notes = ["; ".join(filter(None, pair)) for pair in zip(claims, notes, strict=True)]
        prefixes = [f"{label}: " for label in labels]
        if len(set(notes)) == 1:
            notes, prefixes = notes[:1], [""]
        rows.append(
            {key: checks[0][key] for key in ("id", "claim", "kind")}
            | {
                "bound": str(Bounds(**checks[0]["bounds"])),
                "verdict": next((v for v in ("fails", "holds") if v in verdicts), "not judged"),
                "measured": [check["measured"] for check in checks],
                "notes": [p + note for p, note in zip(prefixes, notes, strict=True) if note],
            }
        )
    return rows


def run_labels(results: Results) -> list[str]:
    """Returns a label per run: its seed, or else its number."""
    runs = enumerate([results, *results["replicates"]], start=1)
    return [f"run {i}" if run["seed"] is None else f"seed {run['seed']}" for i, run in runs]


def format_checks(results: Results) -> str:
    """Returns the checks as a text table, with one column of measurements per run."""
    labels, rows, shown = run_labels(results), check_rows(results), []
    for row in rows:
        values = ["-" if value is None else f"{value:z.3f}" for value in row["measured"]]
        values += [""] * (len(labels) - len(values))
        kind = "" if row["kind"] == "claim" else f" ({row['kind']})"
        shown.append([row["claim"], row["bound"], *values, row["verdict"] + kind])
    per_run = rows[: len(results["checks"])]
    notes = [f"  {row['id']}: {note}" for row in per_run for note in row["notes"]]
    lines = [table(("check", "bound", *labels, "verdict"), shown)]
    return "\n".join(lines + (["", "notes", *notes] if notes else []))


def _judged(rule: Rule, subject: Any, reference: str = "", reason: str = "") -> dict[str, Any]:
    value: float | None
    verdict: Verdict
    try:
        if reason:
            raise NotJudged(reason)
        value, note = rule.measure(subject)
        verdict = "holds" if rule.bounds.hold(value) else "fails"
    except NotJudged as error:
        value, note, verdict = None, str(error), "not judged"
    return {
        "id": rule.id,
        "kind": rule.kind,
        "claim": rule.claim.format(reference=reference),
        "measured": value,
        "bounds": asdict(rule.bounds),
        "verdict": verdict,
        "note": note,
    }
