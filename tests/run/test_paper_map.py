"""The paper's figures and tables: what makes each exists."""

import re
from functools import cache
from pathlib import Path

import pytest
from command_line import composed, nemo_rod
from places import ROOT

from nemo_rod import parts
from nemo_rod.lab.report.paper import category_of, paper, paper_arms
from nemo_rod.lab.reproduce import elements
from nemo_rod.run.checks import check
from nemo_rod.run.variants import arm_settings
from nemo_rod.selection.arms import arm_kind

LINES = (ROOT / "docs" / "paper-map.md").read_text().splitlines()
CELLS = [[cell.strip() for cell in line.strip("|").split("|")] for line in LINES if "|" in line]
TEMPLATES = (ROOT / "nemo_rod/lab/report").glob("*.html")
SECTIONS = "".join(template.read_text() for template in TEMPLATES)
FIGURES = parts.names("figures")
TABLES = {"arms", "sources", "seeds", "paper", "base_loss", "capabilities"}


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@cache
def known_arms(recipe: str) -> set[str]:
    config = composed(f"recipe={recipe}")
    return {*config.arms, *config.variants}


def test_every_item_of_the_paper_is_an_element():
    assert [*elements()] == paper()["items"]


@pytest.mark.parametrize("element", elements().values(), ids=lambda element: element.label)
def test_what_makes_an_element_exists(element):
    ran: dict[str, list[str]] = {}  # folder of a run -> the arms that it has by then
    for verb, recipe, *more in element.commands():
        config, words = composed(recipe), dict(word.split("=") for word in more)
        lists = {key: value.strip("[]").split(",") for key, value in words.items()}
        assert lists.keys() <= {"arms", "tasks", "report.settings"}
        config.arms = lists.get("arms", config.arms)
        check(config)
        assert {*lists.get("report.settings", ())} <= {*ran}
        for name in config.arms if verb == "run" else ():
            assert name in known_arms(config.recipe) or arm_kind(name), name
            variant = arm_settings(config, name).variant
            for source in filter(None, (variant.curriculum, variant.reference)):
                folder, _, arm = source.partition("/arms/")
                assert arm in ["", *ran[folder]], f"{name} follows {source}, which comes later"
        ran.setdefault(config.run_dir, []).extend(config.arms)
    trained = {name for names in ran.values() for name in names}
    assert {*element.arms.split()} <= trained
    for file in element.files:
        check_file(file)


def check_file(file: str) -> None:
    kind, name = Path(file).parent.name, Path(file).stem
    if not file.startswith("report/"):
        assert (ROOT / file).is_file(), file
    elif file.startswith("report/index.html#"):
        assert f'id="{file.partition("#")[2]}"' in SECTIONS, file
    else:
        assert name in {"figures": set(FIGURES), "tables": TABLES}[kind], file


def test_what_lies_beyond_the_paper_exists_too():
    beyond = [cells for cells in CELLS if len(cells) == 3 and "report/" in cells[2]]
    known = known_arms("toy_paper") | known_arms("toy_controls")
    for _, arms, files in beyond:
        assert {*quoted(arms)} <= known
        for file in quoted(files):
            check_file(file)
    shown = {Path(file).stem for _, _, files in beyond for file in quoted(files)}
    shown |= {Path(file).stem for element in elements().values() for file in element.files}
    single = {name for name in FIGURES if f"settings_{name}" not in FIGURES}
    assert {name for name in single if name not in shown} == set(), "a figure that no row names"


@pytest.mark.parametrize(
    ("words", "status", "expected"),
    [
        ([], 0, "fig:frontier_budget"),
        (["tab:rod_convergence"], 0, "report.settings=[runs/german_nemotron_nano_12b_v2]"),
        (["fig:nothing"], 2, "names no figure, table or algorithm of the paper"),
        (["alg:rod"], 0, "nemo-rod run recipe=toy"),
    ],
)  # fmt: skip
def test_the_command(words, status, expected):
    done = nemo_rod("recipes", "--paper", *words)
    assert (done.returncode, expected in done.stdout + done.stderr) == (status, True), done


def test_the_papers_numbers_belong_to_our_recipes_and_sources():
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
    # an imported Legal corpus has these four, a German one its own names
    theirs = ("world_knowledge", "reasoning_math", "multilingual", "code")
    assert [category_of(name) for name in theirs] == [*paper()["categories"]]
    assert category_of("wk_rqa") == "world knowledge" and category_of("gc_web") is None


def test_what_several_tables_of_the_paper_say_of_an_arm():
    # The frontier's table goes before that of transfers, which rounds otherwise in one place.
    assert paper_arms("german_qwen3_5_9b")["no_replay"]["val_forgetting"] == 0.420
    assert paper_arms("german_qwen3_5_9b")["rod_transfer"]["adapt_loss"] == 1.795
    assert paper_arms("german_nemotron_nano_12b_v2")["rod"]["budget"] == 1.0
    assert paper_arms("german_nemotron_nano_12b_v2")["rod_beyond"]["val_forgetting"] == 0.0734
    assert paper_arms("toy") == {}
