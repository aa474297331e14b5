"""The report on a small made-up run whose every number is worked out here once more."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_rod.lab.report import build_report, format_checks
from nemo_rod.lab.report.arm_names import parse_arm
from nemo_rod.lab.report.figures import FIGURES
from nemo_rod.lab.report.figures.canvas import inline_svg, new_figure
from nemo_rod.lab.report.figures.labels import Label, place_labels
from nemo_rod.lab.report.figures.plane import frontier
from nemo_rod.lab.report.figures.sources import forgetting_profile, sampling_ratio
from nemo_rod.lab.report.page import summarise
from nemo_rod.lab.report.paper_tables import cheaper_table
from nemo_rod.lab.report.results import results_of
from nemo_rod.lab.report.run_files import read_run
from nemo_rod.lab.report.table import arms_table
from nemo_rod.lab.report.verdicts import judge
from nemo_rod.selection.candidates import Pool
from nemo_rod.selection.choice import Choice
from nemo_rod.selection.curriculum.header import CurriculumHeader, SourceRow
from nemo_rod.selection.curriculum.log import Curriculum
from nemo_rod.selection.forgetting import forgetting_by_source, validation_forgetting

K, S, STEPS = 4, 8, 23
COUNTS = {
    "adaptation": {"news": 30, "wiki_de": 10},
    "replay": {"code": 5, "math": 20, "web": 40, "wiki": 15},
}
REPLAY = list(COUNTS["replay"])
BASE = {"code": 1.0, "math": 2.0, "web": 3.0, "wiki": 2.5}
BASE_ADAPTATION = {"news": 3.5, "wiki_de": 3.0}
# arm -> adaptation losses (news, wiki_de), forgetting of the replay sources
LOSSES: dict[str, tuple[tuple[float, float], tuple[float, ...]]] = {
    "no_replay": ((1.8, 2.0), (0.4, 0.9, 0.7, 0.8)),
    "fixed_10": ((1.85, 2.05), (0.2, 0.5, 0.3, 0.45)),
    "fixed_32": ((1.9, 2.1), (0.1, 0.3, 0.15, 0.25)),
    "fixed_50": ((2.0, 2.2), (0.05, 0.15, 0.08, -0.1)),
    "max_replay": ((1.84, 2.04), (0.06, 0.16, 0.09, 0.1)),
    "merge_0.4": ((2.5, 2.5), (0.1, 0.2, 0.1, 0.15)),
    "merge_0.6": ((2.2, 2.3), (0.2, 0.4, 0.3, 0.35)),
    "merge_0.8": ((2.0, 2.1), (0.3, 0.6, 0.5, 0.55)),
    "rod": ((1.88, 2.02), (0.11, 0.15, 0.12, 0.14)),
    "rod_averages": ((1.89, 2.03), (0.11, 0.16, 0.12, 0.14)),
    "rod_compute_matched": ((1.97, 2.15), (0.12, 0.18, 0.13, 0.15)),
}
ARM_KEYS = {
    "adapt_loss", "val_forgetting", "task_forgetting", "capability_change",
    "forgetting_by_source", "replay_share", "share_by_decile", "sampling_ratio_by_source",
    "trained_tokens", "scored_tokens", "compute", "wall_seconds", "seed", "design",
}  # fmt: skip


@dataclass
class FakeRun:
    """A run folder and, per trained arm, its steps as (candidate sources, chosen positions)."""

    folder: Path
    steps: dict[str, list[tuple[list[str], list[int]]]] = field(default_factory=dict)


def write_run(
    folder: Path, *, arms: Iterable[str] = ("base", *LOSSES), seed: int = 7, shift: float = 0.0
) -> FakeRun:
    """Writes the files of a run; `shift` is added to RoD's adaptation losses."""
    for role, counts in COUNTS.items():
        for source, count in counts.items():
            for path, value in ((source, count), (f"{source}/holdout", 2)):
                manifest = folder / "blocks" / role / path / "manifest.json"
                manifest.parent.mkdir(parents=True, exist_ok=True)
                manifest.write_text(json.dumps({"count": value}))
    fake = FakeRun(folder)
    for arm in arms:
        arm_dir = folder / "arms" / arm
        arm_dir.mkdir(parents=True)
        adaptation, forgotten = LOSSES.get(arm, (tuple(BASE_ADAPTATION.values()), (0.0,) * 4))
        extra = shift if arm == "rod" else 0.0
        evaluation = {
            "arm": arm,
            "seed": seed,
            "loss": {
                "adaptation": {
                    name: loss + extra
                    for name, loss in zip(BASE_ADAPTATION, adaptation, strict=True)
                },
                "replay": {o: BASE[o] + f for o, f in zip(BASE, forgotten, strict=True)},
            },
        }
        (arm_dir / "evaluation.json").write_text(json.dumps(evaluation))
        if arm != "base":
            write_arm(fake, arm, seed)
    return fake


def write_arm(fake: FakeRun, arm: str, seed: int) -> None:
    is_rod, is_merge = arm.startswith("rod"), arm.startswith("merge")
    scores = is_rod and arm != "rod_averages"
    steps = {"rod_compute_matched": 14, "max_replay": 2 * STEPS}.get(arm, STEPS)
    width = 2 * K if is_rod else K
    facts: dict[str, Any] = {
        "arm": arm, "kind": "trained", "seed": seed, "steps": steps, "batch_size": K,
        "block_size": S, "trained_tokens": steps * K * S,
        "scored_tokens": steps * width * S if scores else 0,
        "compute": steps * (1 + 2 / 3) if scores else float(steps), "wall_seconds": 0.5 * steps,
    }  # fmt: skip
    if is_merge:
        facts |= {"kind": "merged", "of": "no_replay", "trained_tokens": 0, "compute": 0.0}
    arm_dir = fake.folder / "arms" / arm
    (arm_dir / "arm.json").write_text(json.dumps(facts))
    if is_merge:
        return
    rows: list[dict[str, Any]] = [
        {"step": t, "timing/train/total": 1.7 if is_rod else 1.0} for t in range(steps)
    ]
    for row in rows[::10] if arm == "rod" else []:
        row |= {"rod/prefix/quarter/overlap": 0.5 + row["step"] / 100}
        row |= {"rod/prefix/quarter/share_drift": 0.0, "rod/prefix/quarter/rank_correlation": None}
    lines = [json.dumps(row) for row in rows]
    (arm_dir / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 99, "timing')  # torn
    fake.steps[arm] = write_curriculum(arm_dir / "curriculum.rod", arm, steps, width, seed)


def write_curriculum(
    path: Path, arm: str, num_steps: int, width: int, seed: int
) -> list[tuple[list[str], list[int]]]:
    """Random pools; RoD chooses at random too, only from adaptation in the first step."""
    rng = np.random.default_rng(seed)
    sources, start = [], 0
    for role, counts in COUNTS.items():
        for name, count in counts.items():
            sources.append(SourceRow(name, role, start, count))
            start += count
    is_rod = arm.startswith("rod")
    header = CurriculumHeader(
        num_candidates=width, num_chosen=K, block_size=S, store="s", tokenizer="t",
        references="r" if is_rod else "", config="c", seed=seed, sources=tuple(sources),
        scored=is_rod,
    )  # fmt: skip
    steps = []
    with Curriculum.create(path, header) as curriculum:
        for step in range(num_steps):
            num_replay = {"no_replay": 0}.get(arm, width // 2)
            names = [*rng.choice(list(BASE_ADAPTATION), width - num_replay).tolist()]
            names += rng.choice(REPLAY, num_replay, p=[0.4, 0.2, 0.2, 0.2]).tolist()
            rows = {row.name: row for row in sources}
            block_ids = np.array([rows[n].start + rng.integers(rows[n].count) for n in names])
            chosen = list(range(K))
            if is_rod and step > 0:
                chosen = sorted(rng.choice(width, K, replace=False).tolist())
            score = rng.normal(size=width).astype(np.float32) if is_rod else None
            tau = float(score[chosen].min()) if score is not None else float("nan")
            pool = Pool(step, block_ids, block_ids >= 40)
            curriculum.append(Choice(pool, score, score, np.array(chosen), tau))
            steps.append((names, chosen))
    return steps


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> FakeRun:
    return write_run(tmp_path_factory.mktemp("runs") / "small")


@pytest.fixture(scope="module")
def results(fake: FakeRun) -> dict[str, Any]:
    return build_report(fake.folder)


def measured(results: dict[str, Any], check: str) -> dict[str, Any]:
    return next(row for row in results["checks"] if row["id"] == check)


def adapt_loss(arm: str) -> float:
    news, wiki = LOSSES[arm][0]
    return (30 * news + 10 * wiki) / 40


def f_val(arm: str) -> float:
    forgotten = np.maximum(LOSSES[arm][1], 0)
    return float(forgotten @ [5, 20, 40, 15]) / 80


# ---------------------------------------------------------------- results


def test_every_arm_has_the_keys_of_the_contract(results: dict[str, Any]) -> None:
    assert list(results["arms"]) == ["base", *LOSSES]
    assert all(set(arm) == ARM_KEYS for arm in results["arms"].values())


def test_losses_and_forgetting(results: dict[str, Any]) -> None:
    for name, (_, forgotten) in LOSSES.items():
        arm = results["arms"][name]
        assert arm["adapt_loss"] == pytest.approx(adapt_loss(name), rel=1e-12)
        assert arm["val_forgetting"] == pytest.approx(f_val(name), rel=1e-12)
        assert list(arm["forgetting_by_source"].values()) == pytest.approx(forgotten, rel=1e-9)
        assert arm["seed"] == 7 and arm["task_forgetting"] is None
    base = results["arms"]["base"]
    assert base["val_forgetting"] == 0 and base["compute"] == 0 and base["replay_share"] is None


def test_forgetting_is_the_one_that_the_package_exports(
    fake: FakeRun, results: dict[str, Any]
) -> None:
    for name, arm in results["arms"].items():
        file = fake.folder / "arms" / name / "evaluation.json"
        loss = json.loads(file.read_text())["loss"]["replay"]
        assert arm["forgetting_by_source"] == forgetting_by_source(loss, BASE)
        assert arm["val_forgetting"] == validation_forgetting(loss, BASE, COUNTS["replay"])


def test_shares_and_sampling_ratio_by_counting(fake: FakeRun, results: dict[str, Any]) -> None:
    for name, steps in fake.steps.items():
        arm = results["arms"][name]
        shares = [sum(names[i] in REPLAY for i in chosen) / K for names, chosen in steps]
        assert arm["replay_share"] == pytest.approx(sum(shares) / len(shares), rel=1e-12)
        sizes = [len(steps) // 10 + (part < len(steps) % 10) for part in range(10)]
        starts = np.cumsum([0, *sizes])
        deciles = [sum(shares[a : a + n]) / n for a, n in zip(starts[:-1], sizes, strict=True)]
        assert arm["share_by_decile"] == pytest.approx(deciles, rel=1e-12)
        offered = [n for names, _ in steps for n in names if n in REPLAY]
        trained = [names[i] for names, chosen in steps for i in chosen if names[i] in REPLAY]
        if not trained:
            assert arm["sampling_ratio_by_source"] is None
            continue
        for source in REPLAY:
            ratio = trained.count(source) / len(trained) / (offered.count(source) / len(offered))
            assert arm["sampling_ratio_by_source"][source] == pytest.approx(ratio, rel=1e-12)


def test_profile_against_numpy(results: dict[str, Any]) -> None:
    x = LOSSES["no_replay"][1]
    for name in ("fixed_32", "rod"):
        slope, intercept = np.polyfit(x, LOSSES[name][1], 1)
        profile = results["profile"][name]
        assert profile["slope"] == pytest.approx(slope)
        assert profile["intercept"] == pytest.approx(intercept)
    ratio = list(results["arms"]["rod"]["sampling_ratio_by_source"].values())
    rod = results["profile"]["rod"]
    assert rod["pearson_r"] == pytest.approx(np.corrcoef(x, ratio)[0, 1])
    residual = LOSSES["fixed_32"][1]
    assert rod["pearson_r_residual"] == pytest.approx(np.corrcoef(residual, ratio)[0, 1])
    # An arm that trains on whatever it is offered has the same ratio everywhere.
    assert results["profile"]["fixed_32"]["pearson_r"] is None


ACCURACY = {
    "base": {"math": 0.5, "code": 0.25},
    "no_replay": {"math": 0.3125, "code": 0.125},
    "fixed_32": {"math": 0.4375, "code": 0.25},
    "rod": {"math": 0.25, "code": 0.75},
}


def write_tasks(run: FakeRun, arms: Iterable[str] = ACCURACY) -> None:
    """Writes answers to two tasks, as the real evaluation does."""
    for arm in arms:
        asked = {"version": 1, "few_shot": 0, "prompts": "0f"}
        tasks = {
            "configuration": {"backend": "hf", "limit": None},
            "capabilities": ACCURACY[arm],
            "tasks": {
                name: {"accuracy": v, "leaves": {name: asked}} for name, v in ACCURACY[arm].items()
            },
        }
        (run.folder / "arms" / arm / "tasks.json").write_text(json.dumps(tasks))


def test_task_forgetting_caps_every_capability(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", arms=("base", "no_replay", "rod"))
    write_tasks(run, ("base", "rod"))
    arms = results_of(read_run(run.folder))["arms"]
    assert arms["rod"]["task_forgetting"] == 0.125 and arms["base"]["task_forgetting"] == 0.0
    assert arms["rod"]["capability_change"] == {"math": -0.25, "code": 0.5}
    assert arms["no_replay"]["task_forgetting"] is arms["no_replay"]["capability_change"] is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"configuration": {"backend": "hf", "limit": 5}}, "limit 5 but arm 'base' has None"),
        ({"tasks": {"math": {"leaves": {"math": {"version": 1, "few_shot": 0, "prompts": "ff"}}}}},
         "prompts of math ff but arm 'base' has 0f"),
    ],
)  # fmt: skip
def test_arms_that_were_asked_other_things_are_left_out_and_named(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    run = write_run(tmp_path / "run", arms=("base", "rod"))
    write_tasks(run, ("base", "rod"))
    file = run.folder / "arms" / "rod" / "tasks.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    found = read_run(run.folder)
    assert list(found.arms) == ["base"]
    (sentence,) = found.disagreements
    assert words in sentence and "arms/rod/tasks.json" in sentence


# ---------------------------------------------------------------- checks


def chord(forgetting: float, low: str, high: str) -> float:
    """The chord between two arms, written out."""
    f0, f1, a0, a1 = f_val(low), f_val(high), adapt_loss(low), adapt_loss(high)
    return float(a0 + (a1 - a0) * np.log(forgetting / f0) / np.log(f1 / f0))


def test_checks_measure_what_they_say(results: dict[str, Any]) -> None:
    rod, x = LOSSES["rod"][1], LOSSES["no_replay"][1]
    fixed = LOSSES["fixed_32"][1]
    deciles = results["arms"]["rod"]["share_by_decile"]
    expected = {
        "forgetting_ratio": f_val("rod") / f_val("fixed_32"),
        "chord_gap": adapt_loss("rod") - chord(f_val("rod"), "fixed_50", "fixed_32"),
        "max_source_ratio": 0.15 / 0.3,
        "slope_ratio": np.polyfit(x, rod, 1)[0] / np.polyfit(x, fixed, 1)[0],
        "first_step_share": 0.0,
        "decile_growth": deciles[9] - deciles[0],
        "mean_share": results["arms"]["rod"]["replay_share"],
        "merge_0.6_gap": adapt_loss("merge_0.6")
        - chord(f_val("merge_0.6"), "fixed_32", "fixed_10"),
        "merge_0.8_gap": adapt_loss("merge_0.8")
        - chord(f_val("merge_0.8"), "fixed_10", "no_replay"),
        "compute_matched_gap": adapt_loss("rod_compute_matched")
        - chord(f_val("rod_compute_matched"), "fixed_50", "fixed_32"),
        "averages_gap": adapt_loss("rod_averages")
        - chord(f_val("rod_averages"), "fixed_50", "fixed_32"),
    }
    for check, value in expected.items():
        assert measured(results, check)["measured"] == pytest.approx(value, rel=1e-9), check
    verdicts = {row["id"]: row["verdict"] for row in results["checks"]}
    assert verdicts["chord_gap"] == verdicts["max_source_ratio"] == "holds"
    assert verdicts["compute_matched_gap"] == "fails"
    assert verdicts["averages_gap"] == "holds"


def test_a_point_beyond_the_chord_is_extrapolated_and_said_to_be(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", arms=("base", "no_replay", "fixed_10", "fixed_32", "rod"))
    results = results_of(read_run(run.folder))
    check = measured({"checks": judge(read_run(run.folder), results)}, "chord_gap")
    value = adapt_loss("rod") - chord(f_val("rod"), "fixed_32", "fixed_10")
    assert check["measured"] == pytest.approx(value, rel=1e-9)
    assert "extrapolated" in check["note"] and results["comparisons"]["rod"]["extrapolated"]


def test_arms_of_another_budget_are_not_compared(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for arm, key, factor in (
        ("rod", "trained_tokens", 2),
        ("rod_compute_matched", "compute", 1.5),
        ("fixed_10", "trained_tokens", 3),
    ):
        file = run.folder / "arms" / arm / "arm.json"
        facts = json.loads(file.read_text())
        file.write_text(json.dumps(facts | {key: facts[key] * factor}))
    read = read_run(run.folder)
    results = results_of(read)
    assert results["chord"] == ["no_replay", "fixed_32", "fixed_50"]
    assert any("fixed_10" in note for note in results["notes"])
    checks = {row["id"]: row for row in judge(read, results)}
    for check, words in (("chord_gap", "equally many"), ("compute_matched_gap", "same compute")):
        assert checks[check]["verdict"] == "not judged" and words in checks[check]["note"]


def test_equal_compute_is_met_to_within_a_step(results: dict[str, Any]) -> None:
    # 14 steps of 5/3 are 23 1/3 plain steps, the nearest there is to 23.
    comparison = results["comparisons"]["rod_compute_matched"]
    assert comparison["same_compute"] and not comparison["same_tokens"]
    assert comparison["compute_ratio"] == pytest.approx(14 * 5 / 3 / 23)
    rod = results["comparisons"]["rod"]
    assert rod["same_tokens"] and not rod["same_compute"]
    assert rod["time_ratio"] == pytest.approx(1.7)


def test_the_fixed_arm_closest_to_a_third_stands_in_for_fixed_32(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", arms=("base", "fixed_10", "fixed_50", "rod"))
    read = read_run(run.folder)
    results = results_of(read)
    assert results["reference_arm"] == "fixed_50"
    assert "fixed 50 %" in judge(read, results)[0]["claim"]


def test_a_first_pool_short_of_adaptation_is_noted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", arms=("base", "rod"))
    read = read_run(run.folder)
    history = read.arms["rod"].history
    assert history is not None
    history.candidates_TO[0] = [1, 1, 2, 2, 2, 0]
    check = {row["id"]: row for row in judge(read, results_of(read))}["first_step_share"]
    assert "2 adaptation block(s) too few" in check["note"]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_small_subset_of_arms_is_judged_or_says_why_not(
    fake: FakeRun, tmp_path: Path, size: int
) -> None:
    names = ["base", "no_replay", "fixed_10", "fixed_32", "merge_0.6", "rod", "max_replay"]
    for i, subset in enumerate(combinations(names, size)):
        folder = tmp_path / str(i)
        (folder / "arms").mkdir(parents=True)
        (folder / "blocks").symlink_to(fake.folder / "blocks")
        for arm in subset:
            (folder / "arms" / arm).symlink_to(fake.folder / "arms" / arm)
        read = read_run(folder)
        results: dict[str, Any] = results_of(read)
        results |= {"checks": judge(read, results), "replicates": [], "checks_across_seeds": []}
        json.dumps(results, allow_nan=False)
        for row in results["checks"]:
            assert (row["verdict"] == "not judged") == (row["measured"] is None)
            assert row["measured"] is not None or row["note"]
        assert summarise(results).endswith(".")
        assert format_checks(results).count("not judged") >= 1
        arms_table(results).to_markdown()


# ---------------------------------------------------------------- files


def test_results_json_is_what_is_returned(fake: FakeRun, results: dict[str, Any]) -> None:
    report = fake.folder / "report"
    assert json.loads((report / "results.json").read_text()) == results
    assert sorted(file.name for file in (report / "figures").iterdir()) == sorted(
        f"{name}.{kind}"
        for name in (
            "frontier", "replay_share", "scores", "forgetting_profile", "sampling_ratio",
        )
        for kind in ("svg", "png")
    )  # fmt: skip
    assert not list(report.glob(".*"))


def test_tables_hold_unrounded_numbers(fake: FakeRun, results: dict[str, Any]) -> None:
    tables = fake.folder / "report" / "tables"
    with (tables / "arms.csv").open() as file:
        rows = {row["arm"]: row for row in csv.DictReader(file)}
    for name, arm in results["arms"].items():
        assert float(rows[name]["adapt_loss"]) == arm["adapt_loss"]
        assert float(rows[name]["val_forgetting"]) == arm["val_forgetting"]
    assert float(rows["rod"]["at_equal_tokens"]) == results["comparisons"]["rod"]["gap"]
    assert rows["rod"]["at_equal_compute"] == "other budget"
    assert rows["fixed_10"]["at_equal_tokens"] == "on the chord"
    assert float(rows["rod_compute_matched"]["at_equal_compute"]) > 0
    markdown = (tables / "arms.md").read_text().splitlines()
    assert len(markdown) == 2 + len(results["arms"])
    assert len({line.count("|") for line in markdown}) == 1
    with (tables / "sources.csv").open() as file:
        sources = list(csv.DictReader(file))
    assert [row["source"] for row in sources] == ["math", "wiki", "web", "code"]
    assert [int(row["blocks"]) for row in sources] == [20, 15, 40, 5]


def test_costs_in_plain_steps(results: dict[str, Any]) -> None:
    # 23 steps score 8 blocks each at a third of an update of 4; 120 blocks have reference losses.
    costs = results["costs"]["rod"]
    assert costs["scoring"] == pytest.approx(23 * 2 / 3)
    assert costs["specialist"] == 23 and costs["reference_losses"] == pytest.approx(120 / 4 / 3)


class PageReader(HTMLParser):
    """Collects tags left open, ids and everything that could cause a request."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.uses: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.handle_startendtag(tag, attrs)
        if tag not in ("meta", "br", "img", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if key == "id":
                self.ids.append(value or "")
            if key in ("src", "href", "xlink:href", "data", "action"):
                self.uses.append(value or "")
            if key == "aria-labelledby":
                self.uses.append(f"#{value}")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_one_well_formed_file_that_requests_nothing(
    fake: FakeRun, results: dict[str, Any]
) -> None:
    page = (fake.folder / "report" / "index.html").read_text()
    reader = PageReader()
    reader.feed(page)
    assert not reader.open
    assert len(set(reader.ids)) == len(reader.ids)
    assert not reader.tags & {"script", "link", "img", "iframe", "object"}
    assert reader.uses.count("curriculum.html") == 1  # a file beside it
    within = [use for use in reader.uses if use != "curriculum.html"]
    assert all(use.startswith("#") and use[1:] in reader.ids for use in within)
    assert "@import" not in page and not re.search(r"url\((?!#)", page)
    assert page.count("<svg") == 5
    assert set(re.findall(r"url\(#([^)]*)\)", page)) <= set(reader.ids)
    for arm in ("no replay", "fixed 32 %", "merge 0.6", "RoD compute matched"):
        assert arm in page
    assert "At equal compute it loses to fixed replay" in page
    assert str(fake.folder) not in page


def test_inline_figures_follow_the_theme(results: dict[str, Any]) -> None:
    figure = frontier(results)
    assert figure is not None
    svg = inline_svg(figure, "x")
    colours = set(re.findall(r"#[0-9a-f]{6}\b", svg))
    assert colours <= {"#000000", "#ffffff"}, colours
    assert "var(--rod)" in svg and "<style" not in svg


def test_labels_in_figures_do_not_overlap(results: dict[str, Any]) -> None:
    for draw, shown in (
        (frontier, results), (forgetting_profile, [results]), (sampling_ratio, [results]),
    ):  # fmt: skip
        figure = draw(shown)  # type: ignore[operator]
        assert figure is not None
        for axes in figure.axes:
            texts = [text for text in axes.texts if text.get_text() and not text.get_rotation()]
            boxes = [text.get_window_extent() for text in texts]
            for (a, box_a), (b, box_b) in combinations(zip(texts, boxes, strict=True), 2):
                assert not box_a.overlaps(box_b), (draw.__name__, a.get_text(), b.get_text())
            for box in boxes:
                assert box.x0 >= 0 and box.x1 <= figure.bbox.x1


def test_what_two_panels_show_is_named_in_one(results: dict[str, Any]) -> None:
    figure = frontier(results)
    assert figure is not None
    arms = {parse_arm(name).label for name in results["arms"]}
    wide, near = ({text.get_text() for text in axes.texts} & arms for axes in figure.axes[:2])
    assert wide & near == {"no replay", "RoD"}
    assert arms - {"base"} == wide | near


def test_labels_keep_off_lines_where_there_is_room() -> None:
    figure = new_figure(4)
    axes = figure.add_axes((0.1, 0.1, 0.8, 0.8))
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    line = [(0.5 + i / 1000, 0.5) for i in range(300)]  # to the right of the point, as labels are
    place_labels(axes, [Label(0.5, 0.5, "an arm", "black")], avoid=line, size=9)
    (text,) = axes.texts
    hidden = [text.get_window_extent().contains(*axes.transData.transform(p)) for p in line]
    assert not any(hidden)


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "rod_m4": ("rod", {"multiplier": 4.0, "scored_tokens": STEPS * 4 * K * S}),
    "rod_kappa_2": ("rod", {"kappa": 2.0}),
    "random_rho": ("rod", {"share": 0.3, "adaptation": "random", "replay": "rho"}),
    "control_share": ("rod", {"follow": "rod", "follow_by": "role"}),
    "rod_beyond": ("rod", {"budget": 1.2, "steps": 28}),
    "fixed_32_converged": ("fixed_32", {"budget": 2.0, "steps": 46}),
    "rod_transfer": ("rod", {"curriculum": "runs/small", "references": []}),
}


def add_variants(run: FakeRun, variants: dict[str, tuple[str, dict[str, Any]]] = VARIANTS) -> None:
    """Variants of arms, as copies whose `arm.json` says what sets them apart."""
    plain = {
        "budget": 1.0, "multiplier": 1.0, "kappa": None, "share": None, "adaptation": None,
        "replay": None, "follow": None, "follow_by": None, "curriculum": None, "references": [],
    }  # fmt: skip
    arms = run.folder / "arms"
    for name in ("rod", "fixed_10", "fixed_32"):
        rod = {"multiplier": 2.0, "kappa": 1.0, "references": ["specialist"]}
        design = {**plain, **(rod if name == "rod" else {}), "of": name}
        file = arms / name / "arm.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | design))
    for name, (of, change) in variants.items():
        shutil.copytree(arms / of, arms / name)
        file = arms / name / "arm.json"
        facts = json.loads(file.read_text()) | change | {"arm": name}
        file.write_text(json.dumps(facts))
        if "steps" in change:
            write_steps(arms / name, facts, of)


def write_steps(folder: Path, facts: dict[str, Any], of: str) -> None:
    """As many steps in an arm's files as its `arm.json` tells of."""
    (folder / "curriculum.rod").unlink()
    width = 2 * K if of == "rod" else K
    write_curriculum(folder / "curriculum.rod", of, facts["steps"], width, facts["seed"])
    lines = (folder / "metrics.jsonl").read_text().splitlines()[:STEPS]
    (folder / "metrics.jsonl").write_text("\n".join((2 * lines)[: facts["steps"]]) + "\n")


# One seed of these has no averages, and both have a longer RoD, which is no cheaper.
CHEAPER: dict[str, tuple[str, dict[str, Any]]] = {
    "rod_quarter": (
        "rod", {"scored_eighths": 2, "scored_tokens": STEPS * K * S // 2, "compute": STEPS * 7 / 6},
    ),
    "rod_averages": ("rod", {"scored_eighths": 8, "scored_tokens": 0, "compute": STEPS}),
    "rod_shorter": (
        "rod",
        {
            "budget": 0.6, "steps": 14, "trained_tokens": 14 * K * S, "compute": 14 * 5 / 3,
            "scored_tokens": 14 * 2 * K * S,
        },
    ),
    "rod_m4": VARIANTS["rod_m4"],
    "rod_beyond": VARIANTS["rod_beyond"],
    "control_share": ("rod", {"follow": "rod", "follow_by": "role", "scored_tokens": 0}),
}  # fmt: skip


def test_cheaper_scoring_against_the_gain_of_rod(tmp_path: Path) -> None:
    chord = ("base", "no_replay", "fixed_10", "fixed_32", "fixed_50")
    runs = []
    for seed, shift, lost in ((7, 0.0, 0.01), (8, 0.02, 0.03)):
        run = write_run(tmp_path / f"run_{seed}", arms=(*chord, "rod"), seed=seed, shift=shift)
        add_variants(run, CHEAPER if seed == 7 else {"rod_quarter": CHEAPER["rod_quarter"]})
        file = run.folder / "arms" / "rod_quarter" / "evaluation.json"
        evaluation = json.loads(file.read_text())
        losses = evaluation["loss"]["adaptation"]
        evaluation["loss"]["adaptation"] = {name: loss + lost for name, loss in losses.items()}
        file.write_text(json.dumps(evaluation))
        runs.append(results_of(read_run(run.folder)) | {"replicates": []})
    whole = [run["comparisons"]["rod"]["gap"] for run in runs]
    assert whole[0] < -0.05 and whole[1] == pytest.approx(whole[0] + 0.02)

    one = {row["arm"]: row for row in cheaper_table(runs[0]).rows}
    assert list(one) == ["rod", "rod_averages", "rod_quarter", "rod_shorter"]
    assert [row["scored"] for row in one.values()] == [1.0, 0.0, 0.25, 1.0]
    assert one["rod_quarter"]["gap"] == pytest.approx(whole[0] + 0.01)
    assert one["rod_quarter"]["kept"] == pytest.approx((whole[0] + 0.01) / whole[0])
    assert one["rod_averages"]["kept"] == one["rod"]["kept"] == 1  # a copy of RoD
    assert one["rod_shorter"]["kept"] is None  # of a run that was trained on less
    assert one["rod_quarter"]["compute"] == STEPS * 7 / 6
    # of the steps 0, 10 and 20, by what RoD wrote down
    assert one["rod_quarter"]["overlap"] == pytest.approx(0.6)
    assert one["rod_quarter"]["share_drift"] == 0 and one["rod_averages"]["overlap"] is None
    assert one["rod_quarter"]["rank_correlation"] is None

    both = cheaper_table(runs[0] | {"replicates": runs[1:]})
    rows = {row["arm"]: row for row in both.rows}
    kept = [(gap + lost) / gap for gap, lost in zip(whole, (0.01, 0.03), strict=True)]
    assert rows["rod_quarter"]["kept"] == pytest.approx(sum(kept) / 2)
    assert rows["rod_quarter"]["kept_range"] == pytest.approx(abs(kept[0] - kept[1]))
    assert rows["rod_quarter"]["gap"] == pytest.approx(sum(whole) / 2 + 0.02)
    assert rows["rod_averages"]["gap"] == one["rod_averages"]["gap"]
    assert rows["rod_averages"]["gap_range"] is None
    assert both.to_markdown().count("\n") == 2 + len(rows)


def test_a_run_without_cheaper_scoring_has_no_table_of_it(results: dict[str, Any]) -> None:
    assert not cheaper_table(results).rows


@pytest.mark.timeout(600)  # it draws every figure twice
def test_everything_at_once(tmp_path: Path) -> None:
    few = ("base", "no_replay", "fixed_10", "fixed_32", "rod")
    run = write_run(tmp_path / "german_qwen3_5_4b", arms=few)
    add_variants(run, VARIANTS | {"rod_quarter": CHEAPER["rod_quarter"]})
    write_tasks(run)
    second = write_run(tmp_path / "seed_8", arms=few, seed=8, shift=0.01)
    other = write_run(tmp_path / "other", arms=few, seed=9)
    before = sorted(other.folder.rglob("*"))
    results = build_report(run.folder, replicates=[second.folder], settings=[other.folder])
    assert sorted(other.folder.rglob("*")) == before
    report = run.folder / "report"
    drawn = set(FIGURES) - {"under_way"}  # these arms have no training loss
    assert {file.stem for file in (report / "figures").iterdir()} == drawn
    assert (report / "index.html").read_text().count("<svg") == len(drawn)
    assert [setting["recipe"] for setting in results["settings"]] == ["other"]
    assert "<h2>Cheaper scoring</h2>" in (report / "index.html").read_text()
    arms, read = results["arms"], {}
    names = ("paper", "budgets", "transfer", "base_loss", "capabilities", "seeds", "cheaper")
    for name in names:
        with (report / "tables" / f"{name}.csv").open() as file:
            rows = list(csv.DictReader(file))
        read[name] = {next(iter(row.values())): row for row in rows}
    rod = read["paper"]["rod"]
    assert float(rod["adapt_loss"]) == arms["rod"]["adapt_loss"]
    assert float(rod["paper_adapt_loss"]) == 1.859 and float(rod["paper_task_forgetting"]) == 0.107
    assert read["paper"]["fixed_65"]["adapt_loss"] == ""  # the paper's alone
    assert list(read["budgets"]) == ["fixed_32", "fixed_32_converged", "rod", "rod_beyond"]
    assert float(read["budgets"]["rod_beyond"]["budget"]) == 1.2
    assert read["transfer"]["rod_transfer"]["curriculum"] == "runs/small"
    assert float(read["capabilities"]["math"]["rod"]) == -0.25
    assert list(read["cheaper"]) == ["rod", "rod_quarter"]
    assert float(read["cheaper"]["rod_quarter"]["gap"]) == results["comparisons"]["rod"]["gap"]
    overall = sum(BASE[o] * n for o, n in COUNTS["replay"].items()) / 80
    assert float(read["base_loss"]["overall"]["loss"]) == pytest.approx(overall)
    assert float(read["base_loss"]["overall"]["paper_loss"]) == 1.08
    pair = [r["arms"]["rod"]["adapt_loss"] for r in (results, results["replicates"][0])]
    assert float(read["seeds"]["rod"]["adapt_loss_mean"]) == pytest.approx(sum(pair) / 2)
    assert float(read["seeds"]["rod"]["adapt_loss_range"]) == pytest.approx(max(pair) - min(pair))


def test_a_report_on_few_arms_leaves_out_what_it_cannot_show(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", arms=("base", "rod"))
    results = build_report(run.folder)
    figures = {file.stem for file in (run.folder / "report" / "figures").iterdir()}
    assert figures == {"frontier", "replay_share", "scores"}
    assert results["reference_arm"] is None and results["chord"] == []
    # A second report, now of the base alone, leaves nothing of the first behind.
    (run.folder / "arms" / "rod" / "evaluation.json").unlink()
    results = build_report(run.folder)
    assert list((run.folder / "report" / "figures").iterdir()) == []
    assert results["notes"][0] == "Arm rod has not been evaluated and is left out."
    assert "not run" in summarise(results)


# ---------------------------------------------------------------- several seeds


def test_replicates_are_judged_each_and_together(tmp_path: Path) -> None:
    few = ("base", "fixed_10", "fixed_32", "fixed_50", "rod")
    runs = [
        write_run(tmp_path / f"run_{seed}", arms=few, seed=seed, shift=shift)
        for seed, shift in ((1, 0.0), (2, 0.004), (3, 0.2))
    ]
    before = [sorted(file for file in run.folder.rglob("*")) for run in runs[1:]]
    results = build_report(runs[0].folder, replicates=[run.folder for run in runs[1:]])
    assert [sorted(file for file in run.folder.rglob("*")) for run in runs[1:]] == before
    gaps = [measured(r, "chord_gap")["measured"] for r in (results, *results["replicates"])]
    assert gaps[1] - gaps[0] == pytest.approx(0.004) and gaps[2] - gaps[0] == pytest.approx(0.2)
    (mean,) = results["checks_across_seeds"]
    assert mean["measured"] == pytest.approx(sum(gaps) / 3)
    assert mean["verdict"] == ("holds" if sum(gaps) / 3 <= -0.015 else "fails")
    text = format_checks(results)
    assert "seed 1" in text and "seed 3" in text
    row = next(line for line in text.splitlines() if "equal forgetting (nats)" in line)
    assert f"{gaps[0]:.3f}" in row and f"{gaps[2]:.3f}" in row and row.endswith("fails")
    page = (runs[0].folder / "report" / "index.html").read_text()
    assert "seeds 1, 2, 3" in page and "F<sub>val</sub>, seed 2" in page


def test_a_replicate_may_share_blocks_and_base_and_may_be_unfinished(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", arms=("base", "fixed_10", "fixed_32", "rod"))
    other = write_run(run.folder / "seed=8", arms=("base", "fixed_10", "fixed_32", "rod"), seed=8)
    shutil.rmtree(other.folder / "blocks")
    shutil.rmtree(other.folder / "arms" / "base")
    (run.folder / "seed=9" / "arms" / "rod").mkdir(parents=True)
    results = build_report(run.folder, replicates=sorted(run.folder.glob("seed=*")))
    (replicate,) = results["replicates"]
    assert replicate["seed"] == 8
    assert measured(replicate, "chord_gap")["measured"] == pytest.approx(
        measured(results, "chord_gap")["measured"]
    )
    assert results["notes"] == ["Run seed=9 has no evaluated arm yet and is left out."]
    with pytest.raises(ValueError, match=r"no <arm>/evaluation.json"):
        build_report(run.folder, replicates=[tmp_path / "mistyped"])


def test_what_a_rebuild_moved_aside_is_no_arm(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", arms=("base", "fixed_32", "rod"))
    before = build_report(run.folder)
    (run.folder / "arms" / "rod.replaced-1").mkdir()
    assert read_run(run.folder).left_out == ()
    shutil.copytree(run.folder / "arms" / "rod", run.folder / "arms" / "rod.replaced-2")
    assert build_report(run.folder) == before
    for name in ("base", "fixed_32", "rod"):  # all that is evaluated is set aside
        shutil.rmtree(run.folder / "arms" / name)
    with pytest.raises(ValueError, match=r"no <arm>/evaluation.json"):
        read_run(run.folder)


def test_the_text_table_lines_up(results: dict[str, Any]) -> None:
    lines = format_checks(results).splitlines()
    rule = lines[1]
    for column in (match.start() for match in re.finditer(r"(?<= )-+", rule)):
        assert all(line[column - 1] == " " for line in lines[:14] if len(line) > column)
    assert len(results["checks"]) == 13


# ---------------------------------------------------------------- wrong input


def test_files_that_were_cut_make_no_report(tmp_path: Path) -> None:
    arm = write_run(tmp_path / "run", arms=("base", "rod")).folder / "arms" / "rod"
    curriculum, metrics = (arm / name for name in ("curriculum.rod", "metrics.jsonl"))
    for file, part in (
        (curriculum, curriculum.read_bytes()[:2000]),
        (metrics, b""),
        (metrics, metrics.read_bytes()[:-200]),
    ):
        whole = file.read_bytes()
        file.write_bytes(part)
        expected = rf"rod/{file.name} holds \d+ steps, but .*arm.json tells of 23: restore"
        with pytest.raises(ValueError, match=expected):
            read_run(arm.parent.parent)
        file.write_bytes(whole)
    for file in (curriculum, metrics):
        file.rename(arm / "elsewhere")
        with pytest.raises(ValueError, match=rf"rod/{file.name} is missing, and every trained arm"):
            read_run(arm.parent.parent)
        (arm / "elsewhere").rename(file)
    for facts, missing in (('{"arm": "rod"}', "kind"), ('{"kind": "trained"}', "steps")):
        (arm / "arm.json").write_text(facts)
        with pytest.raises(ValueError, match=rf"rod/arm\.json lacks the key '{missing}'"):
            read_run(arm.parent.parent)
        with pytest.raises(ValueError, match=rf"rod/arm\.json lacks the key '{missing}'"):
            Curriculum.open(curriculum, read_only=True)
    (arm / "arm.json").unlink()
    with pytest.raises(OSError, match=r"rod/arm\.json"):
        read_run(arm.parent.parent)


def test_wrong_files_are_named_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no <arm>/evaluation.json"):
        build_report(tmp_path)
    arms = write_run(tmp_path / "run", arms=("base", "rod")).folder / "arms"
    file = arms / "rod" / "evaluation.json"
    good = file.read_text()
    evaluation = json.loads(good)
    replay = evaluation["loss"]["replay"]
    damaged = {
        "not valid JSON": good[:-3],
        "lacks the key 'loss'": json.dumps({"arm": "rod"}),
        "loss nan for replay source 'web'": json.dumps(
            evaluation | {"loss": {**evaluation["loss"], "replay": replay | {"web": float("nan")}}}
        ),
        "source 'law'": json.dumps(
            evaluation | {"loss": {**evaluation["loss"], "replay": replay | {"law": 1.0}}}
        ),
    }
    for message, text in damaged.items():
        file.write_text(text)
        with pytest.raises(ValueError, match=message) as error:
            build_report(arms.parent)
        assert "rod/evaluation.json" in str(error.value) and "\n" not in str(error.value)


def test_a_page_says_which_arms_disagree_and_why(tmp_path: Path) -> None:
    arms = write_run(tmp_path / "run", arms=("base", "no_replay", "rod")).folder / "arms"
    for name, change in (("rod", {"math": None}), ("no_replay", {})):
        file = arms / name / "evaluation.json"
        evaluation = json.loads(file.read_text())
        replay = {k: v for k, v in evaluation["loss"]["replay"].items() if k not in change}
        evaluation["loss"]["replay"] = replay
        file.write_text(json.dumps(evaluation | {"inputs": {"blocks": f"of_{name}"}}))
    results = build_report(arms.parent)
    assert results is not None and list(results["arms"]) == ["base", "no_replay"]
    (sentence,) = results["disagreements"]
    assert "sources ['code', 'web', 'wiki'] but arm 'base'" in sentence
    page = (arms.parent / "report" / "index.html").read_text()
    assert "Arms disagree" in page and "rod is left out." in page
    # the base does not tell which blocks it was evaluated on; once it does, both others disagree
    base = arms / "base" / "evaluation.json"
    base.write_text(json.dumps(json.loads(base.read_text()) | {"inputs": {"blocks": "of_rod"}}))
    results = build_report(arms.parent)
    assert results is not None and list(results["arms"]) == ["base"]
    assert "is of blocks of_no_replay but that of arm 'base' of of_rod" in str(results)
    json.loads((arms.parent / "report" / "results.json").read_text())


def test_agreeing_arms_have_no_warning(fake: FakeRun, results: dict[str, Any]) -> None:
    assert results["disagreements"] == []
    page = (fake.folder / "report" / "index.html").read_text()
    assert "Arms disagree" not in page and "Under way" not in page
