"""What weights were trained on: saved with every checkpoint, and checked before one is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.bridge.training.config import DatasetBuildContext, DatasetProvider
from omegaconf import OmegaConf
from packaging.version import Version

from nemo_rod.selection import CurriculumHeader

# field of the curriculum's header -> what a user calls it
IDENTITY = {
    "store": "block store",
    "tokenizer": "tokenizer",
    "references": "references",
    "config": "configuration",
    "seed": "seed",
    "block_size": "block size",
}


@dataclass
class ChosenBlocks(DatasetProvider):
    """Stands where the trainer wants a dataset; the selector hands it blocks by id instead.

    The trainer writes its configuration, and with it this, into every checkpoint's
    `run_config.yaml`.

    Attributes:
        seq_length: tokens per block.
        identity: what decides which blocks are chosen, one value for each key of `IDENTITY`.
        versions: of NVIDIA's packages that train.
    """

    seq_length: int = 0
    identity: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def build_datasets(self, context: DatasetBuildContext) -> tuple:
        """Iterators that nobody reads."""
        return _nothing(), None, None


def _nothing() -> Iterator[dict[str, torch.Tensor]]:
    raise AssertionError("the selector replaces the trainer's own data")
    yield {}


def identity_of(header: CurriculumHeader) -> dict[str, Any]:
    """What a run's checkpoints are only valid with."""
    return {key: getattr(header, key) for key in IDENTITY}


def versions() -> dict[str, str]:
    """What is installed of the packages that write checkpoints."""
    import megatron.core
    from megatron.bridge import package_info

    found = {
        "megatron-core": megatron.core.__version__,
        "Megatron-Bridge": package_info.__version__,
    }
    # core adds the commit of whatever repository it is run in
    return {package: Version(version).public for package, version in found.items()}


def refuse_foreign_checkpoint(checkpoints: Path, expected: dict[str, Any]) -> None:
    """Refuses to go on from weights that were trained on something else.

    Args:
        checkpoints: the trainer's folder of checkpoints; it need not exist.
        expected: of this run, as `identity_of` gives it.

    Raises:
        ValueError: naming everything that differs, or a package that is older than the one that
            saved: Megatron reads older checkpoints, and not newer ones.
    """
    latest = checkpoints / "latest_checkpointed_iteration.txt"
    if not latest.exists():
        return
    folder = checkpoints / f"iter_{int(latest.read_text()):07d}"
    config: Any = OmegaConf.load(folder / "run_config.yaml")
    saved = config.dataset.get("identity") or {}
    differences = [
        f"{name} {saved.get(key)!r} (this run: {expected[key]!r})"
        for key, name in IDENTITY.items()
        if saved.get(key) != expected[key]
    ]
    if differences:
        raise ValueError(
            f"{folder} was trained with {', '.join(differences)}: go on with what it was trained "
            f"with, or remove {checkpoints.parent} to begin again."
        )
    installed = versions()
    for package, version in (config.dataset.get("versions") or {}).items():
        if Version(installed[package]) < Version(version):
            raise ValueError(
                f"{folder} was saved by {package} {version}, and {installed[package]} is "
                f"installed, which does not read newer checkpoints: go on with {version} or newer, "
                f"or remove {checkpoints.parent} to begin again."
            )
