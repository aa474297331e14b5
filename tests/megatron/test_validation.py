"""A validation is progress: the watch over ranks must not take a long one for a stalled rank."""

from __future__ import annotations

import pytest
from places import WORKERS
from tiny import LAYOUTS, Setting

from nemo_rod.corpus import BlockStore

BLOCKS, MICRO_BATCH, EVERY, STEPS = 8, 4, 3, 6  # as the job has them but for the last two


@pytest.mark.layouts
@pytest.mark.parametrize("layout", ["single", "dp2"])
def test_every_micro_batch_of_a_validation_beats(tiny: Setting, layout: str) -> None:
    parallel = LAYOUTS[layout]
    job = tiny.rod_job(tiny.root / f"beats_{layout}", parallel, steps=STEPS, validation_every=EVERY)
    said = tiny.torchrun(parallel.world_size, WORKERS / "validation_worker.py", job)
    held = BlockStore(tiny.blocks, split="holdout")
    blocks = sum(min(source.count, BLOCKS) for source in held.sources)
    per_replica = -(-blocks // parallel.data)
    beats = [-(-per_replica // MICRO_BATCH)] * (1 + STEPS // EVERY)  # before the first step, too
    assert min(beats) > 1
    for rank in said:
        assert f"beats {beats}" in rank.splitlines()
