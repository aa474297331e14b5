"""Compares held-out losses of exported models with those of Hugging Face's own classes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nemo_rod.checkpoints.losses import TOLERANCE, distance, load
from nemo_rod.corpus.store import BlockStore
from nemo_rod.files import read_json
from nemo_rod.run.run_folder import RunFolder


def largest_differences(results: RunFolder, arms: Sequence[str], precision: str) -> list[float]:
    """Returns the largest difference of a source's mean loss of every arm, in nats per token.

    Raises:
        ValueError: an arm's is larger than rounding explains.
    """
    tolerance, largest = TOLERANCE[precision], list[float]()
    store = BlockStore(results.blocks, split="holdout")
    for arm in arms:
        model = load(results.checkpoint(arm))
        losses = read_json(results.arm(arm) / "evaluation.json", "loss")["loss"]
        largest.append(
            max(
                distance(
                    model,
                    store.tokens(source.start + np.arange(source.count)),
                    losses[source.role][source.name],
                    tolerance,
                )
                for source in store.sources
            )
        )
        if not largest[-1] <= tolerance:
            raise ValueError(
                f"The held-out losses of {arm} differ by up to {largest[-1]:.2g} nats from "
                f"those of Hugging Face's {type(model).__name__} on the same weights, expected "
                f"at most {tolerance:g}: the checkpoint and its conversion do not agree."
            )
    return largest
