"""Makes two corpora as Megatron's `.bin` and `.idx` files: `python make_data.py FOLDER`.

Each is text of a Markov chain over 250 tokens; those of `new` and `old` differ in half their
transitions, as a language and its dialect might.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

EOD = 255  # of a vocabulary of 256


def chain(seed: int) -> np.ndarray:
    """Two likely successors of every token, `[250, 2]`."""
    return np.random.default_rng(seed).integers(0, 250, (250, 2))


def document(successors: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """One document of 50 to 400 tokens, int32, and its end."""
    tokens = [int(rng.integers(250))]
    for pick in rng.integers(0, 2, rng.integers(50, 400)):
        tokens.append(int(successors[tokens[-1], pick]))
    return np.array([*tokens, EOD], dtype=np.int32)


def make(folder: Path, *, documents: int = 300) -> None:
    """Writes `new/text_document` and `old/text_document` below a folder."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    old, new = chain(0), chain(0)
    new[125:] = chain(1)[125:]
    for number, (name, successors) in enumerate((("new", new), ("old", old))):
        rng = np.random.default_rng(10 + number)
        path = folder / name / "text_document"
        path.parent.mkdir(parents=True, exist_ok=True)
        builder = IndexedDatasetBuilder(f"{path}.bin", dtype=np.int32)
        for _ in range(documents):
            tokens = document(successors, rng)
            builder.add_document(torch.from_numpy(tokens), [len(tokens)])
        builder.finalize(f"{path}.idx")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
