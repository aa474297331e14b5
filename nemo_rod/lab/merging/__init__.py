"""Model merging: linear interpolation of two checkpoints (paper, "Model merging").

    theta_merge = (1 - lambda) * theta_base + lambda * theta_adapted

for every floating-point tensor. `formula` has the arithmetic and its requirements on two tensors;
`hugging_face` and `megatron` have the two formats. Both read and write piece by piece: neither
model is ever held in memory as a whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nemo_rod.files import share
from nemo_rod.lab.merging import hugging_face, megatron_folder

MAX_SHARD_BYTES = 5 * 2**30


def merge_checkpoints(
    base_dir: str | Path,
    adapted_dir: str | Path,
    out_dir: str | Path,
    lam: float,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes the checkpoint `(1 - lam) * base + lam * adapted` to `out_dir`.

    Both are Hugging Face checkpoints in safetensors files, or both are Megatron's distributed
    checkpoints (`ckpt_format=torch_dist`); the output has the same format and the base's tensors
    and configuration. The inputs may be sharded differently.

    Floating tensors are interpolated in float32 (float64 if either side is) and stored in their
    own dtype; if the two sides' dtypes differ, in the one that can represent both. The result is
    exact at `lam` 0 and 1 and wherever the two sides agree. Tensors of other dtypes are copied; if
    they differ, they are refused for `lam` between 0 and 1. The folder appears complete or not at
    all.

    For Hugging Face checkpoints, a tied weight that only one side stores is taken from the tensor
    it is tied to. For Megatron checkpoints, `*_dir` may be the folder of one iteration or its
    parent, of which the latest iteration is used. The output holds the model alone, at iteration 0:
    optimizer, random and data-loader state are dropped. No distributed job and no GPU is needed,
    and each side may have been saved in any parallel layout.

    Args:
        base_dir: Checkpoint of the base model.
        adapted_dir: Checkpoint of the adapted model, with the same tensors.
        out_dir: Folder to create; it must be absent or empty.
        lam: Weight of the adapted model, in [0, 1].
        max_shard_bytes: Size at which a new output shard starts; bounds the memory used.

    Raises:
        ValueError: If `lam` is out of range, a folder holds no checkpoint of a known format or the
            formats differ, `out_dir` is not empty, or tensors are missing, unknown, quantised, of
            another shape, or differ without a floating dtype.
    """
    base_dir, adapted_dir, out_dir = Path(base_dir), Path(adapted_dir), Path(out_dir)
    if not 0.0 <= lam <= 1.0:
        raise ValueError(f"merge weight lambda is {lam}, expected a number from 0 to 1")
    if out_dir.exists() and any(out_dir.iterdir()):
        raise ValueError(f"{out_dir} already holds files; remove it or merge into another folder")
    for folder in (base_dir, adapted_dir):
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}, expected a checkpoint in it")
    merge = _format_of(base_dir, adapted_dir)
    with _whole_folder(out_dir) as partial_dir:
        try:
            merge(base_dir, adapted_dir, partial_dir, lam, max_shard_bytes)
        except (ValueError, OSError, MemoryError):
            raise
        except Exception as error:  # torch's readers raise anything on damaged files
            said = " ".join(str(error).split())[:300]
            raise ValueError(
                f"{base_dir} or {adapted_dir} is damaged ({type(error).__name__}: {said}): restore "
                "it from a copy, or save the checkpoint again"
            ) from error


def _format_of(base_dir: Path, adapted_dir: Path) -> Callable[..., None]:
    """Returns the merge function for the format of both folders."""
    of_megatron = [folder for folder in (base_dir, adapted_dir) if megatron_folder.is_one(folder)]
    if not of_megatron:
        return hugging_face.merge
    if len(of_megatron) == 1:
        other = adapted_dir if of_megatron == [base_dir] else base_dir
        raise ValueError(
            f"{of_megatron[0]} is a Megatron checkpoint and {other} is not; merge two checkpoints "
            f"of one format, such as the Hugging Face exports of both"
        )
    from nemo_rod.lab.merging import megatron

    return megatron.merge


@contextmanager
def _whole_folder(folder: Path) -> Iterator[Path]:
    """Yields a partial folder, renamed to `folder` at the end; a failure leaves neither."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a merge that was killed
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    share(partial.rglob("*.safetensors"))
    if folder.exists():
        folder.rmdir()
    partial.rename(folder)
