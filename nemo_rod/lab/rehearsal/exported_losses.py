"""Held-out losses of exported models, compared with those of Hugging Face's own classes.

Shape suffixes: C = blocks, S = tokens of a block.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_rod.corpus.store import BlockStore
from nemo_rod.files import read_json, write_json
from nemo_rod.run.run_folder import RunFolder

# Nats per token, the mean of a source, against Hugging Face's model in fp32: what rounding may do.
# One misplaced tensor does more.
TOLERANCE = {"fp32": 1e-5, "bf16": 0.01}
ROUNDING = 1e-6  # of a weight: what the order of fp32 sums does to a score of an expert
_NUDGES = 24
_AT_ONCE = 16  # blocks per forward pass


def compare(job: dict[str, Any]) -> None:
    """Writes the largest difference of every arm, over the sources.

    Raises:
        ValueError: if one is larger than rounding explains.
    """
    results = RunFolder(Path(job["run_dir"]), job["recipe"])
    store = BlockStore(results.blocks, split="holdout")
    found = {}
    for arm in job["arms"]:
        model = load(results.checkpoint(arm))
        measured = read_json(results.arm(arm) / "evaluation.json", "loss")["loss"]
        tolerance, differences = TOLERANCE[job["precision"]], []
        for source in store.sources:
            tokens_CS = store.tokens(source.start + np.arange(source.count))
            loss = measured[source.role][source.name]
            differences.append(distance(model, tokens_CS, loss, tolerance))
        found[arm] = max(differences)
        if not found[arm] <= tolerance:
            raise ValueError(
                f"The held-out losses of {arm} differ by up to {found[arm]:.2g} nats from those of "
                f"Hugging Face's {type(model).__name__} on the same weights, expected at most "
                f"{tolerance:g}: the checkpoint and its conversion do not agree."
            )
    write_json(Path(job["out"]), {"difference": found, "precision": job["precision"]})


def distance(model: Any, tokens_CS: NDArray[np.int32], loss: float, tolerance: float) -> float:
    """Returns how far a mean loss is from a model's, whichever way the model's ties are broken.

    Two experts' scores of a token may be equal but for rounding. Then either may be chosen, and the
    loss jumps from one choice to the other by more than rounding moves it otherwise. So a loss
    beyond the tolerance is compared with those of weights that are a rounding away, too. Without
    such a tie they move it by far less than the tolerance.

    Returns:
        The smallest difference found, nats per token.
    """
    found = abs(float(block_losses(model, tokens_CS).mean()) - loss)
    if found <= tolerance:
        return found
    weights, generator = list(model.parameters()), torch.Generator().manual_seed(0)
    kept = [weight.detach().clone() for weight in weights]
    for _ in range(_NUDGES):
        for weight, own in zip(weights, kept, strict=True):
            noise = torch.randn(own.shape, generator=generator)
            weight.data.copy_(own * (1 + ROUNDING * noise))
        found = min(found, abs(float(block_losses(model, tokens_CS).mean()) - loss))
        if found <= tolerance:
            break
    for weight, own in zip(weights, kept, strict=True):
        weight.data.copy_(own)
    return found


def load(folder: Path) -> Any:
    """Returns the model of a checkpoint in fp32, of the class that its config names."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    model: Any = getattr(transformers, config.architectures[0])
    return model.from_pretrained(folder, config=config, dtype=torch.float32).eval()


def block_losses(model: Any, tokens_CS: NDArray[np.int32]) -> NDArray[np.float64]:
    """Returns the mean loss of the next-token targets of every block, nats, `[C]`."""
    means = []
    for start in range(0, len(tokens_CS), _AT_ONCE):
        ids = torch.from_numpy(tokens_CS[start : start + _AT_ONCE].astype(np.int64))
        with torch.no_grad():
            logits = model(input_ids=ids).logits[:, :-1].double()
        losses = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), ids[:, 1:], reduction="none"
        )
        means.append(losses.mean(1).numpy())
    return np.concatenate(means)
