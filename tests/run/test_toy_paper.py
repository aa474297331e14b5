"""Recipe toy_paper in miniature: every arm is made, is what its name says, and is reported."""

import json
import math
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from command_line import composed, nemo_rod
from test_paper_map import CELLS, quoted

from nemo_rod.config import Config
from nemo_rod.lab.reproduce import elements
from nemo_rod.run.variants import ArmSettings, arm_settings
from nemo_rod.selection import Curriculum

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

BATCH, STEPS, LOOK, TOLERANCE, PATIENCE = 8, 20, 4, 0.02, 2
REDUCED = (
    "domain=synthetic", "parallel=single", "domain.sources.dialect.max_bytes=16000",
    *(f"domain.sources.chain_{i}.max_bytes=40000" for i in range(3)),
    *(f"~domain.sources.chain_{i}" for i in range(3, 9)),
    "pretrain.steps=300", "pretrain.batch_size=16", "pretrain.micro_batch_size=16",
    f"train.steps={STEPS}", f"train.batch_size={BATCH}", f"train.micro_batch_size={BATCH}",
    "train.lr=2.0e-3", "scoring.micro_batch_size=64", "checkpoint.every=1000",
    "report.max_controls=0",
    f"validation.every={LOOK}", "validation.blocks=8",
    f"convergence.tolerance={TOLERANCE}", f"convergence.patience={PATIENCE}",
)  # fmt: skip
ASKED = ["base", "no_replay", "rod"]
SECOND_SEED = ["base", "no_replay", "fixed_32", "rod"]


def folder(recipe: str, seed: int = 1) -> str:
    return f"runs/{recipe}/seed_{seed}"


def command(root: Path, name: str, recipe: str, *more: str, seed: int = 1) -> str:
    """What a command of the miniature says; it must end well."""
    done = attempt(root, name, recipe, *more, seed=seed)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def attempt(
    root: Path, name: str, recipe: str, *more: str, seed: int = 1
) -> subprocess.CompletedProcess[str]:
    where = (f"recipe={recipe}", f"seed={seed}", f"run_dir={folder(recipe, seed)}")
    return nemo_rod(name, *where, *REDUCED, *more, cwd=root, trains=True)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Both recipes, a second seed of some arms, tasks of some, and the report over all of it."""
    root = tmp_path_factory.mktemp("toy_paper")
    command(root, "run", "toy_paper_small")
    command(root, "run", "toy_paper")
    first, second = (root / folder("toy_paper", seed) for seed in (1, 2))
    for shared in ("blocks", "base", "references/base"):  # these serve any seed
        shutil.copytree(first / shared, second / shared)
    command(root, "run", "toy_paper", f"arms=[{','.join(SECOND_SEED)}]", seed=2)
    asked = f"arms=[{','.join(ASKED)}]"
    command(root, "evaluate", "toy_paper", asked, "tasks=held_out", "tasks.held_out=8")
    settings = f"report.settings=[{folder('toy_paper_small')}]"
    done = nemo_rod("report", "recipe=toy_paper", *REDUCED, settings, cwd=root)
    assert done.returncode == 0, done.stderr[-3000:]
    return root


@cache
def config() -> Config:
    where = ("recipe=toy_paper", "seed=1", f"run_dir={folder('toy_paper')}")
    return composed(*where, *REDUCED)


@cache
def trained() -> dict[str, ArmSettings]:
    every = {name: arm_settings(config(), name) for name in config().arms}
    return {name: settings for name, settings in every.items() if settings.kind == "trained"}


def arms(root: Path, recipe: str = "toy_paper") -> Path:
    return root / folder(recipe) / "arms"


def facts(root: Path, name: str) -> dict[str, Any]:
    return json.loads((arms(root) / name / "arm.json").read_text())


def results(root: Path) -> dict[str, Any]:
    return json.loads((root / "runs/toy_paper/report/results.json").read_text())


def recorded(root: Path, name: str, recipe: str = "toy_paper") -> Curriculum:
    return Curriculum.open(arms(root, recipe) / name / "curriculum.rod", read_only=True)


def num_blocks(root: Path) -> dict[str, int]:
    sources = recorded(root, "rod").header.sources
    counts = {
        role: sum(s.count for s in sources if s.role == role) for role in ("adaptation", "replay")
    }
    return {f"num_{role}": count for role, count in counts.items()}


def test_every_arm_is_in_the_results_with_finite_numbers(root):
    written = results(root)
    assert list(written["sources"]["replay"]) == ["chain_0", "chain_1", "chain_2"]
    assert {*written["arms"]} == {*config().arms}
    assert written["notes"] == []
    for name, arm in written["arms"].items():
        numbers = [arm[key] for key in ("adapt_loss", "val_forgetting", "compute", "seed")]
        numbers += [arm["forgetting_by_source"][source] for source in written["sources"]["replay"]]
        if name in trained():
            numbers += [arm["replay_share"], *arm["share_by_decile"], arm["wall_seconds"]]
            assert arm["trained_tokens"] == arm["design"]["steps"] * BATCH * 64
        assert all(isinstance(n, int | float) and math.isfinite(n) for n in numbers), name
    base, specialist = written["arms"]["base"], written["arms"]["no_replay"]
    assert base["val_forgetting"] == 0 < specialist["val_forgetting"]
    assert specialist["adapt_loss"] < base["adapt_loss"]


# Only settings of the paper have its numbers beside ours.
PROMISED = sorted(
    {file for cells in CELLS for cell in cells for file in quoted(cell) if "report/" in file}
    | {file for element in elements().values() for file in element.files if "report/" in file}
    - {"report/tables/paper.md"}
)


@pytest.mark.parametrize("file", PROMISED)
def test_every_promised_figure_and_table_is_there(root, file):
    path = root / "runs/toy_paper" / file
    page = (root / "runs/toy_paper/report/index.html").read_text()
    if "#" in file:
        assert f'id="{file.partition("#")[2]}"' in page
    elif path.suffix == ".svg":
        picture = ElementTree.parse(path).getroot()
        assert picture.tag.endswith("svg") and min(map(float, picture.get("viewBox").split()[2:]))
        drawn = [e for e in picture.iter() if e.tag.rpartition("}")[2] in ("path", "use")]
        assert len(drawn) > 10 and any("role-axis" in e.get("class", "") for e in picture.iter())
        assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
        assert f'href="figures/{path.name}"' in page
    else:
        head, rule, *rows = path.read_text().splitlines()
        assert rows and set(rule) <= set("|:- ")
        assert {line.count("|") for line in (rule, *rows)} == {head.count("|")}


def test_converged_arms_end_by_the_rule(root):
    """Two looks in a row without a better loss, then half an epoch of decay, four budgets at most.

    With one adaptation source, the loss of a look is that source's.
    """
    ends = {}
    for name in [name for name, settings in trained().items() if settings.variant.converge]:
        entry = facts(root, name)
        kept = round(
            entry["retention"] * (entry["balance"] == "corpus") * num_blocks(root)["num_replay"]
        )
        decay = round((num_blocks(root)["num_adaptation"] + kept) / BATCH / 2)
        lines = (arms(root) / name / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        best, waited, converged = math.inf, 0, 4 * STEPS
        for row in rows:
            loss = row.get("validation/adaptation/dialect/loss")
            if loss is None or converged < 4 * STEPS:
                continue
            waited = 0 if loss < best - TOLERANCE else waited + 1
            best = loss if waited == 0 else best
            if waited == PATIENCE:
                converged = row["step"] + 1
        ends[name] = entry["steps"]
        assert entry["steps"] == len(rows) == min(4 * STEPS, converged + decay), name
        rates = [row["train/lr"] for row in rows[-decay:]]
        assert rates == sorted(rates, reverse=True) and rates[-1] < 0.2 * max(rates), name
    assert len(ends) == 4 and min(ends.values()) < 4 * STEPS


def test_a_curriculum_that_is_too_short_is_refused_before_training(root):
    again = f"{{of: rod, curriculum: {folder('toy_paper_small')}, steps: {STEPS + 1}}}"
    done = attempt(root, "train", "toy_paper", f"+variants.again={again}", "arm=again")
    assert done.returncode == 2
    assert f"was recorded with steps {STEPS}, but variants.again has {STEPS + 1}" in done.stderr
    assert not (arms(root) / "again.partial").exists()
