"""Kappa follows its target, and a run that is taken up again goes on with the same kappa."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from nemo_rod.selection import Joint, Pool
from nemo_rod.selection.candidates import Candidates
from nemo_rod.selection.kappa_controller import RANGE, Steering, held_out_replay

K = 32


def test_one_step_by_hand() -> None:
    share = Steering("share", target=0.3, gain=0.2, start=1.0)
    assert share.next_kappa(2.0, 0.3) == 2.0
    assert share.next_kappa(2.0, 0.7) == pytest.approx(2 * math.exp(-0.2))
    assert share.next_kappa(2.0, 0.25) == pytest.approx(2 * math.exp(0.2 / 6))
    assert share.next_kappa(2.0, 0.0) == pytest.approx(2 * math.exp(0.2))
    forgetting = Steering("forgetting", target=0.1, gain=0.2, start=1.0)
    assert forgetting.next_kappa(2.0, None) == 2.0
    assert forgetting.next_kappa(2.0, 0.15) == pytest.approx(2 * math.exp(0.2 * 0.5))
    assert forgetting.next_kappa(2.0, 0.0) == pytest.approx(2 * math.exp(-0.2))
    assert forgetting.next_kappa(RANGE, 9.0) == RANGE


def scores(step: int, pool: Pool) -> np.ndarray:
    """Scores as of a run: what is left to learn falls, what is forgotten stays small."""
    random = np.random.default_rng(step)
    learn = random.gamma(2, 0.3 * math.exp(-step / 300), len(pool.block_ids))
    return np.where(pool.is_replay, random.gamma(2, 0.1, len(learn)), learn).astype(np.float32)


def trained(steering: Steering, steps: int, *, killed_at: int | None = None) -> list[dict]:
    """A run that chooses by made-up scores; its rows go through JSON as metrics do."""
    pools = Candidates(num_adaptation=500, num_replay=900, batch_size=K, balance="exact")
    rows: list[str] = []
    kappa = steering.start
    for step in range(steps):
        if step == killed_at:  # all that is left of the run is what it wrote
            kappa = steering.resumed([json.loads(row) for row in rows], {})
        pool = pools.pool(step)
        chosen = Joint(kappa).select(scores(step, pool), pool.is_replay, K)
        share = float(pool.is_replay[chosen].mean())
        rows.append(json.dumps({"step": step, "rod/kappa": kappa, "rod/replay_share": share}))
        kappa = steering.next_kappa(kappa, share)
    return [json.loads(row) for row in rows]


@pytest.mark.parametrize("target", [0.2, 0.35, 0.55])
def test_the_share_settles_at_its_target(target: float) -> None:
    rows = trained(Steering("share", target=target, gain=0.1, start=1.0), 400)
    late = np.mean([row["rod/replay_share"] for row in rows[200:]])
    assert late == pytest.approx(target, abs=0.03)
    free = trained(Steering("share", target=target, gain=1e-9, start=1.0), 400)
    assert np.mean([row["rod/replay_share"] for row in free[200:]]) == pytest.approx(0.48, abs=0.02)


@pytest.mark.parametrize("killed_at", [1, 57, 199])
def test_resuming_from_the_rows_is_exact(killed_at: int) -> None:
    steering = Steering("share", target=0.25, gain=0.3, start=0.7)
    assert trained(steering, 200, killed_at=killed_at) == trained(steering, 200)


def test_forgetting_is_looked_at_in_the_rows_that_have_it() -> None:
    steering = Steering("forgetting", target=0.1, gain=0.2, start=1.0)
    base = {"a": 1.0, "b": 2.0}
    row = {"rod/kappa": 3.0, "validation/replay/a/loss": 1.4, "validation/replay/b/loss": 1.9}
    row["validation/adaptation/c/loss"] = 7.0
    assert held_out_replay(row) == {"a": 1.4, "b": 1.9}
    assert steering.found(row, base) == pytest.approx(0.2)
    assert steering.resumed([row], base) == pytest.approx(3 * math.exp(0.2))
    assert steering.resumed([row, {"rod/kappa": 2.5}], base) == 2.5
    assert steering.resumed([], base) == 1.0
