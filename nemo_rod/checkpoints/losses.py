"""Losses of blocks by transformers' own class of a checkpoint.

Shape suffixes: C = blocks, S = tokens of a block, V = vocabulary.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_rod.checkpoints.published import tensor_kinds

# Nats per token, the mean of a few blocks, between two implementations of a model: the effect of
# rounding. A single misplaced tensor has a larger one.
TOLERANCE = {"fp32": 1e-5, "bf16": 0.01}
ROUNDING = 1e-6  # relative; the effect of the order of fp32 sums on a score of an expert
_CHUNKED = ("NemotronHMamba2Mixer", "Zamba2MambaMixer")
_NUDGES = 24
_BLOCKS_PER_PASS = 16


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


def load(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    **options: Any,
) -> Any:
    """Returns the model of a checkpoint, of the class that its config names."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    # what this machine may lack, of a kernel or a quantisation that no tensor has
    config._attn_implementation = config._experts_implementation = None
    config.output_attentions, config.return_dict = False, True
    if {dtype for dtype, _ in tensor_kinds(folder)} <= {"F64", "F32", "F16", "BF16"}:
        vars(config).pop("quantization_config", None)
    if not config.architectures:
        raise TypeError("architectures names none")
    named = getattr(transformers, config.architectures[0], None)
    if named is None:
        named, options["trust_remote_code"] = transformers.AutoModelForCausalLM, trust_remote_code
    model: Any = named
    return model.from_pretrained(folder, config=config, dtype=dtype, **options).eval()


def forgets_chunks(layer: Any) -> bool:
    """Whether a layer's torch code, unlike its kernels, loses the state of a text's earlier chunks.

    That is issue 47246 of transformers, whose torch code is another one from 5.15 on.
    """
    return type(layer).__name__ in _CHUNKED and hasattr(layer, "torch_forward")


def num_bytes(folder: Path, dtype: torch.dtype) -> int:
    """Returns the size of a checkpoint's weights in another type, without reading them."""
    return sum(math.prod(shape) for _, shape in tensor_kinds(folder)) * dtype.itemsize


def block_losses(model: Any, tokens_CS: NDArray[np.int32]) -> NDArray[np.float64]:
    """Returns the mean loss of the next-token targets of every block, nats, `[C]`."""
    means: list[float] = []
    for start in range(0, len(tokens_CS), _BLOCKS_PER_PASS):
        tokens = tokens_CS[start : start + _BLOCKS_PER_PASS].astype(np.int64)
        ids = torch.from_numpy(tokens).to(getattr(model, "device", "cpu"))
        with torch.no_grad():
            logits = model(input_ids=ids).logits[:, :-1]
            for logits_SV, targets_S in zip(logits, ids[:, 1:], strict=True):
                # block by block: of a large vocabulary, these are gigabytes
                means.append(
                    torch.nn.functional.cross_entropy(logits_SV.double(), targets_S).item()
                )
    return np.array(means)
