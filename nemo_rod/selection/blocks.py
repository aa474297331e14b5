"""The interface that selection needs of a store of blocks.

`corpus.BlockStore` implements it, and so does the data of another job, `swap_in.job_data.JobData`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from nemo_rod.selection.arrays import Bytes, Ids


class Blocks(Protocol):
    """Blocks with ids: those of adaptation first, then those of replay, source by source."""

    block_size: int  # tokens per block
    num_adaptation: int

    @property
    def digest(self) -> str:
        """Digest of the store."""

    @property
    def tokenizer_fingerprint(self) -> str:
        """Fingerprint of the tokenizer."""

    def __len__(self) -> int: ...

    def hashes(self, block_ids: Ids) -> Bytes:
        """Returns the block hashes, uint8 [N, 16], which references compare with their own."""

    @property
    def sources(self) -> Sequence[Any]:
        """The sources, each with `name`, `role`, `start` and `count`."""

    def source_index(self, block_ids: Ids) -> Ids:
        """Returns the index in `sources` of each block's source, int64 [N]."""
