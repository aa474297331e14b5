"""Merging of two Hugging Face checkpoints, directly from their safetensors files.

Works on one output shard at a time; the inputs may be sharded differently. The output has the
base's tensors, in the base's order and under their published names, and the base's configuration
and tokenizer files. Multi-token predictors that only the base has are left out: they would predict
for a model that is not there any more.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rod.files import interpreting, read_json
from nemo_rod.lab.merging.formula import (
    interpolate,
    refuse_low_rank,
    refuse_quantised,
    refuse_shapes,
    refuse_unmatched,
)
from nemo_rod.published import open_to_readers, published_names

if TYPE_CHECKING:
    import torch

_COPIED_SUFFIXES = frozenset({".json", ".txt", ".model", ".py", ".jinja", ".tiktoken"})
_INDEX_NAME = "model.safetensors.index.json"
_PREDICTORS = "mtp."  # of further tokens, which training leaves out


def merge(
    base_dir: Path, adapted_dir: Path, out_dir: Path, lam: float, max_shard_bytes: int
) -> None:
    """Fills `out_dir` with the merge; see `merge_checkpoints` for the arguments.

    Raises:
        ValueError: If the checkpoints do not match.
    """
    with _Checkpoint.open(base_dir) as base, _Checkpoint.open(adapted_dir) as adapted:
        aliases = _check_tensors(base, adapted)
        shards = _plan_shards(base, _merged_names(base, adapted), max_shard_bytes)
        weight_map = {}
        total_size = 0
        for index, names in enumerate(shards):
            file_name = _shard_name(index, len(shards))
            tensors = {
                name: interpolate(
                    name, base.tensor(name), adapted.tensor(aliases.get(name, name)), lam
                )
                for name in names
            }
            _save(tensors, out_dir / file_name)
            weight_map.update(dict.fromkeys(names, file_name))
            total_size += sum(tensor.nbytes for tensor in tensors.values())
            del tensors
    if len(shards) > 1:
        index_json = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        (out_dir / _INDEX_NAME).write_text(json.dumps(index_json, indent=2) + "\n")
    _copy_companions(base_dir, out_dir)
    open_to_readers(out_dir)


class _Checkpoint:
    """Lazy view of a checkpoint folder: tensors by name, across its shards.

    The names are the published ones, so that checkpoints written by different programs agree.
    """

    def __init__(self, folder: Path, stored: dict[str, tuple[Any, str]]) -> None:
        self.folder = folder
        self._stored = stored  # published name -> (open file, stored name)

    @classmethod
    @contextmanager
    def open(cls, folder: Path) -> Iterator[_Checkpoint]:
        from safetensors import SafetensorError, safe_open

        files, published = _weight_files(folder), published_names(folder)
        with ExitStack() as stack:
            stored = {}
            for file in files:
                try:
                    handle = stack.enter_context(safe_open(file, framework="pt"))
                except SafetensorError as error:
                    raise ValueError(
                        f"{file} is no whole safetensors file ({error}): restore it from a copy"
                    ) from None
                names = handle.keys()
                stored.update({published.get(name, name): (handle, name) for name in names})
            yield cls(folder, stored)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._stored)

    def tensor(self, name: str) -> torch.Tensor:
        handle, stored = self._stored[name]
        tensor: torch.Tensor = handle.get_tensor(stored)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        handle, stored = self._stored[name]
        return tuple(handle.get_slice(stored).get_shape())

    def dtype(self, name: str) -> str:
        """Returns the dtype as spelled by safetensors, e.g. "BF16"."""
        handle, stored = self._stored[name]
        return str(handle.get_slice(stored).get_dtype())


def _weight_files(folder: Path) -> list[Path]:
    # transformers searches for weights in this order
    index = folder / _INDEX_NAME
    if (folder / "model.safetensors").is_file():
        files = [folder / "model.safetensors"]
    elif index.is_file():
        with interpreting(index):
            weight_map: dict[str, str] = read_json(index, "weight_map")["weight_map"]
            files = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [file.name for file in files if not file.is_file()]
    if not files or missing:
        found = f"lacks {missing[0]}, which {_INDEX_NAME} names" if missing else "holds none"
        raise ValueError(
            f"{folder} {found}, expected a checkpoint in safetensors files; "
            f"export the model in Hugging Face format first"
        )
    return files


def _check_tensors(base: _Checkpoint, adapted: _Checkpoint) -> dict[str, str]:
    """Checks that the checkpoints match and returns tied names of the base -> adapted's names."""
    for side in (base, adapted):
        refuse_low_rank(side.names, side.folder)
    ours, theirs = set(base.names), set(adapted.names)
    only_base = [name for name in _merged_names(base, adapted) if name not in theirs]
    only_adapted = [name for name in adapted.names if name not in ours]
    common = [name for name in base.names if name in theirs]
    aliases = {name: _tied_to(base, name, common) for name in only_base}
    refuse_unmatched([name for name, tied in aliases.items() if tied is None], adapted.folder)
    refuse_unmatched(
        [name for name in only_adapted if _tied_to(adapted, name, common) is None], base.folder
    )
    for name in common:
        refuse_shapes(name, base.shape(name), adapted.shape(name), base.folder, adapted.folder)
        for checkpoint in (base, adapted):
            dtype = checkpoint.dtype(name)
            refuse_quantised(name, dtype, dtype.startswith(("F4", "F6_", "F8_")), checkpoint.folder)
    return {name: tied for name, tied in aliases.items() if tied is not None}


def _merged_names(base: _Checkpoint, adapted: _Checkpoint) -> list[str]:
    """Returns the base's tensors, without multi-token predictors if the adapted model has none."""
    if any(name.startswith(_PREDICTORS) for name in adapted.names):
        return [*base.names]
    return [name for name in base.names if not name.startswith(_PREDICTORS)]


def _tied_to(checkpoint: _Checkpoint, name: str, candidates: list[str]) -> str | None:
    """Returns the matrix among `candidates` of which `name` is a bit-equal copy, if any.

    Vectors are never tied, and are often equal by chance: norms of ones, biases of zeros.
    """
    import torch

    if len(checkpoint.shape(name)) < 2:
        return None
    kind = (checkpoint.shape(name), checkpoint.dtype(name))
    for other in candidates:
        if (checkpoint.shape(other), checkpoint.dtype(other)) == kind and torch.equal(
            checkpoint.tensor(name), checkpoint.tensor(other)
        ):
            return other
    return None


def _plan_shards(
    checkpoint: _Checkpoint, names: list[str], max_shard_bytes: int
) -> list[list[str]]:
    """Returns names per output shard, in the checkpoint's order, within the limit if possible."""
    shards: list[list[str]] = [[]]
    size = 0
    for name in names:
        bits = int("".join(filter(str.isdigit, checkpoint.dtype(name))) or 8)  # "BF16", "BOOL"
        num_bytes = math.prod(checkpoint.shape(name)) * bits // 8
        if shards[-1] and size + num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += num_bytes
    return shards


def _shard_name(index: int, count: int) -> str:
    if count == 1:
        return "model.safetensors"
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _save(tensors: dict[str, torch.Tensor], file: Path) -> None:
    from safetensors.torch import save_file

    # transformers refuses files whose metadata does not name the framework
    save_file({name: t.contiguous() for name, t in tensors.items()}, file, {"format": "pt"})


def _copy_companions(source_dir: Path, out_dir: Path) -> None:
    """Copies configuration, tokenizer and licence files, not weights and stage manifests."""
    for file in sorted(source_dir.iterdir()):
        skipped = file.name == "manifest.json" or file.name.endswith(".index.json")
        wanted = file.suffix in _COPIED_SUFFIXES or file.stem.upper() in ("LICENSE", "NOTICE")
        if file.is_file() and wanted and not skipped:
            shutil.copyfile(file, out_dir / file.name)
