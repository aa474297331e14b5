"""The identity of a run's data: saved with every checkpoint and checked before one is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.bridge.training.config import DatasetBuildContext, DatasetProvider
from omegaconf import OmegaConf
from packaging.version import Version

from nemo_rod.config import Parallel
from nemo_rod.megatron.whole_checkpoints import TRACKER
from nemo_rod.selection import CurriculumHeader

# field of the curriculum's header -> its name in messages
IDENTITY = {
    "store": "block store",
    "tokenizer": "tokenizer",
    "references": "references",
    "config": "configuration",
    "seed": "seed",
    "block_size": "block size",
}

# size of a layout -> its name in Megatron; a distributed optimizer's state depends on all of them
_SIZES = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "virtual_pipeline": "virtual_pipeline_model_parallel_size",
    "expert": "expert_model_parallel_size",
}


@dataclass
class ChosenBlocks(DatasetProvider):
    """Placeholder for the trainer's dataset; the selector supplies blocks by id instead.

    The trainer writes it with its configuration into every checkpoint's `run_config.yaml`.
    """

    seq_length: int = 0  # tokens per block
    # everything that determines the chosen blocks, one value per key of `IDENTITY`
    identity: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)  # NVIDIA's training packages -> version

    def build_datasets(self, context: DatasetBuildContext) -> tuple:
        """Returns iterators that are never read: the selector replaces the trainer's own data."""
        return iter(()), None, None


def header_identity(header: CurriculumHeader) -> dict[str, Any]:
    """Returns the values that the checkpoints of a run depend on."""
    return {key: getattr(header, key) for key in IDENTITY}


def versions() -> dict[str, str]:
    """Returns the installed versions of the packages that write checkpoints."""
    import megatron.core
    from megatron.bridge import package_info

    # megatron-core appends the commit of the repository it runs in
    return {
        "megatron-core": Version(megatron.core.__version__).public,
        "Megatron-Bridge": Version(package_info.__version__).public,
    }


def refuse_foreign_checkpoint(
    checkpoints: Path, expected: dict[str, Any], parallel: Parallel, *, sharded: bool
) -> None:
    """Refuses to resume from a checkpoint of other data or settings, or one that cannot be loaded.

    The trainer's checkpoint folder need not exist.

    Args:
        checkpoints: the folder.
        expected: a `header_identity`.
        parallel: the layout of this attempt.
        sharded: whether its optimizer is distributed.

    Raises:
        ValueError: the identity differs; an installed package is older than the one that saved the
            checkpoint, as Megatron reads older checkpoints, but not newer ones; or a distributed
            optimizer's state does not fit the layout.
    """
    latest = checkpoints / TRACKER
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
            f"{folder} was trained with {', '.join(differences)}: continue with the same, or "
            f"remove {checkpoints.parent} to begin again."
        )
    installed = versions()
    for package, version in (config.dataset.get("versions") or {}).items():
        if Version(installed[package]) < Version(version):
            raise ValueError(
                f"{folder} was saved by {package} {version}, and {installed[package]} is "
                f"installed, which does not read newer checkpoints: continue with {version} or "
                f"newer, or remove {checkpoints.parent} to begin again."
            )
    sizes = [
        (key, config.model.get(name) or 1, getattr(parallel, key)) for key, name in _SIZES.items()
    ]
    was_sharded = bool(config.optimizer.use_distributed_optimizer)
    rows = [("distributed_optimizer", was_sharded, sharded), *(sizes if sharded else [])]
    if differing := [f"parallel.{key}={was}".lower() for key, was, now in rows if was != now]:
        raise ValueError(
            f"{folder} was saved with {', '.join(differing)}: the state of a distributed optimizer "
            "can be resumed with another number of replicas alone; continue with the former "
            f"layout, or remove {checkpoints.parent} to begin again."
        )
