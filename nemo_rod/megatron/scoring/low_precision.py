"""A scoring pass in a lower precision than training's, by TransformerEngine's own autocast.

Linear layers of TransformerEngine multiply in FP8 (E4M3) with one scale per tensor ("fp8") or, on
Blackwell, per 32 values ("mxfp8"), taken from the tensor itself: there is no history that a scoring
pass could move. Attention, norms, embedding and output layer keep the model's precision. Nothing is
in effect outside the pass.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nemo_rod.config import LOW_PRECISIONS
from nemo_rod.upstream import changes


def refuse_unavailable(precision: str | None) -> None:
    """Refuses a precision of scoring that this machine lacks; None is always available.

    Raises:
        ValueError: there is no GPU, no TransformerEngine, or a GPU without it.
    """
    if precision is None:
        return
    if not torch.cuda.is_available():
        missing = "a GPU, and torch sees none"
    elif importlib.util.find_spec("transformer_engine") is None:
        missing = "TransformerEngine, which is not installed"
    else:
        available, reason = changes.fp8_support(precision)
        if available:
            return
        reason = reason.strip().rstrip(".")
        missing = f"{precision.upper()}, which TransformerEngine does not offer here ({reason})"
    raise ValueError(
        f"scoring.precision={precision} needs {missing}: leave scoring.precision unset to score in "
        "model.precision, or run where it is available."
    )


def refuse_unfit(model: list, precision: str | None) -> None:
    """Refuses a model that cannot be scored in a precision; None fits every model.

    Raises:
        ValueError: the message names the layer or the setting.
    """
    if precision is None:
        return
    modules = [pair for chunk in model for pair in chunk.named_modules()]
    configs = [module.config for _, module in modules if hasattr(module, "config")]
    own = next((c for c in configs if getattr(c, "fp8", None) or getattr(c, "fp4", None)), None)
    experts = any(getattr(config, "num_moe_experts", None) for config in configs)
    linear = [pair for pair in modules if hasattr(pair[1], "fp8_meta")]
    weights = [
        (f"{name}.{key}", weight)
        for name, module in linear
        for key, weight in module.named_parameters(recurse=False)
        if weight.dim() == 2
    ]
    rows, columns = LOW_PRECISIONS[precision]
    odd = next((w for w in weights if w[1].shape[0] % rows or w[1].shape[1] % columns), None)
    if own is not None:
        reason = "the model itself is in FP8 or FP4, and so is its scoring"
    elif experts:
        reason = "experts get numbers of tokens that FP8 products do not take"
    elif not weights:
        reason = "none of the model's layers is one of TransformerEngine's"
    elif odd is not None:
        shape = "x".join(map(str, odd[1].shape))
        reason = f"{odd[0]} is {shape}, and FP8 products need multiples of {rows} and {columns}"
    else:
        return
    raise ValueError(
        f"scoring.precision={precision} does not work with this model: {reason}; leave "
        "scoring.precision unset."
    )


@contextmanager
def low_precision(model: list, precision: str | None) -> Iterator[None]:
    """Runs the forward passes of a block in a precision of scoring; None is the model's own."""
    if precision is None:
        yield
        return
    try:
        with changes.fp8_autocast(precision):
            yield
    finally:
        # weights in FP8, kept for the next micro-batch: one more byte per weight while training
        for chunk in model:
            for module in chunk.modules():
                getattr(module, "_fp8_workspaces", {}).clear()
