"""Compares held-out losses of exported models with those of Hugging Face's own classes.

Run as `python -m nemo_rod.lab.rehearsal.exported_losses JOB.json`. Shape suffixes: C = blocks,
S = tokens of a block.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_rod.corpus.store import BlockStore
from nemo_rod.files import read_json, write_json
from nemo_rod.run.run_folder import RunFolder

# Nats per token, the mean of a source, against Hugging Face's model in fp32: the effect of
# rounding. A single misplaced tensor has a larger one.
TOLERANCE = {"fp32": 1e-5, "bf16": 0.01}
ROUNDING = 1e-6  # relative; the effect of the order of fp32 sums on a score of an expert
_NUDGES = 24
_BLOCKS_PER_PASS = 16


def main() -> int:
    """Writes the largest difference of every arm over its sources; returns the exit status."""
    job = read_json(Path(sys.argv[1]), "run_dir", "arms", "recipe", "precision", "out")
    results, tolerance = RunFolder(Path(job["run_dir"]), job["recipe"]), TOLERANCE[job["precision"]]
    try:
        store = BlockStore(results.blocks, split="holdout")
        largest: dict[str, float] = {}
        for arm in job["arms"]:
            model = load(results.checkpoint(arm))
            losses = read_json(results.arm(arm) / "evaluation.json", "loss")["loss"]
            largest[arm] = max(
                distance(
                    model,
                    store.tokens(source.start + np.arange(source.count)),
                    losses[source.role][source.name],
                    tolerance,
                )
                for source in store.sources
            )
            if not largest[arm] <= tolerance:
                raise ValueError(
                    f"The held-out losses of {arm} differ by up to {largest[arm]:.2g} nats from "
                    f"those of Hugging Face's {type(model).__name__} on the same weights, expected "
                    f"at most {tolerance:g}: the checkpoint and its conversion do not agree."
                )
    except ValueError as error:
        print(f"nemo-rod error on rank 0: {' '.join(str(error).split())}", flush=True)
        return 1
    write_json(Path(job["out"]), {"difference": largest, "precision": job["precision"]})
    return 0


def distance(model: Any, tokens_CS: NDArray[np.int32], loss: float, tolerance: float) -> float:
    """Returns the smallest distance of a mean loss from a model's, over ties of the model's router.

    Two experts' scores of a token may be equal but for rounding. Then either may be chosen, and the
    loss jumps from one choice to the other by more than rounding moves it otherwise. So a loss
    beyond the tolerance is also compared with those of weights that differ by a rounding. Without
    such a tie these weights move the loss by far less than the tolerance.

    Returns:
        The smallest difference, nats per token.
    """
    smallest = abs(float(block_losses(model, tokens_CS).mean()) - loss)
    if smallest <= tolerance:
        return smallest
    weights, generator = list(model.parameters()), torch.Generator().manual_seed(0)
    originals = [weight.detach().clone() for weight in weights]
    for _ in range(_NUDGES):
        for weight, original in zip(weights, originals, strict=True):
            noise = torch.randn(original.shape, generator=generator)
            weight.data.copy_(original * (1 + ROUNDING * noise))
        smallest = min(smallest, abs(float(block_losses(model, tokens_CS).mean()) - loss))
        if smallest <= tolerance:
            break
    for weight, original in zip(weights, originals, strict=True):
        weight.data.copy_(original)
    return smallest


def load(folder: Path) -> Any:
    """Returns the model of a checkpoint in fp32, of the class that its config names."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    model: Any = getattr(transformers, config.architectures[0])
    return model.from_pretrained(folder, config=config, dtype=torch.float32).eval()


def block_losses(model: Any, tokens_CS: NDArray[np.int32]) -> NDArray[np.float64]:
    """Returns the mean loss of the next-token targets of every block, nats, `[C]`."""
    means = []
    for start in range(0, len(tokens_CS), _BLOCKS_PER_PASS):
        ids = torch.from_numpy(tokens_CS[start : start + _BLOCKS_PER_PASS].astype(np.int64))
        with torch.no_grad():
            logits = model(input_ids=ids).logits[:, :-1].double()
        losses = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), ids[:, 1:], reduction="none"
        )
        means.append(losses.mean(1).numpy())
    return np.concatenate(means)


if __name__ == "__main__":
    sys.exit(main())
