"""Checkpoints of torch.distributed.checkpoint, read and written piece by piece by one process.

A tensor has a global shape and is stored in pieces ("chunks"), each with its offsets and sizes.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from nemo_rod.files import interpreting
from nemo_rod.lab.merging.pickles import load_metadata


class Checkpoint:
    """The content of a checkpoint folder, across its files and pieces.

    Attributes:
        folder: folder of `.metadata`.
        tensors: global shape, dtype and pieces of every tensor, by name.
        objects: names of entries stored as bytes.
    """

    def __init__(self, folder: Path, wanted: Callable[[str], bool]) -> None:
        """Opens the entries whose names are `wanted`.

        Raises:
            ValueError: if a file with a used entry is missing, or `.metadata` is foreign.
        """
        self.folder = folder
        metadata = load_metadata(folder / ".metadata")  # not by the reader, whose pickle may do all
        self._reader = FileSystemReader(folder)
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        entries = {n: e for n, e in metadata.state_dict_metadata.items() if wanted(n)}
        self.tensors = {n: e for n, e in entries.items() if isinstance(e, TensorStorageMetadata)}
        self.objects = [name for name in entries if name not in self.tensors]
        stored = metadata.storage_data.items()
        files = {place.relative_path for index, place in stored if index.fqn in entries}
        for file in sorted(files):
            if not (folder / file).is_file():
                raise ValueError(
                    f"{folder} lacks {file}, which its .metadata names; restore it from a copy"
                )

    def piece(self, name: str, piece: ChunkStorageMetadata) -> torch.Tensor:
        """Returns part of a tensor, in its stored dtype, from the stored pieces that cover it.

        Raises:
            ValueError: if the stored pieces do not cover it.
        """
        description = self.tensors[name]
        items = create_read_items_for_chunk_list(name, description, [piece])
        if sum(math.prod(item.lengths) for item in items) != math.prod(piece.sizes):
            raise ValueError(
                f"tensor {name!r} is not whole in {self.folder}; restore it from a copy"
            )
        into = _Into(torch.empty(piece.sizes, dtype=description.properties.dtype))
        with interpreting(self.folder, cure="restore it from a copy"):
            self._reader.read_data(LoadPlan(items), into).wait()
        return into.tensor

    def object(self, name: str) -> bytes:
        """Returns the raw bytes of an entry of `objects`."""
        index, nowhere = MetadataIndex(name), torch.Size((0,))
        item = ReadItem(LoadItemType.BYTE_IO, index, nowhere, index, nowhere, nowhere)
        into = _Into(torch.empty(0))
        self._reader.read_data(LoadPlan([item]), into).wait()
        return into.bytes


def write(
    folder: Path,
    tensors: Mapping[str, TensorStorageMetadata],
    objects: Mapping[str, bytes],
    make: Callable[[str, ChunkStorageMetadata], torch.Tensor],
    max_shard_bytes: int,
) -> None:
    """Writes a checkpoint, computing each piece only when it is written.

    Args:
        folder: existing folder without a checkpoint.
        tensors: global shape, dtype and pieces of every tensor, by name.
        objects: bytes by name.
        make: returns a piece of a tensor.
        max_shard_bytes: size at which a new file starts; also the amount held in memory.
    """
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)  # 0: uses no GPU
    writer.set_up_storage_writer(is_coordinator=True)
    planner = _Made(objects, make)
    # every file is written as if by a separate rank
    plans, metadata = planner.create_global_plan(_shards(tensors, objects, max_shard_bytes))
    plans = writer.prepare_global_plan(plans)
    writer.finish(metadata, [writer.write_data(plan, planner).wait() for plan in plans])


def _shards(
    tensors: Mapping[str, TensorStorageMetadata], objects: Mapping[str, bytes], max_bytes: int
) -> list[SavePlan]:
    shards = [[WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in objects]]
    size = 0
    for name, description in tensors.items():
        for piece in description.chunks:
            data = TensorWriteData(piece, description.properties, description.size)
            num_bytes = math.prod(piece.sizes) * description.properties.dtype.itemsize
            if shards[-1] and size + num_bytes > max_bytes:
                shards.append([])
                size = 0
            index = MetadataIndex(name, piece.offsets)
            shards[-1].append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
            size += num_bytes
    return [SavePlan(items) for items in shards]


class _Into(DefaultLoadPlanner):
    """Stores what the reader reads."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = tensor
        self.bytes = b""

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.tensor

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.bytes = value.getvalue()


class _Made(DefaultSavePlanner):
    """Provides the writer with data on demand."""

    def __init__(
        self,
        objects: Mapping[str, bytes],
        make: Callable[[str, ChunkStorageMetadata], torch.Tensor],
    ) -> None:
        super().__init__(flatten_state_dict=False)
        self._objects, self._make = objects, make

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        name = write_item.index.fqn
        if write_item.tensor_data is None:
            return io.BytesIO(self._objects[name])
        return self._make(name, write_item.tensor_data.chunk)
