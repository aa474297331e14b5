"""Verdicts on the paper's claims, from a run's results and thresholds.

A check is a measured number, its expected range and a verdict: "holds", "fails" or "not judged",
with the reason. Thresholds have a margin to the results of repeated runs of a small recipe. There
are three kinds: a "claim" is a promise of the method; "informative" checks are too noisy or too
dependent on the setting to promise; a "limitation" is known to fail for small models and is shown
for transparency.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from nemo_rod.lab.report.arm_names import parse_arm
from nemo_rod.lab.report.claims import ACROSS_SEEDS, RULES, Bounds, NotJudged, Rule, View
from nemo_rod.lab.report.run_files import Run

Results = Mapping[str, Any]
Verdict = Literal["holds", "fails", "not judged"]


def judge(run: Run, results: Results) -> list[dict[str, Any]]:
    """Returns all checks of one run, in display order, as JSON-ready dictionaries."""
    view = View(run, results)
    reference = parse_arm(view.reference or "fixed_32").label
    return [_judged(rule, view, reference) for rule in RULES]


def judge_across_seeds(per_run: Sequence[Results]) -> list[dict[str, Any]]:
    """Returns checks on the mean over runs with different seeds; none for a single run."""
    return [_judged(ACROSS_SEEDS, per_run)] if len(per_run) > 1 else []


def check_rows(results: Results) -> list[dict[str, Any]]:
    """Returns every check with its verdict over all runs, and what each run measured and noted."""
    runs, labels = [results, *results["replicates"]], run_labels(results)
    groups = [*zip(*(run["checks"] for run in runs), strict=True)]
    groups += [(check,) for check in results["checks_across_seeds"]]
    return [
        {key: checks[0][key] for key in ("id", "claim", "kind")}
        | {
            "bound": str(Bounds(**checks[0]["bounds"])),
            "verdict": _overall([check["verdict"] for check in checks]),
            "measured": [check["measured"] for check in checks],
            "notes": _joint([check["note"] for check in checks], labels),
        }
        for checks in groups
    ]


def run_labels(results: Results) -> list[str]:
    """Returns what tells runs apart: their seeds, or else their numbers."""
    runs = enumerate([results, *results["replicates"]], start=1)
    return [f"run {i}" if run["seed"] is None else f"seed {run['seed']}" for i, run in runs]


def format_checks(results: Results) -> str:
    """Returns the checks as a text table, with one column of measurements per run."""
    labels, rows = run_labels(results), check_rows(results)
    header = ["check", "bound", *labels, "verdict"]
    table = [header]
    for row in rows:
        values = ["-" if value is None else f"{value:.3f}" for value in row["measured"]]
        values += [""] * (len(labels) - len(values))
        kind = "" if row["kind"] == "claim" else f" ({row['kind']})"
        table.append([row["claim"], row["bound"], *values, row["verdict"] + kind])
    widths = [max(len(line[i]) for line in table) for i in range(len(header))]
    table.insert(1, ["-" * width for width in widths])
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    ]
    of_runs = rows[: len(results["checks"])]
    notes = [f"  {row['id']}: {note}" for row in of_runs for note in row["notes"]]
    return "\n".join(lines + (["", "notes", *notes] if notes else []))


def _overall(verdicts: Sequence[Verdict]) -> Verdict:
    """Returns one check's verdict over several runs: one failure fails, one "holds" suffices."""
    if "fails" in verdicts:
        return "fails"
    return "holds" if "holds" in verdicts else "not judged"


def _joint(notes: Sequence[str], labels: Sequence[str]) -> list[str]:
    """Returns a check's notes over several runs: once if equal, else with the runs' labels."""
    if len(set(notes)) == 1:
        return [notes[0]] if notes[0] else []
    return [f"{label}: {note}" for note, label in zip(notes, labels, strict=True) if note]


def _judged(rule: Rule, measured: Any, reference: str = "") -> dict[str, Any]:
    value: float | None
    verdict: Verdict
    try:
        value, note = rule.measure(measured)
        verdict = "holds" if rule.bounds.hold(value) else "fails"
    except NotJudged as reason:
        value, note, verdict = None, str(reason), "not judged"
    return {
        "id": rule.id,
        "kind": rule.kind,
        "claim": rule.claim.format(reference=reference),
        "measured": value,
        "bounds": asdict(rule.bounds),
        "verdict": verdict,
        "note": note,
    }
