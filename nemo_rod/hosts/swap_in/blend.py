"""The training data of a Megatron job, seen as a store of blocks.

A job reads samples from a GPTDataset, or from a BlendedDataset of several. A block here is one such
sample, and its id is its index among all samples that the job may draw, adaptation first:

    id      [0, 70)              [70, 100)          [100, 180)
    sample  0 .. 69 of legal     0 .. 29 of web     0 .. 79 of news
    role    adaptation           replay             replay

Megatron cuts samples from documents that it shuffles and joins; the result depends on the seed, the
length of a sample and the number of epochs. The digest covers these inputs, so that references of
other samples are refused at setup, and every sample is found by the hash of its content.

Shape suffixes: C = samples, S = tokens per sample.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch

from nemo_rod.corpus.hashing import block_hash
from nemo_rod.files import digest
from nemo_rod.hosts.swap_in.roles import Roles, assign_roles, name_sources
from nemo_rod.selection import SourceRow

# Part of a reference manifest: references of a block store have other targets.
LOSS_DEFINITION = "mean next-token loss of the sample's targets under its loss mask, nats, fp32"


class Blend:
    """The train split of a job as blocks with ids, sources, roles and hashes.

    Args:
        dataset: megatron-core's BlendedDataset or GPTDataset.
        roles: roles of the sources; see `roles.py`.
        num_samples: maximum number of samples that the job may draw.

    Attributes:
        sources: one row per source, adaptation first.
        block_size: input tokens per sample (S); a sample has S targets and S + 1 tokens.

    Raises:
        ValueError: the dataset's type is not supported, or a source has no role.
    """

    def __init__(self, dataset: Any, roles: Roles, *, num_samples: int) -> None:
        self._parts = list(getattr(dataset, "datasets", [dataset]))
        self._blended = hasattr(dataset, "datasets")
        if getattr(self._parts[0], "dataset_path", None) is None:
            raise ValueError(
                f"The job trains on {type(self._parts[0]).__name__}: expected GPTDataset, or a "
                "blend of such, read from .bin and .idx files."
            )
        self._config = self._parts[0].config
        self.block_size = int(self._config.sequence_length)
        prefixes = [part.dataset_path for part in self._parts]
        names, role_of = name_sources(prefixes), assign_roles(prefixes, roles)
        if self._blended:
            if dataset.dataset_index is None:  # mapped when first read
                dataset[0]
            counts = np.bincount(dataset.dataset_index, minlength=len(names))
        else:
            counts = np.array([min(len(dataset), num_samples)])
        # datasets of the blend in the order of ids, and the source row of every dataset
        self._order = sorted(range(len(names)), key=lambda number: (role_of[number], number))
        self._row_of_dataset = np.argsort(self._order)
        *self._starts, self._size = np.cumsum([0, *counts[self._order]]).tolist()
        self.sources = tuple(
            SourceRow(names[number], role_of[number], start, int(counts[number]))
            for number, start in zip(self._order, self._starts, strict=True)
        )

    def __len__(self) -> int:
        """Returns the number of samples that the job may draw."""
        return self._size

    @cached_property
    def digest(self) -> str:
        """Digest of everything that determines the samples and the mask of their loss."""
        facts: list[Any] = [
            [getattr(self._config, name) for name in ("reset_position_ids", "reset_attention_mask")]
            + [self._config.eod_mask_loss, self._config.add_extra_token_to_sequence]
        ]
        for row, number in zip(self.sources, self._order, strict=True):
            part = self._parts[number]
            identity = {
                key: value
                for key, value in part.unique_identifiers.items()
                if key not in ("dataset_path", "tokenizer")  # machine-specific
            }
            lengths = part.dataset.sequence_lengths
            facts.append([*row, identity, len(lengths), int(lengths.sum(dtype=np.int64))])
        text = json.dumps(facts, sort_keys=True, default=str)
        return digest(text.encode())

    @property
    def tokenizer_fingerprint(self) -> str:
        """Description that distinguishes the job's tokenizer from others."""
        tokenizer = self._config.tokenizer
        eod = getattr(tokenizer, "eod", None)
        return f"{type(tokenizer).__name__} of {tokenizer.vocab_size} tokens, end of document {eod}"

    def role_range(self, role: str) -> tuple[int, int]:
        """Returns the first id of a role and the id after its last.

        Raises:
            ValueError: the job reads no sample of that role.
        """
        ids = [(row.start, row.start + row.count) for row in self.sources if row.role == role]
        if not ids or ids[0][0] == ids[-1][1]:
            raise ValueError(f"The job draws no {role} sample: 'roles' or the blend must name one.")
        return ids[0][0], ids[-1][1]

    def source_of_batch(self, batch: Mapping[str, Any]) -> np.ndarray:
        """Returns the index in `sources` of every sample of a drawn batch, int64 `[b]`.

        Raises:
            ValueError: the batch does not state which dataset its samples come from.
        """
        if not self._blended:
            return np.zeros(len(batch["tokens"]), dtype=np.int64)
        if "dataset_id" not in batch:
            raise ValueError(
                "The job's batches have no 'dataset_id', so their sources are unknown: expected "
                "batches as megatron-core's BlendedDataset returns them."
            )
        return self._row_of_dataset[np.asarray(batch["dataset_id"], dtype=np.int64)]

    def hash_batch(self, batch: Mapping[str, Any]) -> np.ndarray:
        """Returns block hashes uint8 [b, 16] of a drawn batch on the host, before it is split.

        A sample's hash covers its source's name and all its S + 1 tokens.
        """
        names = [self.sources[row].name for row in self.source_of_batch(batch)]
        text_bS = np.asarray(torch.cat([batch["tokens"], batch["labels"][:, -1:]], dim=1))
        hashes = [block_hash(name, row) for name, row in zip(names, text_bS, strict=True)]
        return np.frombuffer(b"".join(hashes), dtype=np.uint8).reshape(-1, 16)

    def hashes(self, block_ids: np.ndarray) -> np.ndarray:
        """Returns the block hashes of samples, uint8 `[C, 16]`."""
        batches = self.micro_batches(block_ids, 1)
        return np.concatenate([self.hash_batch(batch) for batch in batches])

    def micro_batches(self, block_ids: np.ndarray, size: int) -> Iterator[dict[str, Any]]:
        """Yields batches of `size` samples in order, as the job's own loader makes them."""
        assert len(block_ids) % size == 0, (len(block_ids), size)
        for start in range(0, len(block_ids), size):
            samples = []
            for block_id in block_ids[start : start + size].tolist():
                row = bisect.bisect_right(self._starts, block_id) - 1
                number = self._order[row]
                sample = self._parts[number][block_id - self._starts[row]]
                samples.append({"dataset_id": number, **sample} if self._blended else sample)
            yield torch.utils.data.default_collate(samples)
