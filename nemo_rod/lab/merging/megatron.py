"""Merging of two Megatron distributed checkpoints (`ckpt_format=torch_dist`).

The pieces of a stored tensor depend on the layout that saved it. The merge iterates over the
coarser side's pieces and reads the parts of both sides that cover them: no layout is rebuilt, and
no tensor is held as a whole unless it was stored so. The output has the base's names.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

from nemo_rod.lab.merging import megatron_folder
from nemo_rod.lab.merging.formula import (
    interpolate,
    refuse_dtypes,
    refuse_low_rank,
    refuse_quantised,
    refuse_shapes,
    refuse_unmatched,
)
from nemo_rod.lab.merging.torch_dist import Checkpoint, write

# State of the training run, meaningless for the merged model.
_STATE = re.compile(r"(chained_\d+\.)?optimizer\.|rng_state/|rerun_state_machine_state/")
# Layers' state besides their weights: empty, or FP8 scales, which training recomputes.
_EXTRA_STATE = "._extra_state/"
# Rows past the vocabulary are padding, whose number depends on the layout.
_PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")


def merge(
    base_dir: Path, adapted_dir: Path, out_dir: Path, lam: float, max_shard_bytes: int
) -> None:
    """Fills `out_dir` with the merge; see `merge_checkpoints` for the arguments.

    Raises:
        ValueError: If the checkpoints do not match, or a folder has another format.
    """
    base, adapted = (
        Checkpoint(megatron_folder.weights_folder(folder), _is_of_the_model)
        for folder in (base_dir, adapted_dir)
    )
    tensors = _merged_tensors(base, adapted)
    objects = _merged_objects(base, adapted)

    def make(name: str, piece: ChunkStorageMetadata) -> torch.Tensor:
        return interpolate(name, base.piece(name, piece), adapted.piece(name, piece), lam)

    write(megatron_folder.begin(base.folder, out_dir), tensors, objects, make, max_shard_bytes)


def _is_of_the_model(name: str) -> bool:
    return not (_STATE.match(name) or name.startswith(megatron_folder.COMMON_OBJECT))


def _merged_tensors(base: Checkpoint, adapted: Checkpoint) -> dict[str, TensorStorageMetadata]:
    """Returns global shape, dtype and pieces of every merged tensor, checked on both sides."""
    for side in (base, adapted):
        refuse_low_rank(side.tensors, side.folder)
    refuse_unmatched([name for name in base.tensors if name not in adapted.tensors], adapted.folder)
    refuse_unmatched([name for name in adapted.tensors if name not in base.tensors], base.folder)
    vocabularies = {megatron_folder.vocabulary_size(side.folder) for side in (base, adapted)}
    vocabulary = vocabularies.pop() if len(vocabularies) == 1 else None
    merged = {}
    for name, ours in base.tensors.items():
        theirs = adapted.tensors[name]
        dtypes = ours.properties.dtype, theirs.properties.dtype
        rows = min(ours.size[:1], theirs.size[:1])
        if name in _PADDED and vocabulary is not None and rows >= (vocabulary,):
            ours, theirs = _cut(ours, *rows), _cut(theirs, *rows)
        refuse_shapes(name, ours.size, theirs.size, base.folder, adapted.folder)
        refuse_dtypes(name, *dtypes)
        for dtype, side in zip(dtypes, (base, adapted), strict=True):
            quantised = dtype.is_floating_point and dtype.itemsize == 1
            refuse_quantised(name, str(dtype), quantised, side.folder)
        properties = dataclasses.replace(ours.properties, dtype=torch.promote_types(*dtypes))
        pieces = min(ours.chunks, theirs.chunks, key=len)
        merged[name] = TensorStorageMetadata(properties, ours.size, pieces)
    # compares non-floating tensors first, to refuse them before anything is written
    return dict(sorted(merged.items(), key=lambda item: item[1].properties.dtype.is_floating_point))


def _cut(tensor: TensorStorageMetadata, rows: int) -> TensorStorageMetadata:
    """Returns the first rows of a tensor."""
    pieces = [
        ChunkStorageMetadata(
            piece.offsets,
            torch.Size((min(piece.sizes[0], rows - piece.offsets[0]), *piece.sizes[1:])),
        )
        for piece in tensor.chunks
        if piece.offsets[0] < rows
    ]
    return TensorStorageMetadata(tensor.properties, torch.Size((rows, *tensor.size[1:])), pieces)


def _merged_objects(base: Checkpoint, adapted: Checkpoint) -> dict[str, bytes]:
    """Returns the base's objects, which except for extra state must equal the adapted side's."""
    ours, theirs = (
        {name for name in side.objects if _EXTRA_STATE not in name} for side in (base, adapted)
    )
    refuse_unmatched(sorted(ours - theirs), adapted.folder)
    refuse_unmatched(sorted(theirs - ours), base.folder)
    objects = {name: base.object(name) for name in base.objects}
    for name in sorted(ours):
        if objects[name] != adapted.object(name):
            raise ValueError(
                f"object {name!r} differs between {base.folder} and {adapted.folder}, and only "
                f"tensors can be interpolated; merge two checkpoints of the same architecture"
            )
    return objects
