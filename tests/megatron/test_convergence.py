"""A run ends half an epoch after its loss converged, also if it was killed on the way."""

import math
from pathlib import Path

import numpy as np
import pytest
from test_resume import assert_same_run, kill_after
from tiny import LAYOUTS, Setting, metric

from nemo_rod.selection import SourceRow
from nemo_rod.selection.held_out import Rule, adaptation_loss, over_sources


def slow_converged_at(losses, tolerance, patience):
    """The same rule, from its words: the last `patience` losses beat no best before them."""
    for last in range(patience, len(losses)):
        best, waiting = math.inf, []
        for done, loss in losses[: last + 1]:
            better = loss < best - tolerance
            waiting = [] if better else [*waiting, done]
            best = loss if better else best
        if len(waiting) >= patience:
            return waiting[-1]
    return None


@pytest.mark.parametrize("seed", range(40))
def test_the_rule_is_what_it_says(seed):
    random = np.random.default_rng(seed)
    values = 2 * np.exp(-np.arange(30) / 6) + 0.1 * random.random(30)
    losses = [(5 * (i + 1), float(value)) for i, value in enumerate(values)]
    for tolerance in (0.0, 0.02, 0.5):
        for patience in (1, 2, 4):
            actual = Rule(tolerance, patience, 1).converged_at(losses)
            assert actual == slow_converged_at(losses, tolerance, patience)


def test_losses_that_go_on_falling_never_converge():
    assert Rule(0.01, 1, 1).converged_at([(i, 5 - 0.1 * i) for i in range(40)]) is None


def test_the_loss_is_that_of_new_sources_by_their_size():
    look = {
        "validation/adaptation/a/loss": 2.0,
        "validation/adaptation/b/loss": 3.0,
        "validation/replay/c/loss": 9.0,
    }
    sources = [SourceRow(*row) for row in (("a", "adaptation", 0, 3), ("b", "adaptation", 3, 1))]
    sources += [SourceRow("c", "replay", 4, 9), SourceRow("unmeasured", "adaptation", 13, 9)]
    assert adaptation_loss(look, sources) == 2.25
    assert adaptation_loss({"train/loss": 1.0}, sources) is None
    assert over_sources(look, {**look, "validation/replay/c/loss": 8.5}, sources) == {
        "validation/adaptation_loss": 2.25,
        "validation/forgetting": 0.5,
    }
    diverged = dict.fromkeys(look, math.nan)
    assert over_sources(diverged, look, sources) == over_sources({}, look, sources) == {}
    assert over_sources(look, {}, sources).keys() == {"validation/adaptation_loss"}


def converging(tiny: Setting, name: str) -> Path:
    """Writes the job of a run that converges after 6 of at most 20 steps, and decays for 4."""
    return tiny._job(
        *("no_replay", tiny.root / name, LAYOUTS["dp2"]), model=tiny.base, steps=20, lr=3e-3,
        references=[], checkpoint__every=2, validation__every=2, train__decay_fraction=4 / 20,
        convergence=Rule(tolerance=100.0, patience=2, decay_steps=4),
    )  # fmt: skip


@pytest.mark.slow
def test_killed_before_and_after_converging_equals_uninterrupted(tiny):
    whole, broken = converging(tiny, "whole_converging"), converging(tiny, "broken_converging")
    tiny.torchrun(2, "nemo_rod.megatron", whole)
    kill_after(4, broken, 2)
    kill_after(8, broken, 2)
    tiny.torchrun(2, "nemo_rod.megatron", broken)
    assert_same_run(whole.parent, broken.parent, steps=10)
    lr = metric(whole.parent, "train/lr")
    decay = [3e-4 + 0.5 * (3e-3 - 3e-4) * (1 + math.cos(math.pi * i / 4)) for i in range(4)]
    assert lr[2:7] == pytest.approx([3e-3] * 5)
    assert lr[6:] == pytest.approx(decay)
