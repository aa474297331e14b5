"""Held-out losses per source, computed with any block scorer."""

from __future__ import annotations

import numpy as np

from nemo_rod.selection.blocks import Blocks
from nemo_rod.selection.selector import BlockScorer

START_FILE = "validation_start.json"  # of a run's folder: the losses before its first step


def source_losses(scorer: BlockScorer, store: Blocks, *, num_blocks: int) -> dict[str, float]:
    """Returns `validation/<role>/<source>/loss` of the current model on held-out blocks.

    It is the mean over the first `num_blocks` blocks of a source, nats per token.
    """
    ids = {
        f"validation/{source.role}/{source.name}/loss": source.start
        + np.arange(min(source.count, num_blocks))
        for source in store.sources
    }
    loss = scorer.losses(np.concatenate(list(ids.values()))).astype(np.float64)
    starts = np.cumsum([0, *(len(part) for part in ids.values())])
    return {
        name: float(loss[start:stop].mean())
        for name, start, stop in zip(ids, starts, starts[1:], strict=False)
    }
