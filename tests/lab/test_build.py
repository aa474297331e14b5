"""The report on a small made-up run, with every number computed here a second time."""

import html
import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from nemo_rod import parts
from nemo_rod.lab.history import read_history
from nemo_rod.lab.report import build_report
from nemo_rod.lab.report import page as page_module
from nemo_rod.lab.report.build_report import judged_results
from nemo_rod.lab.report.figures import over_steps, pictures_of, plane, sources
from nemo_rod.lab.report.figures.drawing import FONT_SIZE, log_axis, number, shortened
from nemo_rod.lab.report.figures.labels import SIZES, label_layers
from nemo_rod.lab.report.figures.picture import Picture, refuse_undrawn
from nemo_rod.lab.report.figures.plane import Plane, draw_plane, points_of
from nemo_rod.lab.report.page import summarise
from nemo_rod.lab.report.results import profiles_of, results_of
from nemo_rod.lab.report.run_files import read_run
from nemo_rod.lab.report.style import COLOURS, light
from nemo_rod.lab.report.table import (
    TABLES,
    Table,
    arms_table,
    decimals,
    magnitude,
    seeds_table,
    sources_table,
    with_sign,
)
from nemo_rod.lab.report.under_way import parts_of
from nemo_rod.lab.report.verdict import search
from nemo_rod.selection import Choice, Curriculum, CurriculumHeader, Pool, SourceRow
from nemo_rod.selection.arm_names import parse_arm

K, S, STEPS = 4, 8, 23
FIGURES = parts.names("figures")
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
    "rod_compute_matched": ((1.97, 2.15), (0.12, 0.18, 0.13, 0.15)),
    "rod_mix": ((1.89, 2.03), (0.11, 0.16, 0.12, 0.14)),
}


@dataclass
class FakeRun:
    """A run folder and, per trained arm, its steps as (candidate sources, chosen positions)."""

    folder: Path
    steps: dict[str, list[tuple[list[str], list[int]]]] = field(default_factory=dict)

    def file(self, arm: str, name: str = "evaluation.json") -> Path:
        return self.folder / "arms" / arm / name


def edit(file: Path, **changes: Any) -> dict[str, Any]:
    """Changes the keys of a JSON file, or writes a new one; returns its content."""
    file.parent.mkdir(parents=True, exist_ok=True)
    content = (json.loads(file.read_text()) if file.exists() else {}) | changes
    file.write_text(json.dumps(content))
    return content


def write_run(
    folder: Path, *, arms: Iterable[str] = ("base", *LOSSES), seed: int = 7, shift: float = 0.0
) -> FakeRun:
    """Writes the files of a run; `shift` is added to RoD's adaptation losses."""
    for role, counts in COUNTS.items():
        for source, count in counts.items():
            edit(folder / "blocks" / role / source / "manifest.json", count=count)
            edit(folder / "blocks" / role / source / "holdout" / "manifest.json", count=2)
    fake = FakeRun(folder)
    for arm in arms:
        adaptation, forgotten = LOSSES.get(arm, (tuple(BASE_ADAPTATION.values()), (0.0,) * 4))
        moved = np.add(adaptation, shift if arm == "rod" else 0.0).tolist()
        loss = {
            "adaptation": dict(zip(BASE_ADAPTATION, moved, strict=True)),
            "replay": dict(zip(BASE, np.add([*BASE.values()], forgotten).tolist(), strict=True)),
        }
        edit(fake.file(arm), arm=arm, seed=seed, loss=loss)
        if arm != "base":
            write_arm(fake, arm, seed)
    return fake


def write_arm(fake: FakeRun, arm: str, seed: int) -> None:
    is_rod, is_merge = arm.startswith("rod"), arm.startswith("merge")
    scores = is_rod and arm != "rod_mix"
    steps = {"rod_compute_matched": 14, "max_replay": 2 * STEPS}.get(arm, STEPS)
    width = 2 * K if is_rod else K
    facts: dict[str, Any] = {
        "arm": arm, "kind": "trained", "seed": seed, "steps": steps, "batch_size": K,
        "block_size": S, "trained_tokens": steps * K * S,
        "scored_tokens": steps * width * S if scores else 0,
        "compute": steps * (1 + 2 / 3) if scores else float(steps), "wall_seconds": 0.5 * steps,
    }  # fmt: skip
    facts |= {
        "balance": "expected" if is_rod else "corpus", "multiplier": width / K, "retention": 1.0,
        **{f"num_{role}": sum(counts.values()) for role, counts in COUNTS.items()},
    }  # fmt: skip
    if is_merge:
        facts |= {"kind": "merged", "of": "no_replay", "trained_tokens": 0, "compute": 0.0}
    edit(fake.file(arm, "arm.json"), **facts)
    if is_merge:
        return
    seconds = 1.7 if is_rod else 1.0
    rows = [json.dumps({"step": t, "timing/train/total": seconds}) for t in range(steps)]
    fake.file(arm, "metrics.jsonl").write_text("\n".join([*rows, '{"step": 99, "timing']))  # torn
    curriculum = fake.file(arm, "curriculum.rod")
    fake.steps[arm] = write_curriculum(curriculum, arm, steps, width, seed)


def write_stops(fake: FakeRun, arm: str) -> None:
    """Adds validations on the straight way from the base to an arm's end, in thirds."""
    end = json.loads(fake.file(arm).read_text())["loss"]
    begin = {"adaptation": BASE_ADAPTATION, "replay": BASE}

    def at(part: float) -> dict[str, float]:
        return {
            f"validation/{role}/{source}/loss": loss + part * (end[role][source] - loss)
            for role, by_source in begin.items()
            for source, loss in by_source.items()
        }

    edit(fake.file(arm, "validation_start.json"), **at(0.0))
    rows: list[dict[str, Any]] = [{"step": t, "timing/train/total": 1.0} for t in range(STEPS)]
    for third in (1, 2, 3):
        rows[third * STEPS // 3 - 1] |= at(third / 3)
    fake.file(arm, "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def create(
    path: Path, sources: Iterable[SourceRow], width: int, num_chosen: int,
    *, scored: bool = True, seed: int = 0,
) -> Curriculum:  # fmt: skip
    """Creates an empty curriculum."""
    header = CurriculumHeader(
        num_candidates=width, num_chosen=num_chosen, block_size=S, store="s", tokenizer="t",
        references="r" if scored else "", config="c", seed=seed, sources=tuple(sources),
        scored=scored,
    )  # fmt: skip
    return Curriculum.create(path, header)


def write_curriculum(
    path: Path, arm: str, num_steps: int, width: int, seed: int
) -> list[tuple[list[str], list[int]]]:
    """Random pools; RoD chooses at random too, only from adaptation in the first step."""
    rng = np.random.default_rng(seed)
    rows: dict[str, SourceRow] = {}
    for role, counts in COUNTS.items():
        for name, count in counts.items():
            rows[name] = SourceRow(name, role, sum(row.count for row in rows.values()), count)
    is_rod, steps = arm.startswith("rod"), []
    with create(path, rows.values(), width, K, scored=is_rod, seed=seed) as curriculum:
        for step in range(num_steps):
            num_replay = 0 if arm == "no_replay" else width // 2
            names = [*rng.choice(list(BASE_ADAPTATION), width - num_replay).tolist()]
            names += rng.choice(REPLAY, num_replay, p=[0.4, 0.2, 0.2, 0.2]).tolist()
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
def pair(tmp_path_factory: pytest.TempPathFactory) -> FakeRun:
    return write_run(tmp_path_factory.mktemp("pair") / "run", arms=("base", "rod"))


@pytest.fixture(scope="module")
def results(fake: FakeRun) -> dict[str, Any]:
    return build_report(fake.folder)


def subset(fake: FakeRun, folder: Path, arms: Iterable[str]) -> Path:
    """Makes a run folder of links to the blocks and some arms of a run."""
    (folder / "arms").mkdir(parents=True)
    (folder / "blocks").symlink_to(fake.folder / "blocks")
    for arm in arms:
        (folder / "arms" / arm).symlink_to(fake.folder / "arms" / arm)
    return folder


def adapt_loss(arm: str) -> float:
    news, wiki = LOSSES[arm][0]
    return (30 * news + 10 * wiki) / 40


def f_val(arm: str) -> float:
    forgotten = np.maximum(LOSSES[arm][1], 0)
    return float(forgotten @ [5, 20, 40, 15]) / 80


def rows_by(table: Table) -> dict[str, Mapping[str, Any]]:
    """Returns a table's rows by their first cell."""
    return {row[table.columns[0].key]: row for row in table.rows}


def test_losses_and_forgetting(fake: FakeRun, results: dict[str, Any]) -> None:
    assert list(results["arms"]) == ["base", *LOSSES]
    for arm in results["arms"].values():
        assert arm["seed"] == 7
    for name, (losses, forgotten) in LOSSES.items():
        arm = results["arms"][name]
        assert arm["adapt_loss"] == pytest.approx(adapt_loss(name), rel=1e-12)
        assert arm["val_forgetting"] == pytest.approx(f_val(name), rel=1e-12)
        by_source = dict(zip(BASE, forgotten, strict=True))
        assert arm["forgetting_by_source"] == pytest.approx(by_source, rel=1e-9)
        assert arm["mean_adapt_loss"] == pytest.approx(np.mean(losses), rel=1e-9)
        assert arm["mean_forgetting"] == pytest.approx(np.maximum(forgotten, 0).mean(), rel=1e-9)
        assert arm["task_forgetting"] is None
    base = results["arms"]["base"]
    assert base["val_forgetting"] == 0 and base["compute"] == 0 and base["replay_share"] is None


def test_shares_and_sampling_ratio_by_counting(fake: FakeRun, results: dict[str, Any]) -> None:
    for name, steps in fake.steps.items():
        arm = results["arms"][name]
        shares = [sum(names[i] in REPLAY for i in chosen) / K for names, chosen in steps]
        assert arm["replay_share"] == pytest.approx(sum(shares) / len(shares), rel=1e-12)
        assert arm["replay_passes"] == pytest.approx(sum(shares) * K / 80, rel=1e-12)
        deciles = [part.mean() for part in np.array_split(shares, 10)]
        assert arm["share_by_decile"] == pytest.approx(deciles, rel=1e-12)
        offered = [n for names, _ in steps for n in names if n in REPLAY]
        trained = [names[i] for names, chosen in steps for i in chosen if names[i] in REPLAY]
        if not trained:
            assert arm["sampling_ratio_by_source"] is None
            continue
        for source in REPLAY:
            ratio = trained.count(source) / len(trained) / (offered.count(source) / len(offered))
            assert arm["sampling_ratio_by_source"][source] == pytest.approx(ratio, rel=1e-12)


ACCURACY = {
    "base": {"math": 0.5, "code": 0.25},
    "no_replay": {"math": 0.3125, "code": 0.125},
    "fixed_32": {"math": 0.4375, "code": 0.25},
    "rod": {"math": 0.25, "code": 0.75},
}


def write_tasks(run: FakeRun, arms: Iterable[str] = ACCURACY) -> None:
    """Writes results of two tasks in the format of the real evaluation."""
    leaf = {"version": 1, "few_shot": 0, "prompts": "0f"}
    for arm in arms:
        tasks = {n: {"accuracy": v, "leaves": {n: leaf}} for n, v in ACCURACY[arm].items()}
        edit(
            run.file(arm, "tasks.json"), configuration={"backend": "hf", "limit": None},
            capabilities=ACCURACY[arm], tasks=tasks,
        )  # fmt: skip


def test_task_forgetting_caps_every_capability(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", arms=("base", "no_replay", "rod"))
    write_tasks(run, ("base", "rod"))
    arms = results_of(read_run(run.folder))["arms"]
    assert arms["rod"]["task_forgetting"] == 0.125 and arms["base"]["task_forgetting"] == 0.0
    assert arms["rod"]["capability_change"] == {"math": -0.25, "code": 0.5}
    assert arms["no_replay"]["task_forgetting"] is arms["no_replay"]["capability_change"] is None


@pytest.mark.parametrize(
    ("file", "change", "base", "reason"),
    [
        ("tasks.json", {"configuration": {"backend": "hf", "limit": 5}}, {},
         "limit 5 but arm 'base' has None"),
        ("tasks.json",
         {"tasks": {"math": {"leaves": {"math": {"version": 1, "few_shot": 0, "prompts": "ff"}}}}},
         {}, "prompts of math ff but arm 'base' has 0f"),
        ("evaluation.json", {"loss": {"adaptation": {}, "replay": BASE}}, {},
         "adaptation sources [] but arm 'base' has ['news', 'wiki_de']"),
        ("evaluation.json", {"inputs": {"blocks": "1"}}, {"inputs": {"blocks": "2"}},
         "is of blocks 1 but that of arm 'base' of 2"),
    ],
)  # fmt: skip
def test_arms_that_cannot_be_compared_are_left_out_and_named(tmp_path, file, change, base, reason):
    run = write_run(tmp_path / "run", arms=("base", "no_replay", "rod"))
    write_tasks(run, ("base", "rod"))
    edit(run.file("rod", file), **change)
    edit(run.file("base"), **base)
    if not base:  # unknown blocks of the base do not disagree with any
        edit(run.file("no_replay"), inputs={"blocks": "3"})
    read = read_run(run.folder)
    assert list(read.arms) == ["base", "no_replay"]
    (sentence,) = read.disagreements
    assert reason in sentence and f"arms/rod/{file}" in sentence


def chord(arm: str, low: str, high: str) -> float:
    """An arm's gain over the chord between two arms, written out."""
    f0, f1, a0, a1 = f_val(low), f_val(high), adapt_loss(low), adapt_loss(high)
    fraction = np.log(f_val(arm) / f0) / np.log(f1 / f0)
    return float(a0 + (a1 - a0) * fraction) - adapt_loss(arm)


def test_comparisons_against_numpy(results: dict[str, Any]) -> None:
    comparisons = results["comparisons"]
    for arm, low, high in (
        ("rod", "fixed_50", "fixed_32"), ("merge_0.6", "fixed_32", "fixed_10"),
        ("merge_0.8", "fixed_10", "no_replay"), ("rod_compute_matched", "fixed_50", "fixed_32"),
        ("rod_mix", "fixed_50", "fixed_32"),
    ):  # fmt: skip
        assert comparisons[arm]["gain"] == pytest.approx(chord(arm, low, high), rel=1e-9), arm
    assert results["profile"] == profiles_of(results["arms"], "fixed_32")
    # An arm that trains on all its candidates has the same ratio everywhere.
    assert results["profile"]["fixed_32"]["pearson_r"] is None


def test_what_is_extrapolated_is_not_shown(fake: FakeRun, tmp_path: Path) -> None:
    arms = ("base", "no_replay", "fixed_10", "fixed_32", "rod")
    results = judged_results(read_run(subset(fake, tmp_path / "run", arms)))
    comparison = results["comparisons"]["rod"]
    assert comparison["extrapolated"]
    assert comparison["gain"] == pytest.approx(chord("rod", "fixed_32", "fixed_10"), rel=1e-9)
    assert arms_table(results).rows[-1]["at_equal_tokens"] == "beyond the fixed arms"


def test_arms_of_another_budget_are_not_compared(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for arm, key, factor in (
        ("rod", "trained_tokens", 2),
        ("rod_compute_matched", "compute", 1.5),
        ("fixed_10", "trained_tokens", 3),
    ):
        file = run.file(arm, "arm.json")
        edit(file, **{key: json.loads(file.read_text())[key] * factor})
    results = judged_results(read_run(run.folder))
    assert results["chord"] == ["no_replay", "fixed_32", "fixed_50"]
    assert any("fixed_10" in note for note in results["notes"])
    assert not results["comparisons"]["rod"]["same_tokens"]
    assert not results["comparisons"]["rod_compute_matched"]["same_compute"]
    assert {row["at_equal_tokens"] for row in arms_table(results).rows[-3:-1]} == {"other budget"}


def test_budgets_and_costs_in_plain_steps(results: dict[str, Any]) -> None:
    # 14 steps of 5/3 are 23 1/3 plain steps, the nearest there is to 23.
    comparison = results["comparisons"]["rod_compute_matched"]
    assert comparison["same_compute"] and not comparison["same_tokens"]
    row = rows_by(arms_table(results))["rod_compute_matched"]
    assert row["runs"] == row["runs_in_all"] == pytest.approx(14 * 5 / 3 / 23)
    rod = results["comparisons"]["rod"]
    assert rod["same_tokens"] and not rod["same_compute"]
    assert rod["time_ratio"] == pytest.approx(1.7)


def test_a_specialist_that_was_not_evaluated_costs_what_it_cost(tmp_path: Path) -> None:
    """Only the reference of an arm, it is in no list of arms."""
    run = write_run(tmp_path / "run", arms=("base", "no_replay", "rod"))
    edit(run.file("rod", "arm.json"), references=["specialist", "base"])
    whole = results_of(read_run(run.folder))["arms"]["rod"]["compute_in_all"]
    run.file("no_replay").unlink()
    assert results_of(read_run(run.folder))["arms"]["rod"]["compute_in_all"] == whole > 0


@pytest.mark.parametrize(
    ("balance", "references", "blocks"),
    [
        ("expected", ["specialist"], 40 + 40),  # of 184 drawn: replay is a sample of that size
        ("expected", ["base"], 40),
        ("exact", ["specialist"], 40 + 80),
        ("exact", ["base"], 80),
    ],
)
def test_every_block_of_both_roles_has_its_reference_read_once(
    tmp_path: Path, balance: str, references: list[str], blocks: int
) -> None:
    run = write_run(tmp_path / "run", arms=("base", "no_replay", "rod"))
    edit(run.file("rod", "arm.json"), references=references, balance=balance)
    specialist = STEPS if references == ["specialist"] else 0
    in_all = results_of(read_run(run.folder))["arms"]["rod"]["compute_in_all"]
    assert in_all == pytest.approx(STEPS * 5 / 3 + specialist + blocks / 3 / K)


def test_the_fixed_arm_closest_to_a_third_replaces_fixed_32(fake: FakeRun, tmp_path: Path) -> None:
    arms = ("base", "fixed_10", "fixed_50", "rod")
    results = judged_results(read_run(subset(fake, tmp_path / "run", arms)))
    assert results["reference_arm"] == "fixed_50"


def test_unknown_forgetting_has_its_reason(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", arms=("base", "rod"))
    for arm in ("base", "rod"):  # replay is too small for held-out blocks
        loss = json.loads(run.file(arm).read_text())["loss"]
        edit(run.file(arm), loss=loss | {"replay": {}})
    for reason in ("missing for the replay sources code, math", "base model has not been eval"):
        results = judged_results(read_run(run.folder)) | {"replicates": []}
        assert "and an unknown forgetting F_val." in summarise(results)
        assert any(reason in note for note in results["notes"])
        shutil.rmtree(run.folder / "arms" / "base", ignore_errors=True)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_small_subset_of_arms_is_summarised(fake: FakeRun, tmp_path: Path, size: int) -> None:
    names = ["base", "no_replay", "fixed_10", "fixed_32", "merge_0.6", "rod", "max_replay"]
    for i, arms in enumerate(combinations(names, size)):
        results = judged_results(read_run(subset(fake, tmp_path / str(i), arms)))
        results |= {"replicates": []}
        json.dumps(results, allow_nan=False)
        assert summarise(results).endswith(".")
        arms_table(results).to_markdown()


def test_tables_hold_the_numbers_of_the_results(fake: FakeRun, results: dict[str, Any]) -> None:
    rows = rows_by(arms_table(results))
    for name, arm in results["arms"].items():
        assert {key: rows[name][key] for key in arm if key != "design"} == {
            key: value for key, value in arm.items() if key != "design"
        }
    assert rows["rod"]["at_equal_tokens"] == results["comparisons"]["rod"]["gain"]
    assert rows["rod"]["at_equal_compute"] == "other budget"
    assert rows["fixed_10"]["at_equal_tokens"] == "on the chord"
    assert rows["rod_compute_matched"]["at_equal_compute"] < 0
    # without cheaper scoring there is no column of it
    assert not {"scored", "kept"} & {column.key for column in arms_table(results).columns}
    markdown = (fake.folder / "report" / "tables" / "arms.md").read_text().splitlines()
    assert len(markdown) == 2 + len(results["arms"])
    assert len({line.count("|") for line in markdown}) == 1
    sources = rows_by(sources_table(results))
    assert [(name, row["blocks"]) for name, row in sources.items()] == [
        ("news", 30), ("wiki_de", 10), ("math", 20), ("wiki", 15), ("web", 40), ("code", 5),
    ]  # fmt: skip
    fixed, rod = (results["arms"][arm] for arm in ("fixed_10", "rod"))
    for name, row in sources.items():
        assert row["epochs_rod"] == rod["epochs_by_source"][row["role"]][name]
        assert row.get("forgetting_fixed_10") == fixed["forgetting_by_source"].get(name)
        assert row["sampling_ratio"] == rod["sampling_ratio_by_source"].get(name)


def test_numbers_for_readers() -> None:
    counts = {736: "736", 1472: "1.47 k", 999_999: "1 M", 123e9: "123 B", 1.5e12: "1.5 T"}
    assert {v: magnitude(v) for v in counts} == counts
    assert decimals(3)(-1e-4) == "0.000" and with_sign(3)(-1e-4) == "+0.000"  # no minus before zero
    assert decimals(3)(-1e-3) == with_sign(3)(-1e-3) == "\N{MINUS SIGN}0.001"


class PageReader(HTMLParser):
    """Collects tags left open, ids and everything that could cause a request."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.feed(page)
        self.ids = [value for key, value in self.attributes if key == "id"]
        requests = ("src", "href", "xlink:href", "data", "action")
        self.uses = [value for key, value in self.attributes if key in requests]
        self.uses += [f"#{value}" for key, value in self.attributes if key == "aria-labelledby"]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in ("meta", "br", "img", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(key, value or "") for key, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_one_well_formed_file_that_requests_nothing(fake, results):
    report = fake.folder / "report"
    page = (report / "index.html").read_text()
    reader = PageReader(page)
    assert not reader.open
    assert len(set(reader.ids)) == len(reader.ids)
    assert not {*reader.tags} & {"link", "img", "iframe", "object"}
    assert json.loads((report / "results.json").read_text()) == results
    beside = {use for use in reader.uses if not use.startswith("#")}
    files = {str(file.relative_to(report)) for file in report.rglob("*.*")}
    assert beside | {"index.html", "files.json"} == files
    shown = ("forgetting_profile", "frontier", "replay_share", "sampling_ratio", "scores")
    assert {file for file in files if file.startswith("figures")} == {
        f"figures/{name}.{kind}" for name in shown for kind in ("svg", "png", "vl.json")
    }
    assert {use[1:] for use in {*reader.uses} - beside} <= {*reader.ids}
    (specs,) = re.findall(r'id="pictures">(.*?)</script>', page, re.DOTALL)
    assert {each["id"] for each in json.loads(specs)} <= set(reader.ids)
    colours = {f'"{colour}"' for colour, _ in COLOURS.values()}
    assert not colours & {*re.findall(r'"#[0-9a-f]{6}"', specs)}  # they follow the theme
    assert '"var(--rod)"' in specs
    text = page[: page.index("<noscript>")]
    assert "@import" not in text and not re.search(r"url\((?!#)", text)
    for arm in ("no replay", "fixed 32 %", "merge 0.6", "RoD compute matched"):
        assert arm in page
    assert "At equal cost in all</strong>: not judged, no fixed share was trained for" in page
    assert str(fake.folder) not in page
    assert results["disagreements"] == []
    assert "Arms disagree" not in page and "Under way" not in page


def test_a_machine_without_the_converter_gets_a_page(fake, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    page_module._bundle.cache_clear()
    build_report(fake.folder, report_dir=tmp_path / "report")
    page = (tmp_path / "report" / "index.html").read_text()
    assert "vl-convert-python is not installed" in page and "<h2>All arms</h2>" in page
    assert {"".join(f.suffixes) for f in (tmp_path / "report" / "figures").iterdir()} == {
        ".vl.json"
    }
    page_module._bundle.cache_clear()


def rows_of(spec: Any) -> list[dict[str, Any]]:
    """All rows of data in a specification."""
    if isinstance(spec, list):
        return [row for each in spec for row in rows_of(each)]
    own = spec.get("data", {}).get("values", []) if isinstance(spec, dict) else []
    return own + [row for each in spec.values() for row in rows_of(each)] if own or isinstance(
        spec, dict
    ) else []  # fmt: skip


def texts_of(spec: Any) -> set[str]:
    return {row["text"] for row in rows_of(spec) if row.get("text")}


def test_labels_of_the_frontier_do_not_overlap_and_keep_off_lines(results: dict[str, Any]) -> None:
    picture = plane.frontier([(None, results)])  # type: ignore[list-item]
    assert picture is not None
    near, wide = picture.figure
    labels = {parse_arm(name).label for name in results["arms"]}
    assert texts_of(near) & texts_of(wide) & labels == {"no replay", "RoD"}
    assert labels - {"base"} == (texts_of(near) | texts_of(wide)) & labels
    x, y = (near["layer"][-1]["encoding"][axis]["scale"]["domain"] for axis in "xy")
    rows = {row["text"]: row for row in rows_of(near) if row.get("text")}
    points = [(row["adaptation loss"], np.log(row["forgetting"])) for row in rows.values()]
    assert_labels_are_apart([*rows.values()], np.array(points), np.array([x, np.log(y)]))
    x, y = (number(axis, scale={"domain": [0, 1]}) for axis in "xy")
    row: dict[str, Any] = {"x": 0.5, "y": 0.5, "text": "an arm"}
    # on the right, where labels are, and far outside
    label_layers([row], x, y, [[(0.5, 0.5), (0.9, 0.5), (0.5, -1e15)]])
    assert abs(row["dy"]) > FONT_SIZE / 2 or row["dx"] < 0


def test_of_many_sources_only_labels_are_seen_that_cover_nothing() -> None:
    points = np.random.default_rng(0).gamma(1.5, 0.1, (60, 2))
    x, y = (number(axis, scale={"domain": [0.0, 1.0]}) for axis in "xy")
    rows = [dict(zip("xy", map(float, at), strict=True)) | {"text": "a_source"} for at in points]
    label_layers(rows, x, y, most=True)
    ends = np.array([[0.0, 1.0]] * 2)
    assert {row[seen] for row in rows for seen in ("seen", "seen_narrow")} == {0.0, 1.0}
    assert_labels_are_apart(rows, points, ends, marks=points)


def assert_labels_are_apart(
    rows: list[Any], points: Any, ends: Any, marks: Any = ((9.0, 9.0),)
) -> None:
    """No label that is seen covers another, or the middle of a mark, on a desktop or a phone."""
    for suffix, size in zip(("", "_narrow"), SIZES, strict=True):

        def pixels(at: Any, size: Any = size) -> Any:
            share = (np.array(at) - ends[:, 0]) / (ends[:, 1] - ends[:, 0])
            return np.abs((0, 1) - share) * size

        boxes = []
        for row, at in zip(rows, points, strict=True):
            centre = pixels(at) + np.array([row[f"dx{suffix}"], row[f"dy{suffix}"]])
            half = np.array([0.25 * FONT_SIZE * len(row["text"]), 0.5 * FONT_SIZE])
            if row[f"seen{suffix}"]:
                boxes.append((row["text"], centre - half, centre + half))
        boxes += [("a mark", pixels(mark), pixels(mark)) for mark in marks]
        for (a, low_a, high_a), (b, low_b, high_b) in combinations(boxes, 2):
            assert (np.minimum(high_a, high_b) <= np.maximum(low_a, low_b)).any(), (a, b, suffix)


def test_figures_mark_annealing_and_passes_and_show_merges_in_a_view(tmp_path: Path) -> None:
    arms = ("base", "no_replay", "fixed_10", "merge_0.4", "merge_0.8", "rod")
    fake = write_run(tmp_path / "run", arms=arms)
    rates = [min(step / 4, 1.0) * 0.9 ** max(0, step - 16) for step in range(STEPS)]
    file = fake.file("rod", "metrics.jsonl")
    file.write_text("".join(f'{{"step": {t}, "train/lr": {lr}}}\n' for t, lr in enumerate(rates)))
    run = read_run(fake.folder)
    assert run.arms["rod"].facts["anneals_at"] == 17
    assert run.arms["fixed_10"].facts["anneals_at"] is None
    made = pictures_of([(run, judged_results(run) | {"replicates": []})])
    for view in (*made["scores"].figure, *made["replay_share"].figure):
        marks = {row["text"]: row for row in rows_of(view) if "colour" in row}
        assert {*marks} == {"1\N{MULTIPLICATION SIGN}", "annealing"}
        assert marks["annealing"]["training step"] == 17
    near, wide, *_ = made["frontier"].figure
    assert {"merge 0.4", "merge 0.8"} <= texts_of(wide) and "merge 0.4" not in texts_of(near)
    assert wide["title"]["text"] == "all arms"


def test_a_page_is_made_without_a_packages_figures_that_cannot_be_drawn(
    fake, tmp_path, monkeypatch
):
    nan = {"mark": "bar", "nan": math.nan}
    wrong = {
        "asks": (lambda shown: {}["x"], "KeyError: 'x'"),
        "leaves": (lambda shown: sys.exit(0), "SystemExit: 0"),
        "text": (lambda shown: "text", "AttributeError: 'str' object has no attribute 'order'"),
        "nan": (lambda shown: Picture(nan, "Mine"), "ValueError: Out of range"),
        "order": (lambda shown: Picture({}, "Mine", order=None), "TypeError: float() argument"),
        "gone": (None, "ValueError: 'gone' is registered as my:it, which cannot be imported (no)"),
    }

    def part(figure):
        loads = {"return_value": figure} if figure else {"side_effect": ImportError("no")}
        return SimpleNamespace(value="my:it", load=Mock(**loads))

    mine = {name: part(figure) for name, (figure, _) in wrong.items()}
    monkeypatch.setattr(parts, "other_parts", lambda kind: mine if kind == "figures" else {})
    results = build_report(fake.folder, report_dir=tmp_path / "report")
    page = html.unescape((tmp_path / "report" / "index.html").read_text())
    with pytest.raises(RuntimeError, match=r"^The report is made, but for ") as refused:
        refuse_undrawn(results)
    for name, (_, reason) in wrong.items():
        sentence = f"The registered figure {name!r} cannot be drawn ({reason}"
        assert sentence in page and f">Figure {name}</h" in page and sentence in str(refused.value)
        assert not list((tmp_path / "report" / "figures").glob(f"{name}*"))


def test_sources_of_the_paper_have_the_colours_of_their_categories(results: dict[str, Any]) -> None:
    text = json.dumps(results).replace('"code"', '"scientific_code"')
    renamed = json.loads(text.replace('"wiki"', '"wiki_rewrite"'))
    picture = sources.sampling_ratio([(None, renamed)])  # type: ignore[list-item]
    assert picture is not None
    scales = [
        layer["encoding"]["color"]["scale"]
        for layer in picture.figure[0]["layer"]
        if "scale" in layer["encoding"].get("color", {})
    ]
    assert dict(zip(*scales[0].values(), strict=True)) == {
        "code": light("source-3"), "replay source": light("rod"),
        "world knowledge": light("source-0"),
    }  # fmt: skip


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "rod_m4": ("rod", {"multiplier": 4.0, "scored_tokens": STEPS * 4 * K * S}),
    "rod_kappa_2": ("rod", {"kappa": 2.0}),
    "random_rho": ("rod", {"share": 0.3, "adaptation": "random", "replay": "rho"}),
    "control_share": ("rod", {"follow": "rod", "follow_by": "role"}),
    "rod_beyond": ("rod", {"budget": 1.2, "steps": 28}),
    "fixed_32_converged": ("fixed_32", {"budget": 2.0, "steps": 46}),
    "rod_transfer": ("rod", {"curriculum": "runs/small", "references": []}),
    "fixed_32_kl_base_1": ("fixed_32", {"train": {"terms": {"kl_base": 1.0}}}),
}


def add_variants(run: FakeRun, variants: dict[str, tuple[str, dict[str, Any]]] = VARIANTS) -> None:
    """Writes variants as copies of arms with other designs in `arm.json`."""
    plain = {
        "budget": 1.0, "multiplier": 1.0, "kappa": None, "share": None, "adaptation": None,
        "replay": None, "follow": None, "follow_by": None, "curriculum": None, "references": [],
        "policy_name": "joint", "train": {},
    }  # fmt: skip
    rod = {"multiplier": 2.0, "kappa": 1.0, "references": ["specialist"]}
    for name in ("rod", "fixed_10", "fixed_32"):
        edit(run.file(name, "arm.json"), **plain | (rod if name == "rod" else {}), of=name)
    for name, (of, change) in variants.items():
        shutil.copytree(run.folder / "arms" / of, run.folder / "arms" / name)
        facts = edit(run.file(name, "arm.json"), **change, arm=name)
        if "steps" in change:  # as many in the other files
            curriculum, metrics = (run.file(name, f) for f in ("curriculum.rod", "metrics.jsonl"))
            curriculum.unlink()
            width = 2 * K if of == "rod" else K
            write_curriculum(curriculum, of, facts["steps"], width, facts["seed"])
            lines = metrics.read_text().splitlines()[:STEPS]
            metrics.write_text("\n".join((2 * lines)[: facts["steps"]]) + "\n")


QUARTER = {"prefix": "1/4", "scored_tokens": STEPS * K * S // 2, "compute": STEPS * 7 / 6}
SHORTER = {
    "budget": 0.6, "steps": 14, "trained_tokens": 14 * K * S, "compute": 14 * 5 / 3,
    "scored_tokens": 14 * 2 * K * S,
}  # fmt: skip
# The last three are no cheaper.
CHEAPER: dict[str, tuple[str, dict[str, Any]]] = {
    "rod_quarter": ("rod", QUARTER),
    "rod_mix": ("rod", {"prefix": "1", "scored_tokens": 0, "compute": STEPS}),
    "rod_shorter": ("rod", SHORTER),
    "rod_m4": VARIANTS["rod_m4"],
    "rod_beyond": VARIANTS["rod_beyond"],
    "control_share": ("rod", {"follow": "rod", "follow_by": "role", "scored_tokens": 0}),
}


def test_cheaper_scoring_against_the_gain_of_rod(tmp_path: Path) -> None:
    chord = ("base", "no_replay", "fixed_10", "fixed_32", "fixed_50")
    runs = []
    for seed, shift, lost in ((7, 0.0, 0.01), (8, 0.02, 0.03)):
        run = write_run(tmp_path / f"run_{seed}", arms=(*chord, "rod"), seed=seed, shift=shift)
        add_variants(run, CHEAPER if seed == 7 else {"rod_quarter": CHEAPER["rod_quarter"]})
        loss = json.loads(run.file("rod_quarter").read_text())["loss"]
        more = {name: value + lost for name, value in loss["adaptation"].items()}
        edit(run.file("rod_quarter"), loss=loss | {"adaptation": more})
        runs.append(results_of(read_run(run.folder)) | {"replicates": []})
    whole = [run["comparisons"]["rod"]["gain"] for run in runs]
    assert whole[0] > 0.05 and whole[1] == pytest.approx(whole[0] - 0.02)

    one = {row["arm"]: row for row in arms_table(runs[0]).rows}
    scored = {name: row["scored"] for name, row in one.items() if row["scored"] is not None}
    less = {"rod_mix": 0.0, "rod_quarter": 0.25}
    assert scored == dict.fromkeys(("rod", "rod_shorter", "rod_m4", "rod_beyond"), 1.0) | less
    assert {name for name, row in one.items() if row["kept"] is not None} == {*less}
    assert one["rod_quarter"]["kept"] == pytest.approx((whole[0] - 0.01) / whole[0])
    assert one["rod_mix"]["kept"] == 1  # a copy of RoD
    assert one["rod_quarter"]["compute"] == STEPS * 7 / 6
    shown = {column.key for column in arms_table(runs[0]).columns if not column.is_detail}
    assert {"scored", "kept", "budget"} <= shown

    rows = {row["arm"]: row for row in seeds_table(runs[0] | {"replicates": runs[1:]}).rows}
    kept = [(gain - lost) / gain for gain, lost in zip(whole, (0.01, 0.03), strict=True)]
    assert rows["rod_quarter"]["kept_mean"] == pytest.approx(sum(kept) / 2)
    assert rows["rod_quarter"]["kept_range"] == pytest.approx(abs(kept[0] - kept[1]))
    assert rows["rod_quarter"]["gain_mean"] == pytest.approx(sum(whole) / 2 - 0.02)
    assert "kept_range" not in rows["rod_mix"]  # of one seed

    runs[0]["comparisons"]["rod"]["gain"] = None  # beyond the chord, as where it forgot nothing
    assert rows_by(arms_table(runs[0]))["rod_quarter"]["kept"] is None


@pytest.mark.usefixtures("no_pictures")
def test_everything_at_once(tmp_path: Path) -> None:
    few = ("base", "no_replay", "fixed_10", "fixed_32", "rod")
    run = write_run(tmp_path / "german_qwen3_5_4b", arms=few)
    add_variants(run, VARIANTS | {"rod_quarter": CHEAPER["rod_quarter"]})
    write_tasks(run)
    for arm in ("no_replay", "fixed_10", "rod"):
        write_stops(run, arm)
    second = write_run(tmp_path / "seed_8", arms=few, seed=8, shift=0.01)
    add_variants(second, {})
    other = write_run(tmp_path / "other", arms=few, seed=9)
    before = [sorted(shown.folder.rglob("*")) for shown in (second, other)]
    results = build_report(run.folder, replicates=[second.folder], settings=[other.folder])
    assert [sorted(shown.folder.rglob("*")) for shown in (second, other)] == before
    report = run.folder / "report"
    assert {file.name.partition(".")[0] for file in (report / "figures").iterdir()} == set(FIGURES)
    page = (report / "index.html").read_text()
    assert page.count("<figure>") >= len(FIGURES) and "Of its candidates scored" in page
    assert "seeds 7, 8" in page and "F<sub>val</sub>, seed 8" in page
    assert [setting["recipe"] for setting in results["settings"]] == ["other"]
    arms = results["arms"]
    read = {table.name: rows_by(table) for make in TABLES if (table := make(results)).rows}
    assert {f"{name}.md" for name in read} == {f.name for f in (report / "tables").iterdir()}
    rod = read["paper"]["rod"]
    assert rod["adapt_loss"] == arms["rod"]["adapt_loss"]
    assert rod["paper_adapt_loss"] == 1.859 and rod["paper_task_forgetting"] == 0.107
    assert "adapt_loss" not in read["paper"]["fixed_65"]  # the paper's alone
    assert {*plane.frontier_arms(arms)} == {*few[1:], "fixed_32_kl_base_1"}  # no ablation
    assert read["arms"]["rod_beyond"]["budget"] == 1.2
    assert read["arms"]["rod_transfer"]["curriculum"] == "runs/small"
    assert read["arms"]["rod"]["references"] == "specialist"
    assert read["capabilities"]["math"]["rod"] == -0.25
    # it forgets less than any fixed arm
    assert read["arms"]["rod"]["at_equal_tokens"] == "beyond the fixed arms"
    overall = sum(BASE[o] * n for o, n in COUNTS["replay"].items()) / 80
    assert read["base_loss"]["overall"]["loss"] == pytest.approx(overall)
    assert read["base_loss"]["overall"]["paper_loss"] == 1.08
    pair = [r["arms"]["rod"]["adapt_loss"] for r in (results, results["replicates"][0])]
    assert read["seeds"]["rod"]["adapt_loss_mean"] == pytest.approx(sum(pair) / 2)
    assert read["seeds"]["rod"]["adapt_loss_range"] == pytest.approx(max(pair) - min(pair))
    gains = {n: r["gain_0"] for n, r in read["seeds"].items() if r["gain_0"] is not None}
    assert gains == {
        name: each["gain"]
        for name, each in results["comparisons"].items()
        if each["gain"] is not None and not each["extrapolated"]
    }
    assert [stop["step"] for stop in results["early_stops"]["fixed_10"]] == [0, 7, 15, 23]
    for key in ("adapt_loss", "val_forgetting", "signed_forgetting"):
        stops = [stop[key] for stop in results["early_stops"]["fixed_10"]]
        assert stops[3] == pytest.approx(arms["fixed_10"][key])
        assert np.diff(stops) == pytest.approx([(stops[3] - stops[0]) / 3] * 3)
    assert results["verdict"]["early_stops"].keys() == {"no_replay", "fixed_10"}
    assert gains and read["seeds"]["rod"]["gain_1"] is None  # the second seed has none


@pytest.mark.usefixtures("no_pictures")
def test_a_report_on_few_arms_omits_what_it_cannot_show(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", arms=("base", "no_replay", "rod"))
    loss = json.loads(run.file("no_replay").read_text())["loss"]
    loss["replay"].pop("math")
    edit(run.file("no_replay"), loss=loss)
    report = run.folder / "report"
    results = build_report(run.folder)
    assert {file.name.partition(".")[0] for file in (report / "figures").iterdir()} == {
        "frontier", "replay_share", "scores",
    }  # fmt: skip
    assert results["reference_arm"] is None and results["chord"] == []
    assert list(results["arms"]) == ["base", "rod"]
    assert "replay sources ['code', 'web', 'wiki'] but arm 'base'" in results["disagreements"][0]
    page = (report / "index.html").read_text()
    assert "Arms disagree" in page and "no_replay is left out." in page
    # A second report, now of the base alone, removes all files of the first.
    for arm in ("no_replay", "rod"):
        run.file(arm).unlink()
    results = build_report(run.folder)
    assert list((report / "figures").iterdir()) == []
    assert results["notes"][1] == "Arm rod has not been evaluated and is left out."
    assert "not run" in summarise(results)


@pytest.mark.usefixtures("no_pictures")
def test_a_replicate_may_share_blocks_and_base_and_may_be_unfinished(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", arms=("base", "fixed_10", "fixed_32", "rod"))
    other = write_run(run.folder / "seed=8", arms=("base", "fixed_10", "fixed_32", "rod"), seed=8)
    shutil.rmtree(other.folder / "blocks")
    shutil.rmtree(other.folder / "arms" / "base")
    (run.folder / "seed=9" / "arms" / "rod").mkdir(parents=True)
    found = sorted(run.folder.glob("seed=*"))
    again = [run.folder / "arms" / ".." / "seed=8", run.folder]  # counted once
    results = build_report(run.folder, replicates=[*found, *again])
    (replicate,) = results["replicates"]
    assert replicate["seed"] == 8
    assert replicate["comparisons"]["rod"] == results["comparisons"]["rod"]
    assert results["notes"] == ["Run seed=9 has no evaluated arm yet and is left out."]
    with pytest.raises(ValueError, match=r"no <arm>/evaluation.json"):
        build_report(run.folder, replicates=[tmp_path / "mistyped"])


@pytest.mark.usefixtures("no_pictures")
def test_only_the_seed_tells_seeds_apart(tmp_path: Path) -> None:
    """A copy adds none, and an arm that was trained otherwise joins no mean."""
    arms = ("base", "fixed_10", "fixed_32", "rod")
    run = write_run(tmp_path / "run", arms=arms)
    copy = write_run(run.folder / "old_seed_7", arms=arms)
    others = [write_run(run.folder / f"seed_{n}", arms=arms, seed=n) for n in (8, 9, 10)]
    train = {"lr": 1e-3, "steps": STEPS, "micro_batch_size": 4}
    for each in (run, *others):
        edit(each.file("rod", "arm.json"), train=train)
        edit(
            each.file("fixed_10", "arm.json"),
            share=0.01 * each.folder.name.count("8"),
            share_of="rod",
        )
    edit(others[0].file("rod", "arm.json"), train=train | {"micro_batch_size": 2})
    edit(others[1].file("rod", "arm.json"), train=train | {"lr": 2e-3})
    for arm in arms:
        edit(others[2].file(arm), inputs={"blocks": "other"})
        edit(run.file(arm), inputs={"blocks": "these"})
    folders = [copy.folder, *(each.folder for each in others)]
    results = build_report(run.folder, replicates=folders)
    assert [{*each["arms"]} for each in results["replicates"]] == [{*arms}, {*arms} - {"rod"}]
    assert results["notes"][0] == (
        "Run old_seed_7 has the same seed, 7, as run: it adds no seed, and is left out."
    )
    (sentence,) = results["replicates"][1]["disagreements"]
    assert "seed_9/arms/rod/arm.json has lr=0.002 but that of the first run 0.001" in sentence
    assert ["seed_10/arms" in note for note in results["notes"][1:]] == [True] * len(arms)


@pytest.mark.usefixtures("no_pictures")
def test_an_arm_that_diverged_is_left_out_of_the_report(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", arms=("base", "no_replay", "rod"))
    whole = results_of(read_run(run.folder))["arms"]
    for arm, kept in (("no_replay", ["base", "rod"]), ("rod", ["base"]), ("base", None)):
        damage = with_loss("web", float("nan"))
        run.file(arm).write_bytes(damage(run.file(arm).read_bytes()))
        if kept is None:
            with pytest.raises(ValueError, match=r"base/evaluation.json has the loss nan .*; base"):
                read_run(run.folder)
            continue
        results = build_report(run.folder)
        assert [*results["arms"]] == kept and results["arms"]["base"] == whole["base"]
        reason = f"arms/{arm}/evaluation.json has the loss nan for replay source 'web': its model"
        assert reason in results["disagreements"][-1]
    assert search(results["arms"]).why == "RoD has no losses that can be compared"


def states(folder: Path) -> list[tuple[str, str]]:
    return [(part.name, part.state) for part in parts_of(folder)]


def test_a_folder_that_a_rebuild_moved_aside_is_no_arm(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", arms=("base", "fixed_32", "rod"))
    before = results_of(read_run(run.folder)), states(run.folder)
    (run.folder / "arms" / "rod.replaced-1").mkdir()
    (run.folder / "arms" / ".ipynb_checkpoints").mkdir()
    (run.folder / "arms" / ".DS_Store").write_text("")
    (run.folder / "arms" / "notes.txt").write_text("")
    shutil.copytree(run.folder / "arms" / "rod", run.folder / "arms" / "rod.replaced-2")
    assert (results_of(read_run(run.folder)), states(run.folder)) == before
    for name in ("base", "fixed_32", "rod"):  # only folders moved aside are evaluated
        shutil.rmtree(run.folder / "arms" / name)
    with pytest.raises(ValueError, match=r"no <arm>/evaluation.json"):
        read_run(run.folder)


def with_loss(source: str, value: float) -> Callable[[bytes], bytes]:
    """Returns a function that sets the loss of a replay source in an evaluation."""

    def damage(content: bytes) -> bytes:
        evaluation = json.loads(content)
        evaluation["loss"]["replay"][source] = value
        return json.dumps(evaluation).encode()

    return damage


TOO_FEW = r" holds \d+ steps, but .*arm\.json has steps=23: restore"


@pytest.mark.parametrize(
    ("name", "damage", "error"),
    [
        ("evaluation.json", lambda whole: whole[:-3], "not valid JSON"),
        ("evaluation.json", lambda whole: b'{"arm": "rod"}', "lacks the key 'loss'"),
        ("evaluation.json", with_loss("law", 1.0), "source 'law'"),
        ("curriculum.rod", lambda whole: whole[:2000], TOO_FEW),
        ("metrics.jsonl", lambda whole: b"", TOO_FEW),
        ("metrics.jsonl", lambda whole: whole[:-200], TOO_FEW),
        ("curriculum.rod", None, " is missing, expected one in every trained arm"),
        ("metrics.jsonl", None, " is missing, expected one in every trained arm"),
        ("arm.json", lambda whole: b'{"arm": "rod"}', "lacks the key 'kind'"),
        ("arm.json", lambda whole: b'{"kind": "trained"}', "lacks the key 'steps'"),
        ("arm.json", None, "No such file"),
    ],
)
def test_a_damaged_file_is_named_in_one_sentence(pair, name, damage, error):
    file = pair.file("rod", name)
    whole = file.read_bytes()
    file.unlink()
    if damage:
        file.write_bytes(damage(whole))
    kind = FileNotFoundError if error == "No such file" else ValueError
    with pytest.raises(kind, match=error) as raised:
        read_run(pair.folder)
    assert f"rod/{name}" in str(raised.value) and "\n" not in str(raised.value)
    if damage and name == "arm.json":
        with pytest.raises(ValueError, match=rf"rod/arm\.json {error}"):
            Curriculum.open(pair.file("rod", "curriculum.rod"), read_only=True)
    file.write_bytes(whole)


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("multiplier", ..., "lacks the key 'multiplier'"),
        ("multiplier", None, "has multiplier=None, which is no valid value"),
        ("steps", None, "has steps=None, which is no valid value"),
        ("num_replay", 10, "has {'num_replay': 10}, but the run's blocks and curriculum.rod have"),
    ],
)
def test_what_a_trained_arm_draws_is_known_and_that_of_its_run(tmp_path, key, value, error):
    run = write_run(tmp_path / "run", arms=("base", "rod"))
    facts = edit(file := run.file("rod", "arm.json"), **{key: value if value != ... else 0})
    file.write_text(json.dumps({k: v for k, v in facts.items() if (k, value) != (key, ...)}))
    with pytest.raises(ValueError, match=rf"rod/arm\.json {error}"):
        read_run(run.folder)


@pytest.mark.parametrize("steps", [1, 48])
def test_the_replay_share_of_a_short_run_is_drawn(pair, steps, tmp_path):
    """Also where no step of the curve is near the centre of a decile."""
    write_curriculum(tmp_path / "curriculum.rod", "fixed_32", steps, K, seed=0)
    run = read_run(pair.folder)
    history = read_history(tmp_path / "curriculum.rod")
    run.arms["rod"] = replace(run.arms["rod"], history=history)
    assert over_steps.replay_share([(run, judged_results(run))]) is not None


def test_sources_whose_names_begin_alike_have_bands_of_their_own(pair, tmp_path):
    names = [f"a_crawl_of_the_web_part_of_{number}" for number in range(3)]
    replay = [SourceRow(name, "replay", 10 * n, 10) for n, name in enumerate(names, 1)]
    file = tmp_path / "curriculum.rod"
    with create(file, [SourceRow("new", "adaptation", 0, 10), *replay], K, K) as curriculum:
        ids = np.array([10, 20, 21, 30])
        pool = Pool(0, ids, np.ones(K, bool))
        curriculum.append(Choice(pool, np.zeros(K, "f4"), np.zeros(K, "f4"), np.arange(K), 0.0))
    run = read_run(pair.folder)
    run.arms["rod"] = replace(run.arms["rod"], history=read_history(file))
    picture = over_steps.replay_share([(run, judged_results(run))])
    assert picture is not None
    shown = {row["source"]: row["share"] for row in rows_of(picture.figure) if "source" in row}
    assert [name.endswith(f"_{n}") for n, name in enumerate(sorted(shown))] == [True] * 3
    assert [shown[name] for name in sorted(shown)] == [25, 50, 25]
    assert shortened(["x" * 40, "x" * 40, "y"]) == [
        f"{'x' * 11}\N{HORIZONTAL ELLIPSIS}{'x' * 12}",
        f"{'x' * 11}\N{HORIZONTAL ELLIPSIS}{'x' * 12}\N{PRIME}",
        "y",
    ]


def test_an_arm_that_forgot_nothing_is_at_zero_of_a_broken_axis(results: dict[str, Any]) -> None:
    text = json.loads(json.dumps(results))
    text["arms"]["rod"]["val_forgetting"], text["intervals"] = 0.0, {}
    names = [*LOSSES, "base"]
    view = draw_plane(Plane(text, names))
    assert view is not None
    axis = view["layer"][-1]["encoding"]["y"]
    zero, *ticks = axis["axis"]["values"]
    rod = next(row for row in rows_of(view) if row.get("arm") == "RoD")
    assert rod["forgetting"] == zero < min(ticks) and rod["F_val"] == 0
    assert f"datum.value < {1.001 * zero!r} ? '0'" in axis["axis"]["labelExpr"]
    least = min(f_val(name) for name in LOSSES)
    assert zero < least / 1.15 < min(ticks) * 1.5
    assert "\N{ALMOST EQUAL TO}" in json.dumps(view, ensure_ascii=False)  # the break
    assert log_axis([0.1, 0.2], "")[1:] == (0.0, [])  # none without a zero
    for low, narrow in product((0.12, 0.75, 1.0, 9.5), (1.0001, 1.1, 1.9, 7.0)):
        ends = log_axis([low, low * narrow], "")[0]
        assert len(ends["axis"]["values"]) >= 2, ends
    none = {name: arm | {"val_forgetting": 0.0} for name, arm in text["arms"].items()}
    assert points_of(none, names, "val_forgetting") == {}
