"""Replay on Demand: let a language model choose what to train on while it learns a new domain."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "BlockStore": "nemo_rod.corpus.store",
    "pack": "nemo_rod.corpus.pack",
    "block_hash": "nemo_rod.corpus.hashing",
    "is_holdout": "nemo_rod.corpus.hashing",
    "Candidates": "nemo_rod.selection.candidates",
    "Pool": "nemo_rod.selection.candidates",
    "References": "nemo_rod.selection.references",
    "reducible_loss": "nemo_rod.selection.policies",
    "Joint": "nemo_rod.selection.policies",
    "FixedShare": "nemo_rod.selection.policies",
    "TakeAll": "nemo_rod.selection.policies",
    "Curriculum": "nemo_rod.selection.curriculum.log",
    "RoDSelector": "nemo_rod.megatron.rod_selector",
    "validation_forgetting": "nemo_rod.selection.forgetting",
}

_BESIDE = ["RoDBatches", "install", "watch"]  # registered by hosts (`parts.py`)
__all__ = ["__version__", *_BESIDE, *_HOMES]


def __getattr__(name: str) -> Any:
    # A public name is imported when it is first used, so that `import nemo_rod` stays light and
    # never drags torch or Megatron in.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _BESIDE:
        from nemo_rod import parts

        return parts.load("public_names", name)
    raise AttributeError(f"module 'nemo_rod' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
