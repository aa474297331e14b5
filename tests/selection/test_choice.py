"""One step's choice: what it remembers, scores that are no numbers, and its metrics."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rod.selection import Joint, Pool, TakeAll, choose, selection_metrics
from nemo_rod.selection.competition import QUANTILES

IS_REPLAY = np.array([False, True, False, True, False, True])
POOL = Pool(step=3, block_ids=np.array([10, 20, 11, 21, 12, 22]), is_replay_C=IS_REPLAY)
REFERENCE = np.full(6, 1.0, dtype=np.float32)


@pytest.mark.parametrize("chosen", [[0], [0, 0], [1, 0], [-1, 0], [0, 6], [[0], [1]]], ids=str)
def test_a_choice_that_is_none_is_refused(chosen):
    policy: Any = SimpleNamespace(needs=frozenset(), select=lambda *_: chosen)
    with pytest.raises(ValueError, match=r"(?s)step 3: SimpleNamespace.select .*expected 2 "):
        choose(POOL, policy, 2)


def test_a_score_may_be_the_loss_itself():
    loss = np.array([1.5, math.nan, 1.0, 3.0, -math.inf, 0.5], dtype=np.float32)
    before = loss.copy()
    choice = choose(POOL, Joint(), 3, loss, REFERENCE, "exclude", lambda loss, _: loss)
    assert np.array_equal(loss, before, equal_nan=True)
    assert choice.score is not None and np.isneginf(choice.score[[1, 4]]).all()


NAMES = ["new", "old/a", "old/b", "never_drawn"]
REPLAY_OF = np.array([False, True, True, True, False])  # of a source; the last is padding


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


FINITE, FAULTS = st.floats(-8, 8, width=32), st.sampled_from([math.nan, math.inf, -math.inf])
NATS = st.one_of(FINITE, FINITE, FINITE, FINITE, FAULTS)


@pytest.mark.filterwarnings("ignore:invalid value")
@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.tuples(NATS, NATS, st.integers(0, 2)), min_size=1, max_size=40),
    number=st.integers(0, 40),
    on_nonfinite=st.sampled_from(["refuse", "exclude", "exclude"]),
)
def test_a_choice_and_its_figures_are_those_of_a_plain_sort_and_count(rows, number, on_nonfinite):
    """A loss of -inf is padding, with a source or without; else what is no number is a fault."""
    loss_C, reference_C = (np.array([row[i] for row in rows], dtype=np.float32) for i in (0, 1))
    is_padding_C = np.isneginf(loss_C)
    source_C = np.array([row[2] for row in rows])
    source_C[is_padding_C & (source_C == 0)] = -1
    pool = Pool(3, 100 + np.arange(len(rows)), REPLAY_OF[source_C])
    with np.errstate(invalid="ignore"):
        score_C = np.where(is_padding_C, np.float32(-math.inf), loss_C - reference_C)
    is_fault_C = ~np.isfinite(score_C) & ~is_padding_C
    left, faults = np.flatnonzero(np.isfinite(score_C)).tolist(), np.flatnonzero(is_fault_C)
    k = 1 + number % (len(left) + 1)  # up to one too many
    sentence = rf"^{k} blocks of any role .* the pool holds {len(left)}" if len(left) < k else ""
    if len(faults):
        found = rf"^step 3: {len(faults)} of {len(rows)} scores are not finite, the first that of "
        found += f"block {100 + faults[0]}"
        too_few = f"{found}, and too few are left for a batch of {k}: " if sentence else ""
        sentence = f"{found}: the model " if on_nonfinite == "refuse" else too_few
    with pytest.raises(ValueError, match=sentence) if sentence else nullcontext():
        choice = choose(pool, Joint(), k, loss_C, reference_C, on_nonfinite)
    if sentence:
        return
    best = sorted(left, key=lambda place: -score_C[place])[:k]
    assert choice.chosen.tolist() == sorted(best) and choice.threshold == score_C[best[-1]]
    assert choice.block_ids.tolist() == [100 + place for place in sorted(best)]
    assert np.array_equal(choice.score, np.where(is_fault_C, np.float32(-math.inf), score_C))
    metrics = selection_metrics(choice, source_C, NAMES)
    assert metrics["rod/excluded"] == choice.excluded == len(faults)
    score_C, is_replay_C = score_C.astype(np.float64), pool.is_replay_C
    is_chosen_C = np.isin(np.arange(len(rows)), choice.chosen)
    assert metrics["rod/replay_share"] == is_replay_C[is_chosen_C].mean()
    competes_C = np.isfinite(score_C)  # what was excluded was drawn; padding of no source was not
    for role, mask in (("adaptation", ~is_replay_C), ("replay", is_replay_C)):
        mean = f"rod/rho_{role}"
        check(metrics, score_C[mask & competes_C], mean, f"rod/{role}_above_zero", f"{mean}_")
    for source, name in enumerate(NAMES):
        mine, group = source_C == source, f"rod/rho/{name}/"
        check(metrics, score_C[mine & competes_C], f"{group}mean", f"{group}above_zero", group)
        assert metrics[f"rod/candidates/{name}"] == mine.sum()
        assert metrics[f"rod/chosen/{name}"] == (mine & is_chosen_C).sum()
        assert metrics[f"rod/share/{name}"] == (mine & is_chosen_C).sum() / k
    for group, mask in (
        *(("adaptation", ~is_replay_C), ("replay", is_replay_C)),
        *(("chosen", is_chosen_C), ("dropped", ~is_chosen_C)),
    ):
        mask = mask & competes_C
        if group in ("chosen", "dropped"):
            assert metrics[f"rod/rho_{group}"] == approx(score_C[mask])
        for name, value_C in (("loss", loss_C), ("reference", reference_C)):
            assert metrics[f"rod/{name}_{group}"] == approx(value_C[mask].astype(np.float64))


def test_a_pool_whose_scores_are_all_lost_still_has_its_counts():
    source_C, nats = np.array([0, 1]), np.ones(2, dtype=np.float32)
    choice = choose(Pool(0, source_C, REPLAY_OF[source_C]), Joint(), 2, nats, nats)
    lost = replace(choice, score=np.full(2, -np.inf, dtype=np.float32))
    metrics = selection_metrics(lost, source_C, NAMES)
    assert metrics["rod/rho_chosen"] is metrics["rod/rho_replay_p90"] is None
    assert metrics["rod/replay_above_zero"] is None
    assert metrics["rod/chosen/old/a"] == 1


def test_without_scores_there_are_counts_alone():
    pool = Pool(0, np.arange(3), np.array([False, True, True]))
    choice = choose(pool, TakeAll(), 3)
    assert choice.chosen.tolist() == [0, 1, 2]
    assert choice.score is None and math.isnan(choice.threshold)
    metrics = selection_metrics(choice, np.array([0, 1, 1]), NAMES)
    assert metrics["rod/candidates/old/a"] == metrics["rod/chosen/old/a"] == 2
    assert metrics["rod/rho_replay"] is None and metrics["rod/threshold"] is None
    assert not any(name.startswith("rod/rho/") for name in metrics)
