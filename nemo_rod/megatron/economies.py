"""Training in less memory: activations computed again, and the optimizer on the host."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from nemo_rod.config import Optimisation


def recompute(provider: Any, kind: str) -> None:
    """Makes a provider's model compute activations again in backward passes.

    Scoring keeps none, and computes none twice. The kind is "none"; "selective" for the core of
    attention, which matters where attention is not fused; or "full" for every layer, of which only
    the input is kept.
    """
    if kind == "none":
        return
    provider.recompute_granularity = kind
    if kind == "selective":
        provider.recompute_modules = ["core_attn"]
    else:
        provider.recompute_method, provider.recompute_num_layers = "uniform", 1


def refuse_optimizer(optimisation: Optimisation, *, sharded: bool) -> None:
    """Refuses an optimizer that this machine lacks, or replicas, which may share its state.

    Raises:
        ValueError: with the key, what is missing and what to set instead.
    """
    if not optimisation.precision_aware_optimizer:
        return
    offload = optimisation.optimizer_offload
    engine = importlib.util.find_spec("transformer_engine") is not None
    for wrong, key, why, cure in (
        (not sharded, "precision_aware_optimizer", "needs an optimizer whose state replicas share",
         "set parallel.distributed_optimizer=true"),
        (offload and not torch.cuda.is_available(), "optimizer_offload",
         "moves the optimizer from a GPU to its host, and there is no GPU", "leave it out"),
        (not offload and not engine, "precision_aware_optimizer",
         "needs the Adam of TransformerEngine, which is not installed", "leave it out"),
    ):  # fmt: skip
        if wrong:
            raise ValueError(f"train.{key}=true {why}: {cure}.")
