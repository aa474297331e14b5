"""Metrics of the competition, against NumPy's own mean and quantiles over plain lists."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rod.selection import Choice, Joint, Pool, TakeAll, choose, selection_metrics
from nemo_rod.selection.competition import QUANTILES

NAMES = ["new", "old/a", "old/b", "never_drawn"]
REPLAY_OF = np.array([False, True, True, True, False])  # of a source; the last is padding


def choice_of(score: list[float], source: list[int], k: int) -> tuple[Choice, np.ndarray]:
    source_C = np.array(source, dtype=np.int64)
    pool = Pool(0, np.arange(len(source)), REPLAY_OF[source_C])
    loss_C = np.array(score, dtype=np.float32)
    reference_C = np.linspace(0, 1, len(score), dtype=np.float32)
    return choose(pool, Joint(), k, loss_C, reference_C), source_C


Metrics = dict[str, float | None]


def approx(values: np.ndarray, figure: Callable[..., Any] = np.mean, *more: Any) -> Any:
    """What a figure of a group is; None if nobody is in it."""
    return pytest.approx(float(figure(values, *more)), abs=1e-12) if len(values) else None


def check(metrics: Metrics, scores: np.ndarray, mean: str, above: str, quantiles: str) -> None:
    """Compares one group's metrics, of these names, with NumPy's."""
    assert metrics[mean] == approx(scores)
    assert metrics[above] == approx(scores > 0)
    for name, share in QUANTILES.items():
        assert metrics[f"{quantiles}{name}"] == approx(scores, np.quantile, share)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(-8, 8, width=32), st.integers(0, 2)), min_size=1, max_size=40
    ).flatmap(lambda rows: st.tuples(st.just(rows), st.integers(1, len(rows))))
)
def test_every_figure_is_that_of_a_plain_count(drawn):
    rows, k = drawn
    choice, source_C = choice_of([score for score, _ in rows], [source for _, source in rows], k)
    metrics = selection_metrics(choice, source_C, NAMES)
    assert choice.score is not None
    score_C, is_replay_C = choice.score.astype(np.float64), choice.pool.is_replay_C
    is_chosen_C = np.isin(np.arange(len(rows)), choice.chosen)
    for role, mask in (("adaptation", ~is_replay_C), ("replay", is_replay_C)):
        mean = f"rod/rho_{role}"
        check(metrics, score_C[mask], mean, f"rod/{role}_above_zero", f"{mean}_")
    for number, name in enumerate(NAMES):
        mine, group = source_C == number, f"rod/rho/{name}/"
        check(metrics, score_C[mine], f"{group}mean", f"{group}above_zero", group)
        assert metrics[f"rod/candidates/{name}"] == mine.sum()
        assert metrics[f"rod/chosen/{name}"] == (mine & is_chosen_C).sum()
        assert metrics[f"rod/share/{name}"] == (mine & is_chosen_C).sum() / k
    assert metrics["rod/rho_chosen"] == approx(score_C[is_chosen_C])
    assert metrics["rod/rho_dropped"] == approx(score_C[~is_chosen_C])
    assert choice.loss is not None and choice.reference is not None
    for group, mask in (
        *(("adaptation", ~is_replay_C), ("replay", is_replay_C)),
        *(("chosen", is_chosen_C), ("dropped", ~is_chosen_C)),
    ):
        for name, value_C in (("loss", choice.loss), ("reference", choice.reference)):
            assert metrics[f"rod/{name}_{group}"] == approx(value_C[mask].astype(np.float64))


def test_padding_and_excluded_candidates_do_not_compete():
    pool = Pool(0, np.array([0, 1, 2, 3, -1]), np.array([False, True, True, True, False]))
    loss = np.array([3.0, 1.0, 2.0, math.nan, -math.inf], dtype=np.float32)
    choice = choose(pool, Joint(), 2, loss, np.zeros(5, dtype=np.float32), "exclude")
    metrics = selection_metrics(choice, np.array([0, 1, 1, 1, -1]), NAMES)
    assert choice.chosen.tolist() == [0, 2] and metrics["rod/excluded"] == 1
    assert metrics["rod/rho_adaptation"] == metrics["rod/rho_adaptation_p10"] == 3.0
    assert metrics["rod/rho_replay"] == metrics["rod/rho/old/a/p50"] == 1.5
    assert metrics["rod/rho_dropped"] == 1.0
    # what was excluded was drawn; what pads the pool was not
    assert [metrics[f"rod/candidates/{name}"] for name in NAMES] == [1, 3, 0, 0]


def test_a_pool_whose_scores_are_all_lost_still_has_its_counts():
    choice, source_C = choice_of([1.0, 2.0], [0, 1], 2)
    assert choice.score is not None
    lost = replace(choice, score=np.full(2, -np.inf, dtype=np.float32))
    metrics = selection_metrics(lost, source_C, NAMES)
    assert metrics["rod/rho_chosen"] is metrics["rod/rho_replay_p90"] is None
    assert metrics["rod/replay_above_zero"] is None
    assert metrics["rod/chosen/old/a"] == 1


def test_without_scores_there_are_counts_alone():
    pool = Pool(0, np.arange(3), np.array([False, True, True]))
    metrics = selection_metrics(choose(pool, TakeAll(), 3), np.array([0, 1, 1]), NAMES)
    assert metrics["rod/candidates/old/a"] == metrics["rod/chosen/old/a"] == 2
    assert metrics["rod/rho_replay"] is None and metrics["rod/threshold"] is None
    assert not any(name.startswith("rod/rho/") for name in metrics)
