import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rod.selection import SourceRow
from nemo_rod.selection.forgetting import forgetting_by_source, validation_forgetting, weighted_loss
from nemo_rod.selection.held_out import source_losses

BASE = {"web": 2.0, "code": 1.0, "math": 3.0}
TRAINED = {"web": 2.5, "code": 0.75, "math": 3.25}

losses = st.floats(min_value=0.0, max_value=20.0)


def test_a_plain_example_by_hand():
    assert forgetting_by_source(TRAINED, BASE) == {"web": 0.5, "code": -0.25, "math": 0.25}
    # capped by source before the weighted sum: (6 * .5 + 1 * 0 + 1 * .25) / 8
    assert validation_forgetting(TRAINED, BASE, {"web": 6, "code": 1, "math": 1}) == 3.25 / 8
    assert validation_forgetting(BASE, BASE, {"web": 3, "code": 2, "math": 1}) == 0.0
    # without weights every source counts the same, and at weight zero not at all
    assert validation_forgetting(TRAINED, BASE) == 0.25
    assert weighted_loss(BASE) == 2.0
    assert weighted_loss(BASE, {"web": 1, "code": 1, "math": 0}) == 1.5


@given(
    rows=st.lists(st.tuples(losses, losses, st.integers(1, 10**9)), min_size=1, max_size=20),
    scale=st.sampled_from([0.5, 2.0, 1024.0]),
)
def test_f_val_is_the_sum_written_out(rows, scale):
    trained = {str(i): row[0] for i, row in enumerate(rows)}
    base = {str(i): row[1] for i, row in enumerate(rows)}
    weights = {str(i): float(row[2]) for i, row in enumerate(rows)}
    total = sum(weights[name] * max(0.0, trained[name] - base[name]) for name in weights)
    expected = total / sum(weights.values())
    value = validation_forgetting(trained, base, weights)
    assert math.isclose(value, expected, rel_tol=1e-12, abs_tol=1e-15)
    assert value >= 0.0
    # Only the proportions of the weights matter, and powers of two keep the float exact.
    assert value == validation_forgetting(trained, base, {n: w * scale for n, w in weights.items()})


def test_held_out_losses_are_means_over_the_blocks_that_have_targets():
    """A block without any, such as one that is masked whole, has the loss -inf."""
    nats = np.array([1.0, -np.inf, 3.0, 9.0, -np.inf, -np.inf, np.nan], dtype=np.float32)
    scorer = SimpleNamespace(losses=lambda block_ids: nats[block_ids])
    rows = [("web", 0, 4), ("masked", 4, 2), ("diverged", 6, 1)]
    sources = [SourceRow(name, "replay", start, count) for name, start, count in rows]
    losses = source_losses(scorer, sources, num_blocks=3)
    expected = {"validation/replay/web/loss": 2.0, "validation/replay/diverged/loss": math.nan}
    assert losses == pytest.approx(expected, nan_ok=True)
