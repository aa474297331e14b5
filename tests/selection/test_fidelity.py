"""What prefixes would have chosen, against a plain sort of the same scores."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nemo_rod.selection import Joint, Pool, Selector
from nemo_rod.selection.fidelity import fidelity, rank_correlation

SIZE, CANDIDATES, CHOSEN = 64, 40, 20
RNG = np.random.default_rng(3)
LOSS_TOKENS = RNG.gamma(2.0, 1.0, (CANDIDATES, SIZE - 1)).astype(np.float32)
REFERENCE_TOKENS = RNG.gamma(2.0, 0.8, (CANDIDATES, SIZE - 1)).astype(np.float32)
IS_REPLAY = RNG.random(CANDIDATES) < 0.5


def sums_of(tokens: np.ndarray) -> np.ndarray:
    return np.pad(tokens, ((0, 0), (0, 1))).reshape(CANDIDATES, 8, -1).sum(axis=-1)


class Everything:
    """The one pool, and the partial sums of all of its blocks."""

    size = CANDIDATES

    def pool(self, step: int) -> Pool:
        return Pool(step, np.arange(CANDIDATES), IS_REPLAY)

    def prefix(self, block_ids: np.ndarray, eighths: int) -> np.ndarray:
        end = min(SIZE * eighths // 8, SIZE - 1)
        return REFERENCE_TOKENS[block_ids, :end].mean(axis=1)

    def part_sums(self, block_ids: np.ndarray, eighths: int = 8) -> np.ndarray:
        return sums_of(LOSS_TOKENS)[block_ids, :eighths]


def chosen_by(eighths: int, kappa: float) -> tuple[list[int], np.ndarray]:
    """By the mean over the targets of the prefix, and Python's stable sort."""
    end = SIZE * eighths // 8
    score = LOSS_TOKENS[:, :end].mean(axis=1) - REFERENCE_TOKENS[:, :end].mean(axis=1)
    weighted = np.where(IS_REPLAY, kappa * score, score)
    return sorted(sorted(range(CANDIDATES), key=lambda i: -weighted[i])[:CHOSEN]), score


def selector(*, eighths: int, kappa: float = 0.5) -> Selector:
    every = Everything()
    return Selector(
        pools=every,
        policy=Joint(kappa),
        batch_size=CHOSEN,
        block_size=SIZE,
        references=every,  # type: ignore[arg-type]
        eighths=eighths,
    )


@pytest.mark.parametrize("eighths", [8, 4, 2, 1])
def test_a_prefix_is_chosen_by_its_own_mean(eighths: int) -> None:
    choice = selector(eighths=eighths).choose(0, Everything())
    expected, score = chosen_by(eighths, 0.5)
    assert choice.chosen.tolist() == expected
    np.testing.assert_allclose(choice.score, score, atol=1e-5)


def test_a_full_run_tells_what_every_prefix_would_have_chosen() -> None:
    found = selector(eighths=8).choose(0, Everything()).compared
    full, score = chosen_by(8, 0.5)
    for name, eighths in (("half", 4), ("quarter", 2), ("eighth", 1)):
        chosen, prefix_score = chosen_by(eighths, 0.5)
        overlap = len(set(chosen) & set(full)) / CHOSEN
        drift = (IS_REPLAY[chosen].sum() - IS_REPLAY[full].sum()) / CHOSEN
        ranks = [np.argsort(np.argsort(values)) for values in (score, prefix_score)]
        assert found[f"rod/prefix/{name}/overlap"] == pytest.approx(overlap)
        assert found[f"rod/prefix/{name}/share_drift"] == pytest.approx(drift)
        correlation = np.corrcoef(ranks)[0, 1]
        assert found[f"rod/prefix/{name}/rank_correlation"] == pytest.approx(correlation)
        assert 0.4 < overlap < 1  # the test saw prefixes that choose otherwise


def test_a_run_that_scores_a_prefix_knows_no_more() -> None:
    assert selector(eighths=4).choose(0, Everything()).compared == {}


def test_the_same_scores_are_perfectly_faithful() -> None:
    choice = selector(eighths=8).choose(0, Everything())
    same = fidelity(choice, choice.score, Joint(0.5))
    assert (same.overlap, same.share_drift) == (1, 0)
    assert same.rank_correlation == pytest.approx(1)


def test_equal_values_share_their_rank() -> None:
    # ranks 1.5 1.5 3 4 and 1 2.5 2.5 4: covariance 1.125, variances 1.125
    found = rank_correlation(np.array([1.0, 1, 2, 3]), np.array([5.0, 6, 6, 7]))
    a, b = np.array([1.5, 1.5, 3, 4]) - 2.5, np.array([1, 2.5, 2.5, 4]) - 2.5
    assert found == pytest.approx(float(a @ b / math.sqrt((a @ a) * (b @ b))))
    assert math.isnan(rank_correlation(np.ones(3), np.arange(3.0)))
