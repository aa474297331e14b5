"""Model merging: linear interpolation of two Hugging Face checkpoints (paper, "Model merging").

    theta_merge = (1 - lambda) * theta_base + lambda * theta_adapted

for every floating-point tensor. Works from the safetensors files alone, one output shard at a
time, so neither model is ever held whole; the inputs may be sharded differently. The output has
the base's tensors, in the base's order, and the base's configuration and tokenizer files.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MAX_SHARD_BYTES = 5 * 2**30
_COPIED_SUFFIXES = frozenset({".json", ".txt", ".model", ".py", ".jinja", ".tiktoken"})
_INDEX_NAME = "model.safetensors.index.json"


def merge_checkpoints(
    base_dir: str | Path,
    adapted_dir: str | Path,
    out_dir: str | Path,
    lam: float,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes the checkpoint `(1 - lam) * base + lam * adapted` to `out_dir`.

    Floating tensors are interpolated in float32 (float64 where either side is) and stored back in
    their own dtype; where the two sides' dtypes differ, in the one that holds both. The result is
    exact at `lam` 0 and 1 and wherever the two sides agree. Tensors of other dtypes are copied. A
    tied weight that only one side stores is taken from the tensor it is tied to.
    The folder appears whole or not at all.

    Args:
        base_dir: Checkpoint of the base model (`*.safetensors`, `config.json`, tokenizer).
        adapted_dir: Checkpoint of the adapted model, with the same tensors.
        out_dir: Folder to create; it must not exist, or be empty.
        lam: Weight of the adapted model, in [0, 1].
        max_shard_bytes: Size at which a new output shard is begun; bounds the memory used.

    Raises:
        ValueError: If `lam` is out of range, a folder holds no safetensors, `out_dir` is taken, or
            tensors are missing, foreign, quantised, of another shape, or differ without being of
            a floating dtype.
    """
    base_dir, adapted_dir, out_dir = Path(base_dir), Path(adapted_dir), Path(out_dir)
    if not 0.0 <= lam <= 1.0:
        raise ValueError(f"merge weight lambda is {lam}, expected a number from 0 to 1")
    if out_dir.exists() and any(out_dir.iterdir()):
        raise ValueError(f"{out_dir} already holds files; remove it or merge into another folder")
    partial_dir = out_dir.with_name(f".{out_dir.name}.partial")
    shutil.rmtree(partial_dir, ignore_errors=True)
    partial_dir.mkdir(parents=True)
    with _Checkpoint.open(base_dir) as base, _Checkpoint.open(adapted_dir) as adapted:
        aliases = _check_tensors(base, adapted)
        shards = _plan_shards(base, max_shard_bytes)
        weight_map = {}
        total_size = 0
        for index, names in enumerate(shards):
            file_name = _shard_name(index, len(shards))
            tensors = {
                name: _interpolate(
                    name, base.tensor(name), adapted.tensor(aliases.get(name, name)), lam
                )
                for name in names
            }
            _save(tensors, partial_dir / file_name)
            weight_map.update(dict.fromkeys(names, file_name))
            total_size += sum(tensor.nbytes for tensor in tensors.values())
            del tensors
    if len(shards) > 1:
        index_json = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        (partial_dir / _INDEX_NAME).write_text(json.dumps(index_json, indent=2) + "\n")
    _copy_companions(base_dir, partial_dir)
    if out_dir.exists():
        out_dir.rmdir()
    partial_dir.rename(out_dir)


class _Checkpoint:
    """Lazy view of a checkpoint folder: tensors by name, whichever shard they are in."""

    def __init__(self, folder: Path, handle_by_name: dict[str, Any]) -> None:
        self.folder = folder
        self._handle_by_name = handle_by_name

    @classmethod
    @contextmanager
    def open(cls, folder: Path) -> Iterator[_Checkpoint]:
        from safetensors import safe_open

        files = _weight_files(folder)
        with ExitStack() as stack:
            handle_by_name = {}
            for file in files:
                handle = stack.enter_context(safe_open(file, framework="pt"))
                handle_by_name.update(dict.fromkeys(handle.keys(), handle))
            yield cls(folder, handle_by_name)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._handle_by_name)

    def tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._handle_by_name[name].get_tensor(name)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handle_by_name[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The dtype as safetensors spells it, e.g. "BF16"."""
        return str(self._handle_by_name[name].get_slice(name).get_dtype())


def _weight_files(folder: Path) -> list[Path]:
    # The order in which transformers looks for weights.
    index = folder / _INDEX_NAME
    if (folder / "model.safetensors").is_file():
        files = [folder / "model.safetensors"]
    elif index.is_file():
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
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
    """Checks that the two checkpoints match; returns the base's tied names -> adapted's name."""
    only_base = [name for name in base.names if name not in adapted.names]
    only_adapted = [name for name in adapted.names if name not in base.names]
    common = [name for name in base.names if name in adapted.names]
    aliases = {name: _tied_to(base, name, common) for name in only_base}
    untied = [name for name, tied in aliases.items() if tied is None]
    untied_adapted = [name for name in only_adapted if _tied_to(adapted, name, common) is None]
    if untied or untied_adapted:
        which, folder = (untied, adapted.folder) if untied else (untied_adapted, base.folder)
        raise ValueError(
            f"{folder} lacks {len(which)} tensor(s) that the other checkpoint holds "
            f"(the first is {which[0]!r}); merge two checkpoints of the same architecture"
        )
    for name in common:
        if base.shape(name) != adapted.shape(name):
            raise ValueError(
                f"tensor {name!r} has shape {adapted.shape(name)} in {adapted.folder} but "
                f"{base.shape(name)} in {base.folder}; merge two models of the same architecture"
            )
        for checkpoint in (base, adapted):
            if checkpoint.dtype(name).startswith(("F4", "F6_", "F8_")):
                # Its values mean nothing without their scales, so interpolating them is wrong.
                raise ValueError(
                    f"tensor {name!r} in {checkpoint.folder} is quantised "
                    f"({checkpoint.dtype(name)}); merge the unquantised checkpoints"
                )
    return {name: tied for name, tied in aliases.items() if tied is not None}


def _tied_to(checkpoint: _Checkpoint, name: str, candidates: list[str]) -> str | None:
    """The tensor among `candidates` that `name` is a bit-equal copy of, if there is one."""
    import torch

    kind = (checkpoint.shape(name), checkpoint.dtype(name))
    for other in candidates:
        if (checkpoint.shape(other), checkpoint.dtype(other)) == kind and torch.equal(
            checkpoint.tensor(name), checkpoint.tensor(other)
        ):
            return other
    return None


def _plan_shards(checkpoint: _Checkpoint, max_shard_bytes: int) -> list[list[str]]:
    """Names per output shard, in the checkpoint's order, each shard within the limit if it can."""
    shards: list[list[str]] = [[]]
    size = 0
    for name in checkpoint.names:
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


def _interpolate(name: str, base: torch.Tensor, adapted: torch.Tensor, lam: float) -> torch.Tensor:
    import torch

    if base.is_floating_point() != adapted.is_floating_point():
        raise ValueError(
            f"tensor {name!r} is {base.dtype} in one checkpoint and {adapted.dtype} in the other; "
            f"merge two checkpoints of the same architecture"
        )
    if not base.is_floating_point():
        if 0.0 < lam < 1.0 and not torch.equal(base, adapted):
            raise ValueError(
                f"tensor {name!r} is {base.dtype} and differs between the checkpoints, expected a "
                f"floating dtype to interpolate; merge the unquantised checkpoints"
            )
        return base if lam == 0.0 else adapted
    stored = torch.promote_types(base.dtype, adapted.dtype)
    wide = torch.promote_types(stored, torch.float32)
    if lam in (0.0, 1.0):
        return (base if lam == 0.0 else adapted).to(stored)
    base, adapted = base.to(wide), adapted.to(wide)
    # lerp of two equal infinities (a stored mask) would be NaN, hence the explicit equal case.
    merged = torch.where(base == adapted, base, torch.lerp(base, adapted, lam))
    return merged.to(stored)


def _save(tensors: dict[str, torch.Tensor], file: Path) -> None:
    from safetensors.torch import save_file

    # Transformers refuses files whose metadata does not name the framework.
    save_file({name: t.contiguous() for name, t in tensors.items()}, file, {"format": "pt"})


def _copy_companions(source_dir: Path, out_dir: Path) -> None:
    """Copies configuration, tokenizer and licence files; weights and stage manifests stay."""
    for file in sorted(source_dir.iterdir()):
        skipped = file.name == "manifest.json" or file.name.endswith(".index.json")
        wanted = file.suffix in _COPIED_SUFFIXES or file.stem.upper() in ("LICENSE", "NOTICE")
        if file.is_file() and wanted and not skipped:
            shutil.copyfile(file, out_dir / file.name)
