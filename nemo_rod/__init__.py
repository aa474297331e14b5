"""Replay on Demand: let a language model choose what to train on while it learns a new domain."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# For type checkers and editors; `__getattr__` imports the same names when they are used.
if TYPE_CHECKING:
    from nemo_rod.corpus.hashing import block_hash as block_hash
    from nemo_rod.corpus.hashing import is_holdout as is_holdout
    from nemo_rod.corpus.pack import pack as pack
    from nemo_rod.corpus.store import BlockStore as BlockStore
    from nemo_rod.hosts.plain_torch.batches import RoDBatches as RoDBatches
    from nemo_rod.hosts.swap_in import install as install
    from nemo_rod.megatron.rod_selector import RoDSelector as RoDSelector
    from nemo_rod.selection.candidates import Candidates as Candidates
    from nemo_rod.selection.candidates import Pool as Pool
    from nemo_rod.selection.curriculum.log import Curriculum as Curriculum
    from nemo_rod.selection.forgetting import validation_forgetting as validation_forgetting
    from nemo_rod.selection.policies import FixedShare as FixedShare
    from nemo_rod.selection.policies import Joint as Joint
    from nemo_rod.selection.policies import TakeAll as TakeAll
    from nemo_rod.selection.policies import reducible_loss as reducible_loss
    from nemo_rod.selection.references import References as References

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
    "RoDBatches": "nemo_rod.hosts.plain_torch",
    "install": "nemo_rod.hosts.swap_in",
    "validation_forgetting": "nemo_rod.selection.forgetting",
}

__all__ = ["__version__", *_HOMES]


if not TYPE_CHECKING:  # a checker would take any name

    def __getattr__(name: str) -> Any:
        # A public name is imported when it is first used, so that `import nemo_rod` stays light and
        # never drags torch or Megatron in.
        if name in _HOMES:
            return getattr(importlib.import_module(_HOMES[name]), name)
        raise AttributeError(f"module 'nemo_rod' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
