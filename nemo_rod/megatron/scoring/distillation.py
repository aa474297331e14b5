"""The cross entropy of what a teacher kept, from logits whose vocabulary is split over ranks.

What is kept of the teacher's prediction at a position: the ids of its k likeliest tokens, and the
log-probabilities of these and of the rest as one more outcome (`selection/references/teacher.py`).
Teacher and student go through the same functions, so that a block scores exactly 0 where they are
the same.

Shape suffixes: s = positions of a slice, B = blocks, V = entries of the vocabulary on this rank,
k = kept tokens, o = k + 1 outcomes; C = blocks asked for, S = tokens per block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nemo_rod.megatron.batches import Batch
from nemo_rod.megatron.scoring.scoring_pass import at_their_places
from nemo_rod.selection.references.teacher import Teacher

_LOW = (1 << 32) - 1
_IDS, _LOGPROBS, _ROWS = "teacher_ids", "teacher_logprobs", "has_teacher"


def top_ids(
    logits_sBV: torch.Tensor, top_k: int, vocab_size: int, tp: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """The likeliest tokens at every position, in falling order; of equal ones the lower id first.

    Args:
        logits_sBV: this rank's part of the vocabulary.
        top_k: how many, `vocab_size` at most.
        vocab_size: ids of the tokenizer; what a model has beyond them is padding and never taken.
        tp: the tensor-parallel group; None for one rank.

    Returns:
        int64 `[s, B, k]`, the same on every rank of the group.
    """
    first = _first_entry(logits_sBV, tp)
    ids_V = torch.arange(first, first + logits_sBV.shape[-1], device=logits_sBV.device)
    # a key that sorts like the logit, then by falling id: no two are equal, so no top-k depends on
    # how ties are broken
    bits = logits_sBV.float().view(torch.int32)
    key_sBV = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    key_sBV <<= 32
    key_sBV |= _LOW - ids_V
    key_sBV.masked_fill_(ids_V >= vocab_size, torch.iinfo(torch.int64).min)
    best = key_sBV.topk(min(top_k, key_sBV.shape[-1])).values
    if tp is not None and tp.size() > 1:
        best = torch.cat(_gathered(best, tp), dim=-1).topk(top_k).values
    return _LOW - (best & _LOW)


def outcome_logprobs(
    logits_sBV: torch.Tensor, ids_sBk: torch.Tensor, tp: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Log-probabilities of some tokens, and of all others together.

    As in Megatron's own loss, entries that pad the vocabulary count.

    Args:
        logits_sBV: this rank's part of the vocabulary; changed in between, the same afterwards.
        ids_sBk: the tokens, int64, those of one position distinct (or of no interest).
        tp: the tensor-parallel group; None for one rank.

    Returns:
        float32 `[s, B, k + 1]` in nats, the same on every rank of the group; -inf for the others
        where there are none.
    """
    logits_sBV = logits_sBV.float()
    at_sBk = ids_sBk - _first_entry(logits_sBV, tp)
    here_sBk = (at_sBk >= 0) & (at_sBk < logits_sBV.shape[-1])
    at_sBk = at_sBk.where(here_sBk, 0)
    own_sBk = logits_sBV.gather(-1, at_sBk)
    some_sBk = own_sBk.where(here_sBk, 0.0)
    # without the tokens, whatever is left is the rest: to take it from 1 would leave only rounding
    # of a small rest. Minimum and maximum let entries of other ranks, which point to 0, do nothing.
    logits_sBV.scatter_reduce_(-1, at_sBk, _select(here_sBk, -torch.inf, torch.inf), "amin")
    rest_sB = logits_sBV.logsumexp(-1)
    logits_sBV.scatter_reduce_(-1, at_sBk, own_sBk.where(here_sBk, -torch.inf), "amax")
    if tp is not None and tp.size() > 1:
        dist.all_reduce(some_sBk, group=tp)
        rest_sB = torch.stack(_gathered(rest_sB, tp)).logsumexp(0)
    return torch.cat([some_sBk, rest_sB.unsqueeze(-1)], dim=-1).log_softmax(-1)


def soft_loss(logprobs_sBo: torch.Tensor, kept_sBo: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the kept outcomes under the current ones, nats, float32 `[s, B]`.

    Args:
        logprobs_sBo: of the outcomes now, float32.
        kept_sBo: of the teacher, rounded for keeping; they are made to add up to 1 again.
    """
    weight_sBo = kept_sBo.float().exp()
    weight_sBo = weight_sBo / weight_sBo.sum(-1, keepdim=True)
    # an outcome that the teacher rules out costs nothing, also where it is impossible now
    return (-weight_sBo * logprobs_sBo).where(weight_sBo > 0, 0.0).sum(-1)


class SoftTargets:
    """Scores blocks that a teacher covers by what it kept, and all others as ever.

    Args:
        teacher: where the records are.
        tp: the tensor-parallel group.
    """

    def __init__(self, teacher: Teacher, tp: dist.ProcessGroup) -> None:
        self.teacher, self.tp = teacher, tp
        self._now: Batch = {}

    def batches(
        self, batches: Iterator[Batch], block_ids: np.ndarray, micro_batch_size: int
    ) -> Iterator[Batch]:
        """Yields the batches of blocks int64 `[c]` with their records, where there are any."""
        for number, batch in enumerate(batches):
            part = block_ids[number * micro_batch_size : (number + 1) * micro_batch_size]
            rows = np.flatnonzero(self.teacher.covers(part))
            if rows.size:
                ids, logprobs = self.teacher[part[rows]]
                batch |= {
                    _IDS: _at_rows(rows, ids, len(part)),
                    _LOGPROBS: _at_rows(rows, logprobs, len(part)),
                    _ROWS: _at_rows(rows, np.ones(ids.shape[:2], dtype=bool), len(part)),
                }
            yield batch

    def begin(self, batch: Batch) -> None:
        """Takes what belongs to the micro-batch that goes through the model next."""
        self._now = {key: batch[key] for key in (_IDS, _LOGPROBS, _ROWS) if key in batch}

    def loss(
        self, where: slice, logits_sBV: torch.Tensor, ordinary: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Token losses `[B, s]` of a slice of positions."""
        if not self._now:
            return ordinary()
        ids_sBk, kept_sBo, has_teacher_sB = (
            self._now[key][:, where].transpose(0, 1) for key in (_IDS, _LOGPROBS, _ROWS)
        )
        # before the ordinary loss, which computes in the place of fp32 logits
        logprobs_sBo = outcome_logprobs(logits_sBV, ids_sBk.long(), self.tp)
        soft_Bs = soft_loss(logprobs_sBo, kept_sBo).transpose(0, 1)
        return torch.where(has_teacher_sB.transpose(0, 1), soft_Bs, ordinary())


class TopKTargets:
    """Keeps what a teacher foretells, and gives its own cross entropy with what was kept.

    Args:
        top_k: tokens to keep at every position.
        vocab_size: ids of the tokenizer.
        groups: Megatron's process groups (`tp` and `cp` are used).
    """

    def __init__(self, top_k: int, vocab_size: int, groups: Any) -> None:
        self.top_k, self.vocab_size, self.groups = top_k, vocab_size, groups
        # per micro-batch: first position of a slice -> token ids and log-probabilities
        self._made: list[dict[int, tuple[torch.Tensor, torch.Tensor]]] = []

    def batches(
        self, batches: Iterator[Batch], block_ids: np.ndarray, micro_batch_size: int
    ) -> Iterator[Batch]:
        """The batches as they are."""
        return batches

    def begin(self, batch: Batch) -> None:
        """Begins a micro-batch."""
        self._made.append({})

    def loss(
        self, where: slice, logits_sBV: torch.Tensor, ordinary: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Token losses `[B, s]` of a slice of positions."""
        ids_sBk = top_ids(logits_sBV, self.top_k, self.vocab_size, self.groups.tp)
        logprobs_sBo = outcome_logprobs(logits_sBV, ids_sBk, self.groups.tp)
        kept_sBo = logprobs_sBo.half()
        self._made[-1][where.start] = (
            ids_sBk.int().transpose(0, 1),
            kept_sBo.transpose(0, 1),
        )
        return soft_loss(logprobs_sBo, kept_sBo).transpose(0, 1)

    def take(self) -> tuple[np.ndarray, np.ndarray] | None:
        """What was kept since the last call; a collective call of context-parallel ranks.

        Returns:
            int32 `[C, S, k]` and float16 `[C, S, k + 1]` of all blocks that went through the model,
            on ranks of the last pipeline stage; None elsewhere.
        """
        made, self._made = [parts for parts in self._made if parts], []
        if not made:
            return None
        cp, arrays = self.groups.cp, []
        for number in range(2):
            blocks = [torch.cat([parts[at][number] for at in sorted(parts)], 1) for parts in made]
            whole = torch.cat(blocks)
            if cp.size() > 1:
                whole = at_their_places(whole, cp)
                dist.all_reduce(whole, group=cp)
            arrays.append(whole.cpu().numpy())
        return arrays[0], arrays[1]


def _first_entry(logits_sBV: torch.Tensor, tp: dist.ProcessGroup | None) -> int:
    return 0 if tp is None else tp.rank() * logits_sBV.shape[-1]


def _gathered(tensor: torch.Tensor, tp: dist.ProcessGroup) -> list[torch.Tensor]:
    """The tensor of every rank of a group."""
    every = [torch.empty_like(tensor) for _ in range(tp.size())]
    dist.all_gather(every, tensor.contiguous(), group=tp)
    return every


def _select(condition: torch.Tensor, yes: float, no: float) -> torch.Tensor:
    return torch.full(condition.shape, no, device=condition.device).masked_fill(condition, yes)


def _at_rows(rows: np.ndarray, values: np.ndarray, count: int) -> torch.Tensor:
    """A batch of `count` rows with some of them filled, the others zero."""
    whole = np.zeros((count, *values.shape[1:]), dtype=values.dtype)
    whole[rows] = values
    return torch.from_numpy(whole).cuda(non_blocking=True)
