"""Reference losses by block id: the loss under the specialist, or under the untouched base model.

Folders of several reference models (`folder.py`) together cover a store: the specialist covers the
adaptation blocks, the base model the replay blocks (paper, Eq. "RoD"). Every lookup compares the
block hash with the store in use, and refuses a block that was not scored.

Shape suffixes: C = blocks, N = all blocks of a folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from nemo_rod.roles import ROLES
from nemo_rod.selection.arrays import Bytes, Ids, Mask, Nats
from nemo_rod.selection.blocks import Blocks
from nemo_rod.selection.references.folder import Folder, hash_heads


class References:
    """Reference losses of the blocks of a store, `references[block_ids]`.

    Attributes:
        manifests: one per folder, by ascending first block.
        digest: digest of all of them, hex.
        length: tokens of a block, from its start, that a loss covers.

    Example:
        >>> references = References.open(["references/specialist", "references/base"], store)
        >>> references[np.array([3, 1])]  # nats per token, float32
    """

    def __init__(self, folders: list[Folder], store: Blocks | None, length: int) -> None:
        """Use `open`."""
        self._folders, self._store, self.length = folders, store, length
        self._starts = np.array([folder.manifest.start for folder in folders])
        self.manifests = tuple(folder.manifest for folder in folders)
        digests = "\n".join(manifest.digest for manifest in self.manifests).encode()
        self.digest = hashlib.blake2b(digests, digest_size=16, person=b"rod-refs-v1").hexdigest()

    @classmethod
    def open(
        cls,
        paths: Iterable[str | Path] | str | Path,
        store: Blocks | None = None,
        *,
        roles: Collection[str] = ROLES,
        length: int | None = None,
        precision: str | None = None,
        verified: bool = True,
    ) -> Self:
        """Opens one or more complete folders.

        Args:
            paths: the folders, in any order, or one folder.
            store: the block store that they must belong to and cover; None allows `losses`
                only.
            roles: the roles that they must cover: both, or `["replay"]`.
            length: scored tokens of a block; None for whole blocks.
            precision: arithmetic of the caller's scoring pass; None accepts any.
            verified: verify all checksums now, rather than by `verify`.

        Raises:
            ValueError: a folder is missing, incomplete, damaged, or of another store,
                tokenizer or precision; or folders overlap or leave a range of the store uncovered.
        """
        paths = [paths] if isinstance(paths, str | Path) else paths
        opened = [Folder.open(Path(path), verified=verified) for path in paths]
        folders = sorted(opened, key=lambda folder: folder.manifest.start)
        if not folders:
            raise ValueError("no folder of references was given: name at least one")
        first = folders[0].manifest
        expected = {
            "loss definition": first.loss,
            "block store": first.store if store is None else store.digest,
            "tokenizer": first.tokenizer if store is None else store.tokenizer_fingerprint,
            "block size": first.block_size if store is None else store.block_size,
        }
        for folder in folders:
            file, its = folder.path / "manifest.json", folder.manifest
            values = (its.loss, its.store, its.tokenizer, its.block_size)
            for (name, right), value in zip(expected.items(), values, strict=True):
                if value != right:
                    raise ValueError(
                        f"{file} is of {name} {value!r}, expected {right!r}: score again with this "
                        "run's inputs, or point the run at the scored ones"
                    )
            if (length or its.block_size) not in its.lengths:
                raise ValueError(
                    f"{file} is of the first {', '.join(map(str, its.lengths))} tokens of a block, "
                    f"but candidates are scored by {length or its.block_size}: write references of "
                    "this length, or score by one of those (in a recipe, by scoring.prefix)"
                )
        for left, right in pairwise(folders):
            if left.manifest.stop > right.manifest.start:
                raise ValueError(
                    f"{left.path} and {right.path} both have references of block "
                    f"{right.manifest.start}: name one of the two, or score ranges that do not "
                    "overlap"
                )
        covered = 0 if store is None or "adaptation" in roles else store.num_adaptation
        for folder in folders:
            if folder.manifest.start > covered:
                break
            covered = max(covered, folder.manifest.stop)
        if store is not None and covered < len(store):
            raise ValueError(
                f"block {covered} of {len(store)} has no reference; references found: "
                f"{_ranges(folders)}; name the missing folder, or score these blocks"
            )
        references = cls(folders, store, length or first.block_size)
        if precision is not None:
            references.refuse_other_precision(precision)
        return references

    def refuse_other_precision(self, precision: str) -> None:
        """Refuses references of another precision than that of the caller's scoring pass."""
        for folder in self._folders:
            if (its := folder.manifest.precision) != precision:
                raise ValueError(
                    f"{folder.path / 'manifest.json'} is of precision {its!r}, but candidates are "
                    f"scored in {precision!r}: write the references in that precision, or score in "
                    "theirs (in a recipe, by model.precision and scoring.precision)"
                )

    def verify(self, on_read: Callable[[str], object]) -> None:
        """Verifies the checksums of all folders; see `Folder.verify`."""
        for folder in self._folders:
            folder.verify(on_read)

    def refuse_missing(self, required: Mask) -> None:
        """Refuses, before a run, a missing reference of its blocks, bool [N], by block id."""
        present = np.zeros(len(required), dtype=bool)
        for folder in self._folders:
            present[folder.manifest.start : folder.manifest.stop] = folder.present()
        self._refuse_absent(np.flatnonzero(required & ~present))

    def __getitem__(self, block_ids: npt.ArrayLike) -> Nats:
        """Returns reference losses over the first `length` tokens, nats per token, float32 [C].

        Raises:
            ValueError: a block has no reference, or one of different content.
        """
        if self._store is None:
            raise ValueError("the references were opened without a block store: name it in open()")
        block_ids = np.asarray(block_ids, dtype=np.int64)
        return self.checked_losses(block_ids, self._store.hashes(block_ids))

    def checked_losses(self, block_ids: Ids, hashes_C: Bytes) -> Nats:
        """Returns reference losses of blocks that were read already, whose hashes are [C, 16].

        Raises:
            ValueError: a block has no reference, or one of different content.
        """
        loss_C, head_C = self._records(block_ids)
        same_C = hash_heads(hashes_C) == head_C
        if not same_C.all():
            block = block_ids[np.argmin(same_C)]
            path = next(each.path for each in self._folders if block < each.manifest.stop)
            raise ValueError(
                f"{path}: block {block}'s hash does not match the hash its reference was computed "
                f"for ({(~same_C).sum()} of {len(same_C)} looked up): files of one of the two were "
                "changed; restore them, or prepare and score again"
            )
        return loss_C

    def losses(self, block_ids: npt.ArrayLike) -> Nats:
        """Returns reference losses of blocks without comparing hashes.

        Raises:
            ValueError: a block has no reference.
        """
        return self._records(np.asarray(block_ids, dtype=np.int64))[0]

    def _records(self, block_ids: Ids) -> tuple[Nats, npt.NDArray[np.uint64]]:
        """Gathers the losses and heads of blocks, [C] each."""
        folder_C = np.searchsorted(self._starts, block_ids, side="right") - 1
        loss_C = np.full(block_ids.shape, np.nan, dtype=np.float32)
        head_C = np.zeros(block_ids.shape, dtype=np.uint64)
        for number, folder in enumerate(self._folders):
            here = np.flatnonzero((folder_C == number) & (block_ids < folder.manifest.stop))
            records_c = folder.records(block_ids[here])
            loss_C[here] = records_c["loss"][:, folder.manifest.lengths.index(self.length)]
            head_C[here] = records_c["head"]
        self._refuse_absent(block_ids[np.isnan(loss_C)])
        return loss_C, head_C

    def _refuse_absent(self, block_ids: Ids) -> None:
        if len(block_ids):
            raise ValueError(
                f"block {block_ids[0]} has no reference ({len(block_ids)} of those looked up); "
                f"references found: {_ranges(self._folders)}; write those of the "
                "missing blocks (in a recipe, by `nemo-rod reference` with this arm among `arms`)"
            )


def _ranges(folders: list[Folder]) -> str:
    return ", ".join(
        f"{int(f.present().sum())} blocks in [{f.manifest.start}, {f.manifest.stop}) of {f.path}"
        for f in folders
    )
