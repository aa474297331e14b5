"""How a reference pass deals its blocks to replicas."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

# importing Megatron warns of what a machine without CUDA lacks
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("megatron")]


def passes(missing: np.ndarray, size: int, replicas: int) -> list[list[tuple[int, ...]]]:
    """Returns the micro-batches of every replica, as the scorer cuts its share into them."""
    from nemo_rod.megatron.reference_pass import rows_to_write, whole_micro_batches
    from nemo_rod.selection.dealing import scoring_passes

    batches: list[list[tuple[int, ...]]] = [[] for _ in range(replicas)]
    written: list[int] = []
    for part in whole_micro_batches(missing, size, replicas):
        cut, count = scoring_passes(len(part), micro_batch_size=size, replicas=replicas)
        assert cut * count * replicas == len(part)
        for replica in range(replicas):
            rows = np.arange(replica * cut * count, (replica + 1) * cut * count)
            batches[replica] += map(tuple, part[rows].reshape(count, cut).tolist())
            written += part[rows[rows_to_write(part, missing, rows)]].tolist()
    assert sorted(written) == np.flatnonzero(missing).tolist()  # every block by one replica, once
    return batches


@pytest.mark.parametrize("size, replicas", [*itertools.product([1, 3, 4], [1, 2, 4])])
def test_every_block_is_written_once_and_keeps_its_neighbours(size: int, replicas: int) -> None:
    """Otherwise two logs of one block may differ in the last bits, and never be joined."""
    dice = np.random.default_rng(size * 10 + replicas)
    for count in (1, 9, 12, 13, 131):
        whole = np.ones(count, bool)
        alone = set(itertools.chain(*passes(whole, size, 1)))
        for missing in (whole, dice.random(count) < 0.3, np.zeros(count, bool)):
            assert set(itertools.chain(*passes(missing, size, replicas))) <= alone
