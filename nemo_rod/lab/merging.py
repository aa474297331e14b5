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
from dataclasses import dataclass
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
    base_dir, out_dir = Path(base_dir), Path(out_dir).absolute()
    others = [Path(adapted_dir), *([Path(origin)] if origin else [])]
    if not 0.0 <= lam <= 1.0:
        raise ValueError(f"merge weight lambda is {lam}, expected a number from 0 to 1")
    is_free = not out_dir.exists() or (out_dir.is_dir() and not any(out_dir.iterdir()))
    if out_dir.is_symlink() or not is_free:
        raise ValueError(
            f"{out_dir} is a link or already holds files; remove it or merge into another folder"
        )
    partial = out_dir.with_name(f".{out_dir.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a merge that was killed
    try:
        with ExitStack() as stack:
            base, *sides = (stack.enter_context(Checkpoint.open(f)) for f in (base_dir, *others))
            partial.mkdir(parents=True)
            _merge(base, sides, partial, lam, max_shard_bytes)
        copy_beside(base_dir, partial, code=code)
        share(partial.rglob("*.safetensors"))
        if out_dir.exists():
            out_dir.rmdir()
        partial.rename(out_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _merge(
    base: Checkpoint, sides: list[Checkpoint], out_dir: Path, lam: float, max_shard_bytes: int
) -> None:
    """Writes the shards and their index; of the sides, the second is the origin of the first."""
    from huggingface_hub import split_state_dict_into_shards_factory
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    from torch import where

    def num_bytes(name: tuple[str]) -> int:
        shape, dtype = base.kinds[name[0]]
        bits = int("".join(filter(str.isdigit, dtype)) or 8)  # "BF16", "BOOL"
        return math.prod(shape) * bits // 8

    for side in sides:
        _refuse_other_function(base.folder, side.folder, base.kinds.keys() & side.kinds.keys())
    names = [_matching(base, side) for side in sides]

    def merge_tensor(name: str) -> torch.Tensor:
        ours = base.tensor(name)
        theirs, *before = (
            side.tensor(known[name]) for side, known in zip(sides, names, strict=True)
        )
        if before and theirs.is_floating_point():
            moved = ours.double() + (theirs.double() - before[0].double())
            theirs = where(theirs == before[0], ours, moved).to(theirs.dtype)
        return _interpolate(name, ours, theirs, lam).contiguous()

    split = split_state_dict_into_shards_factory(
        {name: (name,) for name in base.kinds if all(name in known for known in names)},
        get_storage_size=num_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    total_size = 0
    for file_name, of_file in split.filename_to_tensors.items():
        tensors = {name: merge_tensor(name) for name in of_file}
        try:  # transformers refuses files whose metadata does not name the framework
            save_file(tensors, out_dir / file_name, {"format": "pt"})
        except SafetensorError as error:
            raise OSError(
                f"{out_dir / file_name} cannot be written ({error}): make room, or name another "
                "place"
            ) from error
        total_size += sum(tensor.nbytes for tensor in tensors.values())
        del tensors
    if split.is_sharded:
        weight_map = split.tensor_to_filename
        index_json = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        (out_dir / _INDEX_NAME).write_text(json.dumps(index_json, indent=2) + "\n")


def _refuse_other_function(base: Path, adapted: Path, stored: set[str]) -> None:
    """Refuses checkpoints whose equal tensors mean something else: by configuration or tokenizer.

    Of their configurations, the keys that both have are compared: versions of transformers differ
    in those that they write. `stored` are the names of the tensors that both have.
    """
    ours, theirs = (flat(read_json(folder / "config.json")) for folder in (base, adapted))
    has_heads = any(name.endswith("lm_head.weight") for name in stored)
    for key in sorted(ours.keys() & theirs.keys()):
        name = key.rpartition(".")[2]
        # a tied output layer need not be stored; where both store one, one would be ignored
        is_moot = name == "tie_word_embeddings" and not has_heads
        is_moot = is_moot or bool(_GENERATION.fullmatch(name) or NOT_COMPUTED.fullmatch(name))
        if ours[key] != theirs[key] and not is_moot:
            raise ValueError(
                f"{adapted / 'config.json'} has {key}={theirs[key]!r}, but that of {base} has "
                f"{ours[key]!r}, so that equal weights compute something else; merge two "
                "checkpoints of the same architecture and settings"
            )
    there = [n for n in _TOKENIZERS if (base / n).is_file() and (adapted / n).is_file()]
    for name in there[:1] if there[:1] == ["tokenizer.json"] else there:
        one, other = base / name, adapted / name
        if one.read_bytes() != other.read_bytes() and (
            name != "tokenizer.json" or _ids(one) != _ids(other)
        ):
            raise ValueError(
                f"{other} gives words other ids than that of {base}; merge two checkpoints with "
                "one tokenizer"
            )


def _ids(file: Path) -> dict[str, int]:
    """Returns the ids of a `tokenizer.json` by word."""
    with interpreting(file):
        values = read_json(file)
        words = values.get("model", {}).get("vocab", {})
        if isinstance(words, list):  # pairs of a word and its score, in the order of ids
            words = {word: number for number, (word, *_) in enumerate(words)}
        added = values.get("added_tokens") or []
        return {**words, **{token["content"]: token["id"] for token in added}}


def _interpolate(name: str, base: torch.Tensor, adapted: torch.Tensor, lam: float) -> torch.Tensor:
    """Returns `(1 - lam) * base + lam * adapted` for one tensor of any shape.

    Returns:
        Same shape, in the dtype that can represent both; exact at the ends and where they agree.

    Raises:
        ValueError: the dtypes differ and are not both floating, non-floating values differ
            between the ends, or values that differ are not finite.
    """
    import torch

    are_floating = base.is_floating_point() and adapted.is_floating_point()
    is_end = lam in (0.0, 1.0)
    if not are_floating and (
        base.dtype != adapted.dtype or not (is_end or torch.equal(base, adapted))
    ):
        raise ValueError(
            f"tensor {name!r} is {base.dtype} in one checkpoint and {adapted.dtype} in the other, "
            "and differs, expected one floating dtype to interpolate; merge two unquantised "
            "checkpoints of the same architecture"
        )
    stored = torch.promote_types(base.dtype, adapted.dtype)
    if is_end or not are_floating:
        return (base if lam == 0.0 else adapted).to(stored)
    wide = torch.promote_types(stored, torch.float32)
    base, adapted = base.to(wide), adapted.to(wide)
    # lerp of two equal infinities (a stored mask) is NaN, hence the explicit equal case.
    merged = torch.where(base == adapted, base, torch.lerp(base, adapted, lam))
    if not (merged.isfinite() | (base == adapted)).all():
        raise ValueError(
            f"tensor {name!r} has values that are infinite or no numbers, and not the same ones in "
            "both checkpoints: merge checkpoints of models that have not diverged"
        )
    return merged.to(stored)


@dataclass(frozen=True)
class Checkpoint:
    """Lazy view of a checkpoint folder: tensors by name, across its shards.

    The names are the published ones, so that checkpoints written by different programs agree.
    """

    folder: Path
    stored: dict[str, tuple[Any, str]]  # published name -> open file, stored name
    kinds: dict[str, tuple[tuple[int, ...], str]]  # -> shape, dtype as in the file, e.g. "BF16"

    @classmethod
    @contextmanager
    def open(cls, folder: Path) -> Iterator[Checkpoint]:
        """Opens a checkpoint's files.

        Raises:
            ValueError: there are none in safetensors, or one is missing, damaged or elsewhere.
        """
        from safetensors import SafetensorError, safe_open

        index = folder / _INDEX_NAME
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"{folder} has no config.json, expected a checkpoint in Hugging Face's format: "
                "export one of Megatron's first (`nemo-rod export`), and merge an adapter into its "
                "model"
            )
        # transformers searches for weights in this order
        if (folder / "model.safetensors").is_file():
            files = [folder / "model.safetensors"]
        elif index.is_file():
            with interpreting(index):
                names = sorted({*read_json(index, "weight_map")["weight_map"].values()})
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
        stored, kinds = dict[str, tuple[Any, str]](), dict[str, tuple[tuple[int, ...], str]]()
        with ExitStack() as stack:
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
                for name in handle.keys():  # noqa: SIM118
                    if not name.endswith("rotary_emb.inv_freq"):  # no longer read
                        piece, known = handle.get_slice(name), published.get(name, name)
                        stored[known] = handle, name
                        kinds[known] = tuple(piece.get_shape()), str(piece.get_dtype())
            yield cls(folder, stored, kinds)

    def tensor(self, name: str) -> torch.Tensor:
        """Returns a tensor, in its stored shape and dtype."""
        handle, stored = self.stored[name]
        tensor: torch.Tensor = handle.get_tensor(stored)
        return tensor


def _matching(base: Checkpoint, side: Checkpoint) -> dict[str, str]:
    """Returns the name that each tensor of the base has in another checkpoint.

    A matrix that only one of them stores must be a copy of another, to which it is tied. Vectors
    are never tied, and are often equal by chance: norms of ones, biases of zeros.

    Raises:
        ValueError: a tensor is missing, quantised or of another shape.
    """
    import torch

    names = {name: name for name in base.kinds if name in side.kinds}
    common = [*names]
    for name in common:
        (shape, dtype), (other_shape, other_dtype) = base.kinds[name], side.kinds[name]
        if shape != other_shape:
            raise ValueError(
                f"tensor {name!r} has shape {other_shape} in {side.folder} but {shape} in "
                f"{base.folder}; merge two models of the same architecture"
            )
        # means nothing without its scales
        if found := re.search(r"F4\w*|F6_\w+|F8_\w+", f"{dtype} {other_dtype}"):
            raise ValueError(
                f"tensor {name!r} is quantised ({found[0]}) in {base.folder} or {side.folder}; "
                "merge the unquantised checkpoints"
            )
    trains_predictors = any(name.startswith(_PREDICTORS) for name in side.kinds)
    for one, other in ((base, side), (side, base)):
        for name in (name for name in one.kinds if name not in other.kinds):
            if one is base and name.startswith(_PREDICTORS) and not trains_predictors:
                continue
            alike = [
                n for n in common if one.kinds[n] == one.kinds[name] and len(one.kinds[n][0]) > 1
            ]
            tied = next((n for n in alike if torch.equal(one.tensor(name), one.tensor(n))), None)
            if tied is None:
                raise ValueError(
                    f"{other.folder} lacks the tensor {name!r} of {one.folder}; merge two "
                    "checkpoints of the same architecture"
                )
            if one is base:
                names[name] = tied
    return names
