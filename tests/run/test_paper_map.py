"""docs/paper-map.md: a row for every figure and table of the paper, naming what exists."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

import pytest
from command_line import composed
from places import ROOT

from nemo_rod.lab.report.figures import FIGURES
from nemo_rod.lab.report.paper import category_of, paper, paper_arms
from nemo_rod.selection.arms import arm_kind

LINES = (ROOT / "docs" / "paper-map.md").read_text().splitlines()
CELLS = [[cell.strip() for cell in line.strip("|").split("|")] for line in LINES if "|" in line]
ROWS = [cells for cells in CELLS if re.match(r"`(fig|tab|alg):", cells[0])]
TABLES = {
    "arms", "sources", "checks", "costs", "seeds", "paper", "budgets", "transfer", "base_loss",
    "capabilities", "cheaper",
}  # fmt: skip


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@cache
def known_arms(recipe: str) -> set[str]:
    config = composed(f"recipe={recipe}")
    return {*config.arms, *config.variants}


def test_every_item_of_the_paper_has_a_full_row() -> None:
    assert [quoted(row[0])[0] for row in ROWS] == paper()["items"]
    assert all(len(row) == 6 and all(row) for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: quoted(row[0])[0])
def test_a_row_names_what_exists(row: list[str]) -> None:
    recipes, arms, (command,), files = map(quoted, row[2:])
    assert recipes and arms and files
    for arm in arms:
        assert any(arm in known_arms(recipe) for recipe in recipes), arm
    program, _, *overrides = shlex.split(command)
    config = composed(*overrides)
    assert program == "nemo-rod" and config.recipe in recipes
    for folder in config.report.settings:
        assert Path(folder).name in recipes
    for name in config.arms:
        assert name in known_arms(config.recipe) or arm_kind(name)
    for file in files:
        check_file(file)


def check_file(file: str) -> None:
    kind, name = Path(file).parent.name, Path(file).stem
    if not file.startswith("report/"):
        assert (ROOT / file).is_file(), file
    else:
        assert name in {"figures": set(FIGURES), "tables": TABLES}[kind], file


def test_what_lies_beyond_the_paper_exists_too() -> None:
    beyond = [cells for cells in CELLS if len(cells) == 3 and "report/" in cells[2]]
    known = known_arms("toy_paper")
    for _, arms, files in beyond:
        assert {*quoted(arms)} <= known
        for file in quoted(files):
            check_file(file)
    shown = {Path(file).stem for cells in CELLS for cell in cells for file in quoted(cell)}
    single = {name for name in FIGURES if f"settings_{name}" not in FIGURES}
    assert {name for name in single if name not in shown} == set(), "a figure that no row names"


def test_the_papers_numbers_belong_to_our_recipes_and_sources() -> None:
    for label in ("tab:frontier_full", "tab:cross_scale", "tab:rod_convergence"):
        for recipe, arms in paper()[label].items():
            assert {*arms} <= known_arms(recipe) | {"rod"}, (label, recipe)
    replay = [
        name
        for name, source in composed("recipe=legal_qwen3_5_9b").domain.sources.items()
        if source["role"] == "replay"
    ]
    assert len(replay) == 14 and all(category_of(name) for name in replay)
    listed = [name for names in paper()["categories"].values() for name in names]
    assert sorted(listed) == sorted(replay)


def test_what_several_tables_of_the_paper_say_of_an_arm() -> None:
    # The frontier's table goes before that of transfers, which rounds otherwise in one place.
    assert paper_arms("german_qwen3_5_9b")["no_replay"]["val_forgetting"] == 0.420
    assert paper_arms("german_qwen3_5_9b")["rod_transfer"]["adapt_loss"] == 1.795
    assert paper_arms("german_nemotron_nano_12b_v2")["rod"]["budget"] == 1.0
    assert paper_arms("german_nemotron_nano_12b_v2")["rod_beyond"]["val_forgetting"] == 0.0734
    assert paper_arms("toy") == {}
