"""How a reference pass deals its blocks to replicas."""

import itertools

import numpy as np
import numpy.typing as npt
import pytest

from nemo_rod.selection import ReferenceManifest
from nemo_rod.selection.arrays import Ids
from nemo_rod.selection.dealing import scored_blocks, scoring_passes


def manifest(stop: int, *lengths: int) -> ReferenceManifest:
    return ReferenceManifest(
        model="m", tokenizer="t", store="s", block_size=8, lengths=lengths, start=5, stop=stop,
        precision="fp32",
    )  # fmt: skip


def passes(missing: Ids, m: ReferenceManifest, size: int, replicas: int) -> list[tuple[int, ...]]:
    """Returns the micro-batches of all replicas, as the scorer cuts its share into them."""
    batches: list[tuple[int, ...]] = []
    scored: list[int] = []

    def losses_at(ids: Ids, lengths: tuple[int, ...]) -> npt.NDArray[np.float32]:
        cut, count = scoring_passes(len(ids), micro_batch_size=size, replicas=replicas)
        assert cut == size and cut * count * replicas == len(ids)
        batches.extend(map(tuple, ids.reshape(-1, cut).tolist()))
        return np.zeros((len(ids), len(lengths)), dtype=np.float32)

    for ids, _ in scored_blocks(missing, m, losses_at, micro_batch_size=size, replicas=replicas):
        scored += ids.tolist()
    assert scored == missing.tolist()  # every block once, in order
    return batches


@pytest.mark.parametrize("size, replicas", [*itertools.product([1, 3, 4], [1, 2, 4])])
def test_what_is_missing_of_a_part_keeps_its_neighbours(size, replicas):
    """Otherwise losses differ in the last bits by layout, and by where a pass was interrupted."""
    dice = np.random.default_rng(size * 10 + replicas)
    for count in (1, 9, 257, 700, 1300):
        m = manifest(5 + count, 8)
        for share in (0.0, 0.3, 1.0):
            missing = 5 + np.flatnonzero(dice.random(count) < share)
            alone = set(passes(missing, m, size, 1))
            for done in range(m.num_parts + 1):
                left = missing[m.part_of(missing) >= done]
                assert set(passes(left, m, size, replicas)) <= alone


def test_missing_blocks_are_scored_once_each_and_samples_without_targets_become_zero():
    m = manifest(300, 8, 2)
    missing = np.array([5, 7, 8, 260, 299])

    def losses_at(ids: Ids, lengths: tuple[int, ...]) -> npt.NDArray[np.float32]:
        losses = ids[:, None] / np.float32(lengths)
        losses[ids == 8] = -np.inf
        return losses.astype(np.float32)

    scored = [*scored_blocks(missing, m, losses_at, micro_batch_size=2, replicas=2)]
    ids, losses = map(np.concatenate, zip(*scored, strict=True))
    assert ids.tolist() == missing.tolist()
    expected = np.where(missing == 8, 0, missing)[:, None] / np.array([8, 2])
    assert np.array_equal(losses, expected.astype(np.float32))
