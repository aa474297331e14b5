"""Refuses incomplete loads of a checkpoint, on which Megatron-Bridge only warns."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

from nemo_rod.megatron.ranks import of_any_rank, on_all_ranks

# A value that no weight takes and that fp32 and bf16 both represent exactly. (A diverged weight
# could be NaN.)
_UNSET = -(2.0**100)
# Tensors that Megatron-Bridge skips if the model class has no place for them: multi-token
# predictors, which are turned off, vision towers, and tables that models recompute.
_LEFT_OUT = re.compile(r"^mtp\.|(^|\.)visual\.|rotary_emb\.|\.masked_bias$")


def refuse_gaps(provider: Any, state: Any, hf: str) -> None:
    """Makes a provider raise unless every parameter is set and every relevant tensor is read.

    Args:
        provider: Megatron-Bridge's provider, which loads the weights before wrapping the model.
        state: the checkpoint's tensors, as Megatron-Bridge reads them.
        hf: name of the checkpoint.
    """
    read: set[str] = set()
    source = state.source
    load_tensors = source.load_tensors

    def note(names: list[str]) -> Any:
        read.update(names)
        return load_tensors(names)

    def mark(model: list) -> list:
        source.load_tensors = note
        with torch.no_grad():
            for _, parameter in _parameters(model):
                parameter.fill_(_UNSET)
        return model

    def check(model: list) -> list:
        source.load_tensors = load_tensors
        unset = [name for name, parameter in _parameters(model) if (parameter == _UNSET).any()]
        relevant = sorted(name for name in source.get_all_keys() if _counts(name, provider))
        unread = on_all_ranks([name not in read for name in relevant])
        names = [name for name, is_unread in zip(relevant, unread, strict=True) if is_unread]
        _refuse(hf, sorted({*of_any_rank(unset)}), names)
        return model

    provider.register_pre_wrap_hook(mark, prepend=True)
    provider.register_pre_wrap_hook(check)


def _parameters(model: list) -> list[tuple[str, torch.nn.Parameter]]:
    return [pair for chunk in model for pair in chunk.named_parameters()]


def _counts(name: str, provider: Any) -> bool:
    """Returns whether the model would be incomplete without this tensor of the checkpoint."""
    if name == "lm_head.weight" and provider.share_embeddings_and_output_weights:
        return False
    layer = re.search(r"\.layers\.(\d+)\.", name)  # multi-token predictors may follow the last
    return not _LEFT_OUT.search(name) and not (layer and int(layer[1]) >= provider.num_layers)


def _refuse(hf: str, unset: list[str], unread: list[str]) -> None:
    if not unset and not unread:
        return
    found = [
        f"{len(names)} {what} ({_first(names)})"
        for names, what in (
            (unset, "parameter(s) of the model without a tensor"),
            (unread, "tensor(s) without a place in the model"),
        )
        if names
    ]
    raise ValueError(
        f"{hf} leaves {' and '.join(found)}: give a checkpoint whose tensors have the published "
        "names and fit its config.json."
    )


def _first(names: Iterable[str], count: int = 3) -> str:
    names = list(names)
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")
