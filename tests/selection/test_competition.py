"""Metrics of the competition, against NumPy's own mean and quantiles over plain lists."""

import math
from dataclasses import replace

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


def check(metrics: dict[str, float | None], prefix: str, scores: np.ndarray, join: str) -> None:
    """Compares one group's metrics with NumPy's."""
    for name, share in QUANTILES.items():
        value = metrics[f"{prefix}{join}{name}"]
        if len(scores):
            assert value == pytest.approx(float(np.quantile(scores, share)), abs=1e-12)
        else:
            assert value is None
    above = metrics[
        f"{prefix.replace('rho_', '')}_above_zero" if join == "_" else f"{prefix}/above_zero"
    ]
    assert above == (pytest.approx(float((scores > 0).mean())) if len(scores) else None)
    mean = metrics[prefix if join == "_" else f"{prefix}/mean"]
    assert mean == (pytest.approx(float(scores.mean()), abs=1e-12) if len(scores) else None)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(-8, 8, width=32), st.integers(0, 2)), min_size=1, max_size=40
    ).flatmap(lambda rows: st.tuples(st.just(rows), st.integers(1, len(rows))))
)
def test_every_figure_is_that_of_a_plain_count(drawn: tuple[list[tuple[float, int]], int]) -> None:
    rows, k = drawn
    choice, source_C = choice_of([score for score, _ in rows], [source for _, source in rows], k)
    metrics = selection_metrics(choice, source_C, NAMES)
    assert choice.score is not None
    score_C, is_replay_C = choice.score.astype(np.float64), choice.pool.is_replay
    for role, mask in (("adaptation", ~is_replay_C), ("replay", is_replay_C)):
        check(metrics, f"rod/rho_{role}", score_C[mask], "_")
    winners = set(choice.chosen.tolist())
    for number, name in enumerate(NAMES):
        check(metrics, f"rod/rho/{name}", score_C[source_C == number], "/")
        mine = [place for place, source in enumerate(source_C) if source == number]
        assert metrics[f"rod/candidates/{name}"] == len(mine)
        assert metrics[f"rod/chosen/{name}"] == len(winners & set(mine))
        assert metrics[f"rod/share/{name}"] == len(winners & set(mine)) / k
    won = [score for place, score in enumerate(score_C) if place in winners]
    lost = [score for place, score in enumerate(score_C) if place not in winners]
    assert metrics["rod/rho_chosen"] == pytest.approx(np.mean(won), abs=1e-12)
    assert metrics["rod/rho_dropped"] == (pytest.approx(np.mean(lost), abs=1e-12) if lost else None)
    is_chosen_C = np.isin(np.arange(len(rows)), choice.chosen)
    for group, mask in (
        *(("adaptation", ~is_replay_C), ("replay", is_replay_C)),
        *(("chosen", is_chosen_C), ("dropped", ~is_chosen_C)),
    ):
        for name, value_C in (("loss", choice.loss), ("reference", choice.reference)):
            assert value_C is not None
            mean = (
                pytest.approx(float(value_C[mask].astype(np.float64).mean()))
                if mask.any()
                else None
            )
            assert metrics[f"rod/{name}_{group}"] == mean


def test_padding_and_excluded_candidates_do_not_compete() -> None:
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


def test_a_pool_whose_scores_are_all_lost_still_has_its_counts() -> None:
    choice, source_C = choice_of([1.0, 2.0], [0, 1], 2)
    assert choice.score is not None
    lost = replace(choice, score=np.full(2, -np.inf, dtype=np.float32))
    metrics = selection_metrics(lost, source_C, NAMES)
    assert metrics["rod/rho_chosen"] is metrics["rod/rho_replay_p90"] is None
    assert metrics["rod/replay_above_zero"] is None
    assert metrics["rod/chosen/old/a"] == 1


def test_without_scores_there_are_counts_alone() -> None:
    pool = Pool(0, np.arange(3), np.array([False, True, True]))
    metrics = selection_metrics(choose(pool, TakeAll(), 3), np.array([0, 1, 1]), NAMES)
    assert metrics["rod/candidates/old/a"] == metrics["rod/chosen/old/a"] == 2
    assert metrics["rod/rho_replay"] is None and metrics["rod/threshold"] is None
    assert not any(name.startswith("rod/rho/") for name in metrics)
