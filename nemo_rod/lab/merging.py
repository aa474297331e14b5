"""Model merging: linear interpolation of two checkpoints (paper, "Model merging").

    theta_merge = (1 - lambda) * theta_base + lambda * theta_adapted

for every floating-point tensor, directly from the safetensors files of two Hugging Face
checkpoints. Works on one output shard at a time, so neither model is held in memory as a whole; the
inputs may be sharded differently. The output has the base's tensors, in the base's order and under
their published names, and the base's other files. Multi-token predictors that
only the base has are left out, because they would not match the merged model.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rod.checkpoints.published import NOT_COMPUTED, copy_beside, published_names
from nemo_rod.files import flat, interpreting, read_json, share

if TYPE_CHECKING:
    import torch

MAX_SHARD_BYTES = 5 * 2**30
_INDEX_NAME = "model.safetensors.index.json"
_PREDICTORS = "mtp."  # prefix of multi-token predictors, which training leaves out
# Files of tokenizers; one that has the first is known by it alone.
_TOKENIZERS = (
    *("tokenizer.json", "added_tokens.json", "tokenizer.model", "spiece.model", "tekken.json"),
    *("sentencepiece.bpe.model", "vocab.json", "merges.txt", "vocab.txt", "tiktoken.model"),
    "qwen.tiktoken",
)
_GENERATION = re.compile("do_sample|temperature|top_[kp]")  # keys that no forward pass reads


def merge_checkpoints(
    base_dir: str | Path,
    adapted_dir: str | Path,
    out_dir: str | Path,
    lam: float,
    *,
    origin: str | Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    code: bool = False,
) -> None:
    """Writes the checkpoint `(1 - lam) * base + lam * adapted` to `out_dir`.

    With an origin, what training has changed is added instead: `base + lam * (adapted - origin)`.

    Floating tensors are interpolated in float32 (float64 if either side is) and stored in their
    own dtype; if the two sides' dtypes differ, in the one that can represent both. The result is
    exact at `lam` 0 and 1 and wherever the two sides agree. Tensors of other dtypes are copied; if
    they differ, they are refused for `lam` between 0 and 1. A tied weight that only one side stores
    is taken from the tensor it is tied to. The folder appears complete or not at all.

    Args:
        base_dir: Hugging Face checkpoint of the base model, in safetensors files.
        adapted_dir: that of the adapted model, with the same tensors.
        out_dir: folder to create; it must be absent or empty.
        lam: weight of the adapted model, in [0, 1].
        origin: the checkpoint that the adapted model was trained from, where it is not the base.
        max_shard_bytes: size at which a new output shard starts; bounds the memory used.
        code: whether the base's modules of Python are copied, for others to run.

    Raises:
        ValueError: `lam` is out of range, a folder holds no checkpoint in safetensors files,
            `out_dir` is not empty, the configurations or tokenizers differ, or tensors are missing,
            unknown, quantised, of another shape, or differ without a floating dtype.
    """
    base_dir, adapted_dir, out_dir = Path(base_dir), Path(adapted_dir), Path(out_dir).absolute()
    if not 0.0 <= lam <= 1.0:
        raise ValueError(f"merge weight lambda is {lam}, expected a number from 0 to 1")
    is_free = not out_dir.exists() or (out_dir.is_dir() and not any(out_dir.iterdir()))
    if out_dir.is_symlink() or not is_free:
        raise ValueError(
            f"{out_dir} is a link or already holds files; remove it or merge into another folder"
        )
    megatron = ("latest_checkpointed_iteration.txt", ".metadata", "iter_*/.metadata")
    for folder in (base_dir, adapted_dir, Path(origin or base_dir)):
        for is_wrong, sentence in (
            (not folder.is_dir(), "is no folder, expected a checkpoint in it"),
            ((folder / "adapter_config.json").exists(),
             "is an adapter (adapter_config.json): merge it into its model first, and then the "
             "models"),
            (any(path for pattern in megatron for path in folder.glob(pattern)),
             "is a checkpoint in Megatron's format, expected one in Hugging Face's; export it "
             "first (`nemo-rod export`)"),
            (not (folder / "config.json").is_file(),
             "has no config.json, expected a checkpoint in Hugging Face's format: add the one that "
             "its weights were saved with"),
        ):  # fmt: skip
            if is_wrong:
                raise ValueError(f"{folder} {sentence}")
    partial = out_dir.with_name(f".{out_dir.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a merge that was killed
    partial.mkdir(parents=True)
    try:
        _merge(base_dir, adapted_dir, Path(origin or base_dir), partial, lam, max_shard_bytes)
        copy_beside(base_dir, partial, code=code)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        expected = isinstance(error, ValueError | OSError | MemoryError | ModuleNotFoundError)
        if expected or not isinstance(error, Exception):
            raise
        reason = " ".join(str(error).split())[:300]  # readers raise many kinds on damaged files
        raise ValueError(
            f"{base_dir} or {adapted_dir} is damaged ({type(error).__name__}: {reason}): "
            "restore it from a copy, or save the checkpoint again"
        ) from error
    share(partial.rglob("*.safetensors"))
    if out_dir.exists():
        out_dir.rmdir()
    partial.rename(out_dir)


def _refuse_other_function(base: Checkpoint, adapted: Checkpoint) -> None:
    """Refuses checkpoints whose equal tensors mean something else: by configuration or tokenizer.

    Of their configurations, the keys that both have are compared: versions of transformers differ
    in those that they write.
    """

    def of_both(name: str) -> list[Path]:
        files = [side.folder / name for side in (base, adapted)]
        return files if all(file.is_file() for file in files) else []

    def read(file: Path) -> dict[str, Any]:
        with interpreting(file):
            return dict(read_json(file))

    ours, theirs = (flat(read(file)) for file in of_both("config.json"))
    stored = base.stored.keys() & adapted.stored.keys()
    has_heads = any(name.endswith("lm_head.weight") for name in stored)
    for key in sorted(ours.keys() & theirs.keys()):
        name = key.rpartition(".")[2]
        # a tied output layer need not be stored; where both store one, one would be ignored
        is_moot = name == "tie_word_embeddings" and not has_heads
        is_moot = is_moot or bool(_GENERATION.fullmatch(name) or NOT_COMPUTED.fullmatch(name))
        if ours[key] != theirs[key] and not is_moot:
            raise ValueError(
                f"{adapted.folder / 'config.json'} has {key}={theirs[key]!r}, but that of "
                f"{base.folder} has {ours[key]!r}, so that equal weights compute something else; "
                "merge two checkpoints of the same architecture and settings"
            )
    whole, *others = map(of_both, _TOKENIZERS)
    for one, other in [whole] if whole else filter(None, others):
        if one.read_bytes() != other.read_bytes() and not (
            whole and _ids(read(one)) == _ids(read(other))
        ):
            raise ValueError(
                f"{other} gives words other ids than that of {base.folder}; merge two checkpoints "
                "with one tokenizer"
            )


def _ids(values: dict[str, Any]) -> dict[str, int]:
    """Returns the ids of a `tokenizer.json` by word."""
    words = values.get("model", {}).get("vocab", {})
    if isinstance(words, list):  # pairs of a word and its score, in the order of ids
        words = {word: number for number, (word, *_) in enumerate(words)}
    added = values.get("added_tokens") or []
    return {**words, **{token["content"]: token["id"] for token in added}}


def _merge(
    base_dir: Path, adapted_dir: Path, origin_dir: Path, out_dir: Path, lam: float, most: int
) -> None:
    from huggingface_hub import split_state_dict_into_shards_factory
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    from torch import where

    def num_bytes(name: tuple[str]) -> int:
        shape, dtype = base.kind(*name)
        bits = int("".join(filter(str.isdigit, dtype)) or 8)  # "BF16", "BOOL"
        return math.prod(shape) * bits // 8

    def learned(name: str, of_base: torch.Tensor) -> torch.Tensor:
        tensor, before = (side.tensor(known.get(name, name)) for side, known in aliases.items())
        if origin_dir == base_dir or not tensor.is_floating_point():
            return tensor
        moved = of_base.double() + (tensor.double() - before.double())
        return where(tensor == before, of_base, moved).to(tensor.dtype)

    with ExitStack() as stack:
        folders = (base_dir, adapted_dir, origin_dir)
        base, *sides = (stack.enter_context(Checkpoint.open(folder)) for folder in folders)
        for side in sides:
            _refuse_other_function(base, side)
        aliases, total_size = {side: _check_tensors(base, side) for side in sides}, 0
        split = split_state_dict_into_shards_factory(
            {name: (name,) for name in _merged_names(base, sides[0])},
            get_storage_size=num_bytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=most,
        )
        for file_name, names in split.filename_to_tensors.items():
            tensors = {
                name: _interpolate(
                    name, tensor := base.tensor(name), learned(name, tensor), lam
                ).contiguous()
                for name in names
            }
            # transformers refuses files whose metadata does not name the framework
            try:
                save_file(tensors, out_dir / file_name, {"format": "pt"})
            except SafetensorError as error:  # not of an input
                raise OSError(
                    f"{out_dir / file_name} cannot be written ({error}): make room, or name "
                    "another place"
                ) from error
            total_size += sum(tensor.nbytes for tensor in tensors.values())
            del tensors
    if split.is_sharded:
        weight_map = split.tensor_to_filename
        index_json = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        (out_dir / _INDEX_NAME).write_text(json.dumps(index_json, indent=2) + "\n")


def _interpolate(name: str, base: torch.Tensor, adapted: torch.Tensor, lam: float) -> torch.Tensor:
    """Returns `(1 - lam) * base + lam * adapted` for one tensor of any shape.

    Returns:
        Same shape, in the dtype that can represent both; exact at the ends and where they agree.

    Raises:
        ValueError: the dtypes differ and are not both floating, non-floating values differ
            between the ends, or values that differ are not finite.
    """
    import torch

    if base.dtype != adapted.dtype and not (
        base.is_floating_point() and adapted.is_floating_point()
    ):
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
    # lerp of two equal infinities (a stored mask) is NaN, hence the explicit equal case.
    merged = torch.where(base == adapted, base, torch.lerp(base, adapted, lam))
    if not (merged.isfinite() | (base == adapted)).all():
        raise ValueError(
            f"tensor {name!r} has values that are infinite or no numbers, and not the same ones in "
            "both checkpoints: merge checkpoints of models that have not diverged"
        )
    return merged.to(stored)


class Checkpoint:
    """Lazy view of a checkpoint folder: tensors by name, across its shards.

    The names are the published ones, so that checkpoints written by different programs agree.
    """

    def __init__(self, folder: Path, stored: dict[str, tuple[Any, str]]) -> None:
        self.folder = folder
        self.stored = stored  # published name -> (open file, stored name)

    @classmethod
    @contextmanager
    def open(cls, folder: Path) -> Iterator[Checkpoint]:
        """Opens a checkpoint's files.

        Raises:
            ValueError: there are none in safetensors, or one is missing, damaged or elsewhere.
        """
        from safetensors import SafetensorError, safe_open

        # transformers searches for weights in this order
        index = folder / _INDEX_NAME
        if (folder / "model.safetensors").is_file():
            files = [folder / "model.safetensors"]
        elif index.is_file():
            with interpreting(index):
                weight_map: dict[str, str] = read_json(index, "weight_map")["weight_map"]
                names = sorted(set(weight_map.values()))
                if any(Path(name).name != name for name in names):
                    raise ValueError("it has files of another folder")
                files = [folder / name for name in names]
        else:
            files = sorted(folder.glob("*.safetensors"))
        missing = next((file.name for file in files if not file.is_file()), "")
        if not files or missing:
            problem = f"lacks {missing}, one of its shards" if missing else "holds none"
            raise ValueError(
                f"{folder} {problem}, expected a checkpoint in safetensors files; "
                f"export the model in Hugging Face format first"
            )
        published = published_names(folder)
        with ExitStack() as stack:
            stored = dict[str, tuple[Any, str]]()
            for file in files:
                held = file.stat()
                if held.st_size > 1 << 30 and held.st_blocks * 512 < held.st_size // 2:
                    raise ValueError(f"{file} has holes, unlike any weights: fetch it again")
                try:
                    handle = stack.enter_context(safe_open(file, framework="pt"))
                except SafetensorError as error:
                    raise ValueError(
                        f"{file} is not a complete safetensors file ({error}): restore it from a "
                        "copy"
                    ) from None
                stored |= {
                    published.get(name, name): (handle, name)
                    for name in handle.keys()  # noqa: SIM118
                    if not name.endswith("rotary_emb.inv_freq")  # no longer read
                }
            yield cls(folder, stored)

    def tensor(self, name: str) -> torch.Tensor:
        """Returns a tensor, in its stored shape and dtype."""
        handle, stored = self.stored[name]
        tensor: torch.Tensor = handle.get_tensor(stored)
        return tensor

    def kind(self, name: str) -> tuple[tuple[int, ...], str]:
        """Returns a tensor's shape, and its dtype as safetensors spells it, e.g. "BF16"."""
        handle, stored = self.stored[name]
        piece = handle.get_slice(stored)
        return tuple(piece.get_shape()), str(piece.get_dtype())


def _check_tensors(base: Checkpoint, adapted: Checkpoint) -> dict[str, str]:
    """Checks that the checkpoints match and returns tied names of the base -> adapted's names."""
    ours, theirs = set(base.stored), set(adapted.stored)
    common = [name for name in base.stored if name in theirs]
    only_base = [name for name in _merged_names(base, adapted) if name not in theirs]
    only_adapted = [name for name in adapted.stored if name not in ours]
    aliases = {}
    for side, other, names in ((base, adapted, only_base), (adapted, base, only_adapted)):
        tied = {name: _tied_to(side, name, common) for name in names}
        missing = [name for name in names if tied[name] is None]
        if missing:
            raise ValueError(
                f"{other.folder} lacks {len(missing)} tensor(s) that the other checkpoint holds "
                f"(the first is {missing[0]!r}); merge two checkpoints of the same architecture"
            )
        if side is base:
            aliases = {name: to for name, to in tied.items() if to is not None}
    for name in common:
        (shape, _), (other_shape, _) = kinds = [side.kind(name) for side in (base, adapted)]
        if shape != other_shape:
            raise ValueError(
                f"tensor {name!r} has shape {other_shape} in {adapted.folder} but {shape} in "
                f"{base.folder}; merge two models of the same architecture"
            )
        for side, (_, dtype) in zip((base, adapted), kinds, strict=True):
            if dtype.startswith(("F4", "F6_", "F8_")):  # means nothing without its scales
                raise ValueError(
                    f"tensor {name!r} in {side.folder} is quantised ({dtype}); merge the "
                    f"unquantised checkpoints"
                )
    return aliases


def _merged_names(base: Checkpoint, adapted: Checkpoint) -> list[str]:
    """Returns the base's tensors, without multi-token predictors if the adapted model has none."""
    if any(name.startswith(_PREDICTORS) for name in adapted.stored):
        return [*base.stored]
    return [name for name in base.stored if not name.startswith(_PREDICTORS)]


def _tied_to(checkpoint: Checkpoint, name: str, candidates: list[str]) -> str | None:
    """Returns the matrix among `candidates` of which `name` is a bit-equal copy, if any.

    Vectors are never tied, and are often equal by chance: norms of ones, biases of zeros.
    """
    import torch

    kind, tensor = checkpoint.kind(name), checkpoint.tensor
    alike = [n for n in candidates if checkpoint.kind(n) == kind] if len(kind[0]) > 1 else []
    return next((n for n in alike if torch.equal(tensor(name), tensor(n))), None)
