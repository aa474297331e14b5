"""Intervals over held-out blocks against plain loops over the same draws, and by hand."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_build import BASE, BASE_ADAPTATION, COUNTS, write_run

from nemo_rod.lab.report import build_report
from nemo_rod.lab.report.intervals import SEED, draws_of, intervals_of
from nemo_rod.lab.report.results import results_of
from nemo_rod.lab.report.run_files import read_run
from nemo_rod.run.held_out_losses import BLOCK_LOSSES
from nemo_rod.selection.forgetting import validation_forgetting, weighted_loss

pytestmark = pytest.mark.usefixtures("no_pictures")
SIZES = {"adaptation": dict.fromkeys(BASE_ADAPTATION, 5), "replay": dict.fromkeys(BASE, 4)}


def write_blocks(folder: Path, arm: str, rng: np.random.Generator) -> None:
    """Writes losses of blocks whose means are the arm's losses by source."""
    file = folder / "arms" / arm / "evaluation.json"
    evaluation = json.loads(file.read_text())
    blocks = []
    for role, sizes in SIZES.items():
        for source, size in sizes.items():
            noise = rng.normal(0, 0.2, size)
            blocks.append(evaluation["loss"][role][source] + noise - noise.mean())
    file.write_text(json.dumps(evaluation | {"blocks": SIZES}))
    np.save(file.with_name(BLOCK_LOSSES), np.concatenate(blocks).astype(np.float32))


@pytest.fixture
def run(tmp_path):
    rng = np.random.default_rng(3)
    fake = write_run(tmp_path / "small", arms=("base", "no_replay", "fixed_32", "rod"))
    for arm in ("base", "no_replay", "fixed_32", "rod"):
        write_blocks(fake.folder, arm, rng)
    return read_run(fake.folder)


def test_the_report_keeps_the_loss_of_every_held_out_block_and_says_what_intervals_are(run):
    results = build_report(run.folder)
    file = run.folder / "report" / results["block_losses"]
    with np.load(file) as kept:
        for name, arm in run.arms.items():
            for role, by_source in arm.block_losses.items():
                for source, losses in by_source.items():
                    assert (kept[f"{name}/7/{role}/{source}"] == losses.astype(np.float32)).all()
        assert len(kept.files) == len(run.arms) * 6
    before, page = file.read_bytes(), (file.parent / "index.html").read_text()
    assert f'href="{file.name}"' in page and "other seeds vary besides" in page
    low, high = results["intervals"]["rod"]["adapt_loss"]
    assert low < results["arms"]["rod"]["adapt_loss"] < high
    build_report(run.folder)
    assert file.read_bytes() == before


def test_every_draw_is_evaluated_as_the_results_are(run):
    rng, values = np.random.default_rng(SEED), dict[str, list[dict[str, float]]]()
    counts = {
        (role, source): rng.multinomial(size, [1 / size] * size, 40)
        for role in SIZES
        for source, size in sorted(SIZES[role].items())
    }
    for draw in range(40):
        losses: dict[str, Any] = {}
        for name, arm in run.arms.items():
            losses[name] = {role: {} for role in SIZES}
            for (role, source), times in counts.items():
                blocks = arm.block_losses[role][source]
                drawn = [x for x, n in zip(blocks, times[draw], strict=True) for _ in range(n)]
                losses[name][role][source] = math.fsum(drawn) / len(drawn)
        results = {
            name: {
                "adapt_loss": weighted_loss(of["adaptation"], COUNTS["adaptation"]),
                "val_forgetting": validation_forgetting(
                    of["replay"], losses["base"]["replay"], COUNTS["replay"]
                ),
            }
            for name, of in losses.items()
        }
        for name, row in results.items():
            values.setdefault(name, []).append(row)
    actual = intervals_of(draws_of(run, draws=40))
    for name, rows in values.items():
        assert list(actual[name]) == list(rows[0])
        for key in rows[0]:
            expected = np.percentile([row[key] for row in rows], [5, 95])
            np.testing.assert_allclose(actual[name][key], expected, rtol=1e-9, atol=1e-12)


def test_an_arm_without_its_blocks_has_no_interval(run):
    (run.folder / "arms" / "fixed_32" / BLOCK_LOSSES).unlink()
    intervals = results_of(read_run(run.folder))["intervals"]
    assert set(intervals) == {"base", "no_replay", "rod"}


def test_losses_of_other_blocks_are_refused(run):
    file = run.folder / "arms" / "rod" / BLOCK_LOSSES
    for wrong in (np.load(file) + 0.1, np.load(file)[:-1]):
        np.save(file, wrong)
        with pytest.raises(ValueError, match=r"rod/held_out_losses.npy is damaged .*evaluate"):
            read_run(run.folder)
