"""Pools that follow a recorded run: its exact batches, or only its counts per role or source.

Shape suffixes: C = candidates.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from nemo_rod.roles import ROLES
from nemo_rod.selection.arrays import Ids
from nemo_rod.selection.blocks import Blocks
from nemo_rod.selection.candidates import Pool, Pools
from nemo_rod.selection.curriculum.header import refuse_other_store
from nemo_rod.selection.curriculum.log import Curriculum

GroupedBy = Literal["role", "source"]


class RecordedPools:
    """The blocks that a recorded run trained on, to train another model on its curriculum.

    With `TakeAll` this is the paper's curriculum transfer (Section "Cross-scale").

    Args:
        curriculum: the recorded curriculum; it stays open.
        store: the block store that the pools will be read from; None skips the check.

    Raises:
        ValueError: the curriculum was recorded with another tokenizer, block size or store.
    """

    def __init__(self, curriculum: Curriculum, store: Blocks | None = None) -> None:
        self._curriculum, self._header = curriculum, curriculum.header
        if store is not None:
            refuse_other_store(curriculum.path, self._header, store)

    @property
    def size(self) -> int:
        """Number of blocks per step: the recorded run's batch size."""
        return self._header.num_chosen

    def pool(self, step: int) -> Pool:
        """Returns the blocks trained on at a step, in the order of the recorded pool.

        Raises:
            ValueError: the step was not recorded.
        """
        first, end = self._header.first_step, self._curriculum.next_step
        if not first <= step < end:
            raise ValueError(
                f"{self._curriculum.path} holds steps {first} to {end - 1}, but step {step} is "
                "needed: set train.steps to the recorded number, or record a longer run"
            )
        block_ids = self._curriculum[step - first].trained_on
        return Pool(step, block_ids, self._header.is_replay(block_ids))


class FollowedPools(RecordedPools):
    """Random blocks with the counts per role, or per source, of a recorded run.

    With `TakeAll` these are controls for the component ablation: they preserve how much is replayed
    and when (by source, also how much of each source), but not which blocks.

    Those of the recorded run's `pools` always hold enough blocks. The other arguments, and the
    errors, are those of `RecordedPools`.
    """

    def __init__(
        self, pools: Pools, curriculum: Curriculum, *, by: GroupedBy, store: Blocks | None = None
    ) -> None:
        super().__init__(curriculum, store)
        self._pools, self._by = pools, by

    def pool(self, step: int) -> Pool:
        """Returns the first blocks of each group in the shuffled pool.

        Raises:
            ValueError: the step was not recorded, or the pool has too few blocks of a group.
        """
        counts = np.bincount(self._group(super().pool(step).block_ids))
        pool = self._pools.pool(step)
        group_C = self._group(pool.block_ids)
        taken_C = np.zeros(len(group_C), dtype=bool)
        for group, count in enumerate(counts):
            members = np.flatnonzero(group_C == group)
            if len(members) < count:
                sources = [f"source {row.name}" for row in self._header.sources]
                name = (sources if self._by == "source" else ROLES)[group]
                raise ValueError(
                    f"step {step} of {self._curriculum.path} trained on {count} blocks of {name}, "
                    f"but the pool to draw from holds {len(members)}: draw from the same pools, "
                    "with the seed, balance and number of candidates of that run"
                )
            taken_C[members[:count]] = True
        return Pool(step, pool.block_ids[taken_C], pool.is_replay_C[taken_C])

    def _group(self, block_ids: Ids) -> Ids:
        if self._by == "role":
            return self._header.is_replay(block_ids).astype(np.int64)
        return self._header.source_index(block_ids)


def replay_share(curriculum: Curriculum) -> float:
    """Returns the share of replay among all blocks that a recorded run trained on."""
    blocks = [curriculum.header.is_replay(record.trained_on) for record in curriculum]
    return float(np.concatenate(blocks).mean()) if blocks else 0.0
