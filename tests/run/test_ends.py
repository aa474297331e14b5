"""One trunk with many ends, also in other layouts; and a second domain after the first."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from command_line import nemo_rod
from tiny_recipe import ARMS, RECIPE, assert_is_the_unbroken_arm

from nemo_rod.corpus import BlockStore
from nemo_rod.files import read_lines
from nemo_rod.selection import Curriculum

pytestmark = pytest.mark.layouts

# of a trunk, from a step: how it goes on, the unbroken arm that it then is, and its last step
ENDS = {
    "end": ("rod", 2, "anneal: 3", "five", 5),
    "longer": ("rod", 4, "steps: 8", "eight", 8),
    # after the last step of a trunk whose rate never falls: it comes to an end, or goes on
    "closed": ("open", 6, "anneal: 2", "eight", 8),
    "on": ("open", 6, "steps: 8", "open_eight", 8),
}
UNBROKEN = {"five": (5, 3), "eight": (8, 2), "open_eight": (8, 0), "open": (6, 0)}  # steps, decay
LONGER = ("pretrain.steps=100", "train.steps=100", "pretrain.lr=3e-3", "train.lr=3e-3")
PATHS = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
FIRST_SET = [path for path in PATHS if not Path(path, "megatron").is_dir()]
LAYOUTS = [("dp2", "tp2"), ("tp2", "pp2"), ("pp2", "dp2")]


def run_here(command: str, where: Path, *options: str, **how: Any) -> None:
    words = (*RECIPE, "report.max_controls=0", *options)
    done = nemo_rod(command, *words, cwd=where, trains=True, **how)
    assert done.returncode == 0, done.stderr[-3000:]


def variants() -> list[str]:
    whole = "{{of: rod, steps: {}, train: {{warmup_steps: 1, decay_steps: {}}}}}"
    made = {name: whole.format(*lengths) for name, lengths in UNBROKEN.items()}
    for name, (trunk, at, then, *_) in ENDS.items():
        made[name] = f"{{of: {trunk}, at: {at}, {then}}}"
    schedule = ["train.warmup_steps=1", "train.decay_steps=2"]
    return [
        *(f"+variants.{name}={variant}" for name, variant in made.items()),
        *(*schedule, "checkpoint.every=2", "checkpoint.keep=4"),
    ]


def branched(run: Path, where: Path, *options: str, **of_trunk: Any) -> Path:
    """Trains a trunk with all options but the last, and `longer` with all but the first."""
    for made in ("blocks", "base", "references", "arms/no_replay"):
        shutil.copytree(run / made, where / "run" / made)
    run_here("train", where, *variants(), "arm=rod", *options[:-1], **of_trunk)
    run_here("train", where, *variants(), "arm=longer", *options[1:])
    return where / "run" / "arms" / "longer"


@pytest.mark.parametrize(("before", "after"), LAYOUTS)
def test_a_branch_in_another_layout_chooses_as_the_unbroken_arm(run, tmp_path, before, after):
    """Of a trunk in the layout before; like an arm that is resumed in another one."""
    small = ("pretrain.micro_batch_size=4", "train.micro_batch_size=2")
    branch = branched(run, tmp_path, f"parallel={before}", *small, f"parallel={after}")
    whole = run / "arms" / "eight"
    rows, trunk, other = map(metrics, (branch, branch.with_name("rod"), whole))
    assert rows[:4] == trunk[:4]
    one, two = records(branch), records(whole)
    assert all((one[field] == two[field]).all() for field in ("step", "block_ids", "chosen"))
    np.testing.assert_allclose(one["score"], two["score"], rtol=0, atol=1e-5)
    for key, close in (("train/lr", 0), ("train/loss", 1e-5)):
        values = ([row[key] for row in steps] for steps in (rows, other))
        np.testing.assert_allclose(*values, rtol=close, err_msg=key)


@pytest.mark.skipif(FIRST_SET == PATHS, reason="on main of Megatron-LM and Megatron-Bridge")
def test_main_goes_on_where_the_first_set_stopped(run, tmp_path):
    paths = os.environ | {"PYTHONPATH": os.pathsep.join(FIRST_SET)}
    branch = branched(run, tmp_path, "parallel=single", "parallel=single", env=paths)
    assert_is_the_unbroken_arm(branch, run / "arms" / "eight", branch.with_name("rod"), 4, 8)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two trunks, their ends and the unbroken counterparts."""
    root = tmp_path_factory.mktemp("ends")
    run_here("run", root, *variants(), f"arms=[{','.join([*ARMS, *ENDS, *UNBROKEN])}]")
    return root / "run"


def records(arm: Path) -> Any:
    with Curriculum.open(arm / "curriculum.rod", read_only=True) as curriculum:
        return curriculum.records()


def metrics(arm: Path) -> list[dict[str, Any]]:
    return read_lines(arm / "metrics.jsonl")


def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report" / "results.json").read_text())["arms"]


def losses(arm: Path) -> dict[str, dict[str, float]]:
    return json.loads((arm / "evaluation.json").read_text())["loss"]


@pytest.mark.parametrize("name", ENDS)
def test_a_branch_is_the_unbroken_arm(run, name):
    trunk, at, _, unbroken, steps = ENDS[name]
    arms = [run / "arms" / arm for arm in (name, unbroken, trunk)]
    assert_is_the_unbroken_arm(*arms, at, steps)


def test_all_ends_stand_in_one_frontier_each_at_its_own_cost(run):
    arms, page = results(run), (run / "report" / "index.html").read_text()
    for name, (_, _, _, unbroken, steps) in ENDS.items():
        for key in ("adapt_loss", "val_forgetting", "trained_tokens", "compute", "compute_in_all"):
            assert arms[name][key] == arms[unbroken][key], key
        assert arms[name]["compute"] == pytest.approx(steps * (1 + 2 / 3))
        with_references = steps * (1 + 4 / 3) + arms["no_replay"]["compute"]  # the specialist
        assert arms[name]["compute_in_all"] == pytest.approx(with_references)
        assert name in page
    falls_not, falls = (metrics(run / "arms" / arm)[-1]["train/lr"] for arm in ("on", "closed"))
    assert falls_not > falls


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A run that is long enough for a domain to be learned."""
    root = tmp_path_factory.mktemp("domains")
    run_here("run", root, *LONGER)
    return root / "run"


@pytest.fixture(scope="module")
def second(first):
    """A run from its model on another dialect; the first one is replay there."""
    new = "{role: adaptation, kind: synthetic, files: ['dialect:1:0.5'], max_bytes: 20000}"
    domain = ["domain.sources.dialect.role=replay", f"+domain.sources.second={new}"]
    base = ["model.hf=run/arms/rod/hf", "model.architecture=null", "pretrain=null"]
    run_here("run", first.parent, *LONGER, *base, *domain, "run_dir=next")
    return first.parent / "next"


def test_a_second_run_watches_the_first_domain_where_the_first_one_did(first, second):
    """On the blocks that the first run held out, from where that run ended."""
    held_out, trained = [], set()
    for folder in (first, second):
        for split, found in (("holdout", held_out.append), ("train", trained.update)):
            store = BlockStore(folder / "blocks", split)
            (dialect,) = (source for source in store.sources if source.name == "dialect")
            ids = np.arange(dialect.start, dialect.start + dialect.count)
            found({row.tobytes() for row in store.hashes(ids)})
    assert held_out[0] == held_out[1] and not held_out[0] & trained
    end, start = losses(first / "arms" / "rod"), losses(second / "arms" / "base")
    whole = {**end["replay"], "dialect": end["adaptation"]["dialect"]}
    assert start["replay"] == pytest.approx(whole, rel=1e-6)
    assert {*start["adaptation"]} == {"second"}


def test_what_was_there_and_the_first_domain_are_forgotten_less_with_rod(second):
    arms, start = results(second), losses(second / "arms" / "base")["replay"]
    assert {*start} == {"dialect", "chain_0", "chain_1"}
    rose = {}
    for name in ("no_replay", "rod"):
        end = losses(second / "arms" / name)["replay"]
        rose[name] = {source: end[source] - start[source] for source in start}
        assert arms[name]["forgetting_by_source"] == pytest.approx(rose[name])
    for source in ("dialect", "chain_0"):
        assert rose["no_replay"][source] > max(1, 4 * rose["rod"][source])
