"""The training data of a Megatron job, seen as a store of blocks.

A job reads samples from a GPTDataset, or from a BlendedDataset of several. A block here is one such
sample, and its id is its index among all samples that the job may draw, adaptation first:

    id      [0, 70)              [70, 100)          [100, 180)
    sample  0 .. 69 of legal     0 .. 29 of web     0 .. 79 of news
    role    adaptation           replay             replay

Megatron cuts samples from documents that it shuffles and joins; the result depends on the seed, the
length of a sample and the number of epochs. The digest covers these inputs, so that references of
other samples are refused at setup. Samples are read by id on the rank that trains on them: no token
crosses ranks.

Shape suffixes: C = samples, S = tokens per sample.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from megatron.core.utils import unwrap_model

from nemo_rod.corpus.hashing import block_hash
from nemo_rod.files import digest
from nemo_rod.hosts.swap_in.roles import Roles, assign_roles, name_sources
from nemo_rod.megatron.batches import Batch
from nemo_rod.megatron.scoring.scorer import MegatronScorer
from nemo_rod.megatron.scoring.scoring_pass import ForwardStep
from nemo_rod.selection import Pool, References, SourceRow
from nemo_rod.selection.held_out import HELD_OUT, source_losses


class JobData:
    """The train split of a job as blocks with ids, sources, roles and hashes.

    Args:
        dataset: megatron-core's BlendedDataset or GPTDataset.
        roles: roles of the sources; see `check_roles`.
        num_samples: maximum number of samples that the job may draw; None for all that the sources
            have, however many the blend draws of each.
        unused: keys of the samples that the job's forward step does not read, such as an S x S
            mask that the model computes itself.
        train: path prefixes of the train split's sources, if this is another split.

    Attributes:
        prefixes: path prefixes of the sources, in the blend's order.
        sources: one row per source, adaptation first.
        num_adaptation: samples of adaptation, whose ids come first.
        block_size: input tokens per sample (S); a sample has S targets and S + 1 tokens.

    Raises:
        ValueError: the dataset's type is not supported, or a source has no role.
    """

    def __init__(
        self,
        dataset: Any,
        roles: Roles,
        *,
        num_samples: int | None,
        unused: Collection[str] = (),
        train: Sequence[str] | None = None,
    ) -> None:
        self._dataset, self.unused = dataset, unused
        # compares samples that are read to be trained on, by ids and hashes
        self.compare: Callable[[np.ndarray, np.ndarray], Any] | None = None
        self._parts = parts_of(dataset)
        self._blended = hasattr(dataset, "datasets")
        if getattr(self._parts[0], "dataset_path", None) is None:
            raise ValueError(
                f"The job trains on {type(self._parts[0]).__name__}: expected GPTDataset, or a "
                "blend of such, read from .bin and .idx files, which its provider makes on every "
                "rank (is_distributed = True)."
            )
        self._config = self._parts[0].config
        self.block_size = int(self._config.sequence_length)
        self.prefixes: list[str] = [part.dataset_path for part in self._parts]
        names = name_sources(self.prefixes)
        role_of = assign_roles(self.prefixes, roles, train=train or self.prefixes)
        if num_samples is None:
            counts = np.array([len(part) for part in self._parts])
        elif self._blended:
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
        self.num_adaptation = sum(row.count for row in self.sources if row.role == "adaptation")

    def __len__(self) -> int:
        """Returns the number of samples that the job may draw."""
        return self._size

    @cached_property
    def digest(self) -> str:
        """Digest of everything that determines the samples and the mask of their loss."""
        masks = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        settings = (*masks, "add_extra_token_to_sequence")
        facts: list[Any] = [[getattr(self._config, name) for name in settings]]
        for row, number in zip(self.sources, self._order, strict=True):
            part = self._parts[number]
            identity = {
                key: value
                for key, value in part.unique_identifiers.items()
                if key not in ("dataset_path", "tokenizer")  # machine-specific
            }
            lengths = part.dataset.sequence_lengths
            facts.append([*row, identity, len(lengths), int(lengths.sum(dtype=np.int64))])
        return digest(json.dumps(facts, sort_keys=True, default=str).encode())

    @property
    def tokenizer_fingerprint(self) -> str:
        """Description that distinguishes the job's tokenizer from others."""
        tokenizer = self._config.tokenizer
        eod = getattr(tokenizer, "eod", None)
        return f"{type(tokenizer).__name__} of {tokenizer.vocab_size} tokens, end of document {eod}"

    def refuse_end(self, stop: int) -> None:
        """Refuses steps that read up to a position behind the job's last sample.

        Raises:
            ValueError: the message names both numbers and the cure.
        """
        length = len(self._dataset.dataset_index) if self._blended else self._size
        if stop > length:
            raise ValueError(
                f"The job's data ends after {length} samples, but its steps draw {stop}: give its "
                "blend weights, with which files are read as often as needed, draw fewer "
                "candidates a sample, or train fewer steps."
            )

    def pool(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the samples at positions [start, start + count) of the job's reading order.

        Megatron's sequential sampler reads a dataset from its first sample, with any number of
        replicas.

        Returns:
            Their ids, int64 `[count]`, and whether they are replay, bool `[count]`.

        Raises:
            ValueError: the job's data ends before.
        """
        dataset, stop = self._dataset, start + count
        self.refuse_end(stop)
        row_C, sample_C = np.zeros(count, dtype=np.int64), np.arange(start, stop)
        if self._blended:
            row_C = self._row_of_dataset[np.asarray(dataset.dataset_index[start:stop], np.int64)]
            sample_C = np.asarray(dataset.dataset_sample_index[start:stop], dtype=np.int64)
        is_replay = np.array([row.role == "replay" for row in self.sources])
        return np.array(self._starts)[row_C] + sample_C, is_replay[row_C]

    def source_index(self, block_ids: np.ndarray) -> np.ndarray:
        """Returns the index in `sources` of each sample's source, int64 `[C]`."""
        return np.searchsorted(self._starts, block_ids, side="right") - 1

    def hashes(self, block_ids: np.ndarray) -> np.ndarray:
        """Returns hashes of samples, of their source's name and S + 1 tokens, uint8 `[C, 16]`."""
        return self._hashes(self._samples(block_ids))

    def micro_batches(
        self, block_ids: np.ndarray, size: int, *, length: int | None = None, checked: bool = False
    ) -> Iterator[Batch]:
        """Yields batches of `size` samples in order, as the job's own loader makes them.

        They are whole, without the number of a sample's dataset and the keys in `unused`. If
        `checked`, `compare` gets their ids and hashes, uint8 `[size, 16]`, before one is yielded.
        """
        assert len(block_ids) % size == 0, (len(block_ids), size)
        assert length in (None, self.block_size), length
        for start in range(0, len(block_ids), size):
            ids = block_ids[start : start + size]
            samples = list(self._samples(ids))
            if checked and self.compare is not None:
                self.compare(ids, self._hashes(samples))
            yield torch.utils.data.default_collate([sample for _, sample in samples])

    def scorer(
        self, model: list, groups: Any, forward_step_func: Callable, micro_batch_size: int
    ) -> MegatronScorer:
        """Returns a scorer of the samples, by the job's own forward step.

        The arguments are those of the job's schedule, and Megatron's process groups.
        """
        return MegatronScorer(
            model,
            self,
            groups,
            micro_batch_size=micro_batch_size,
            forward_step=losses_and_mask(forward_step_func),
        )

    def _hashes(self, samples: Iterable[tuple[str, Batch]]) -> np.ndarray:
        hashes = [
            block_hash(name, np.asarray(torch.cat([sample["tokens"], sample["labels"][-1:]])))
            for name, sample in samples
        ]
        return np.frombuffer(b"".join(hashes), dtype=np.uint8).reshape(-1, 16)

    def _samples(self, block_ids: np.ndarray) -> Iterator[tuple[str, Batch]]:
        """Yields the name of every sample's source, and the sample."""
        row_C = self.source_index(block_ids)
        for block_id, row in zip(block_ids.tolist(), row_C.tolist(), strict=True):
            sample = self._parts[self._order[row]][block_id - self._starts[row]]
            used = {key: value for key, value in sample.items() if key not in self.unused}
            yield self.sources[row].name, used


class HeldOut(JobData):
    """The first samples of every source of a job's validation split; arguments as of `JobData`.

    They do not depend on how many samples the job's own validation reads. Several validation sets
    are one split of all their sources.

    Raises:
        ValueError: the job has no validation data, or not the sources that have roles.
    """

    def __init__(
        self,
        dataset: Any,
        roles: Roles,
        *,
        unused: Collection[str],
        train: Sequence[str] | None = None,
    ) -> None:
        if not (parts := parts_of(dataset)):
            raise ValueError("the job has no validation split")
        if type(dataset) is list:
            by_path = {getattr(part, "dataset_path", None): part for part in parts}
            dataset = SimpleNamespace(datasets=[*by_path.values()])
        super().__init__(dataset, roles, num_samples=None, unused=unused, train=train)
        self.measured = [row for row in self.sources if row.count]
        if not self.measured:
            raise ValueError("the job's validation split has no sample")

    def content(self) -> str:
        """Returns the digest of the samples' content, hex."""
        first = [row.start + np.arange(min(row.count, HELD_OUT)) for row in self.measured]
        return digest(self.hashes(np.concatenate(first)).tobytes())

    def losses(self, **call: Any) -> dict[str, float]:
        """Returns `validation/<role>/<source>/loss`, nats per token; see `scorer`. Collective."""
        return source_losses(self.scorer(**call), self.measured, num_blocks=HELD_OUT)


def parts_of(dataset: Any) -> list[Any]:
    """Returns the datasets that a split reads: of a blend, of a list of either, or of None."""
    if type(dataset) is list:
        return [part for each in dataset for part in parts_of(each)]
    return [] if dataset is None else list(getattr(dataset, "datasets", [dataset]))


@dataclass
class JobPools:
    """Pools of a job's steps: consecutive samples in the order in which the job reads."""

    data: JobData
    size: int  # candidates of every step (C)
    origin: int = 0  # place of the first candidate of step 0, which the job's first step decides

    def pool(self, step: int) -> Pool:
        """Returns the candidates of a step."""
        return Pool(step, *self.data.pool(self.origin + step * self.size, self.size))


class JobReferences(References):
    """References of a job's samples, which are not read to look one up.

    Their digest covers the data behind the samples; `compare` compares those that are read.
    """

    __getitem__ = References.losses

    def compare(self, block_ids: np.ndarray, hashes: np.ndarray) -> None:
        """Refuses samples of other content than references are of; those without any are left out.

        References may be of replay alone, whose ids come last.
        """
        have = block_ids >= self.manifests[0].start
        self.checked_losses(block_ids[have], hashes[have])


def losses_and_mask(forward_step: Callable) -> ForwardStep:
    """Wraps the job's forward step to return token losses and their mask instead of one number.

    Megatron's forward steps bind the mask to the loss function that they return.
    """

    def step(batches: Any, chunk: Any) -> tuple[Any, torch.Tensor]:
        result = forward_step(batches, chunk)
        is_pair = isinstance(result, tuple) and len(result) == 2
        output, loss_function = result if is_pair else (result, None)
        bound = loss_function.args if isinstance(loss_function, partial) else ()
        # before the last pipeline stage the output is no loss, and there may be no mask
        is_last = getattr(unwrap_model(chunk), "post_process", False)
        is_loss = torch.is_tensor(output) and (is_last or output.ndim == 2)
        if not bound or (is_loss and not _is_mask(bound[0], output)):
            raise ValueError(
                "The job's forward step does not return functools.partial(loss, loss_mask, ...), "
                "as Megatron's own steps do, with a loss for every token: selection reads the mask "
                "of the losses from its first argument; return such losses and such a partial."
            )
        return output, bound[0]

    return step


def _is_mask(value: Any, loss: torch.Tensor) -> bool:
    if not torch.is_tensor(value) or value.numel() != loss.numel():
        return False
    is_transposed = value.ndim == loss.ndim and value.shape != loss.shape
    # labels and positions, of which there are as many, are integers
    has_ones = value.is_floating_point() or bool(((value == 0) | (value == 1)).all())
    return has_ones and not is_transposed


def refuse_other_order(
    data: JobData, iterator: Any, consumed: int, count: int, size: int, replicas: Any
) -> None:
    """Refuses a job whose iterator does not read its data from the first sample on.

    Args:
        data: the job's training data.
        iterator: the job's own, of this rank; None on a rank that reads no data.
        consumed: samples that the job has trained on before.
        count: micro-batches of a step that this rank reads.
        size: samples in one of them.
        replicas: the data-parallel group.

    Raises:
        ValueError: the iterator ends, or reads other samples.
    """
    if iterator is None:
        return
    places, _ = data.pool(consumed, count * size * replicas.size())
    own = places.reshape(count, replicas.size(), size)[:, replicas.rank()].ravel()
    for place, batch in enumerate(data.micro_batches(own, size)):
        read: Batch = next(iterator, {})
        if not read or any(
            torch.is_tensor(value) and not torch.equal(value.cpu(), batch[name])
            for name, value in read.items()
            if name in batch
        ):
            raise ValueError(
                f"The job's own iterator does not read samples {consumed} and following of its "
                f"data in order (micro-batch {place} of replica {replicas.rank()} differs): "
                "selection finds samples by their place; use Megatron's sequential sampler, "
                "dataloader_type='single', without packing."
            )
