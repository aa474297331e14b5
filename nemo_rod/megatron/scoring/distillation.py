"""Cross entropy with a teacher's kept predictions, from logits split over tensor-parallel ranks.

A kept prediction at one position consists of the ids of the teacher's k likeliest tokens and the
log-probabilities of these and of all other tokens together as one more outcome
(`selection/references/teacher.py`). Teacher and student use the same functions, so that a block
scores exactly 0 where they are equal.

Shape suffixes: s = positions of a slice, B = blocks, V = vocabulary entries on this rank, k = kept
tokens, o = k + 1 outcomes; C = requested blocks, S = tokens per block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nemo_rod.megatron.batches import Batch, on_device
from nemo_rod.megatron.scoring.scoring_pass import at_their_places
from nemo_rod.selection.references.teacher import Teacher

_LOW = (1 << 32) - 1
_IDS, _LOGPROBS, _ROWS = "teacher_ids", "teacher_logprobs", "has_teacher"


def top_ids(
    logits_sBV: torch.Tensor, top_k: int, vocab_size: int, tp: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Returns the likeliest tokens at every position, in descending order; ties: lower id first.

    A model's entries beyond the tokenizer's `vocab_size` ids are padding, never taken.

    Returns:
        Token ids, int64 `[s, B, k]`, the same on every rank of the group.
    """
    first = _first_entry(logits_sBV, tp)
    ids_V = torch.arange(first, first + logits_sBV.shape[-1], device=logits_sBV.device)
    # a key that sorts by logit, then by descending id: all keys differ, so the top-k never depends
    # on how ties are broken
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
    """Returns the log-probabilities of the given tokens, and of all others together.

    As in Megatron's own loss, entries that pad the vocabulary count.

    Args:
        logits_sBV: logits of this rank's part of the vocabulary; modified temporarily.
        ids_sBk: the tokens, int64, distinct at each position (unless its result is not used).
        tp: the tensor-parallel group; None for one rank.

    Returns:
        float32 `[s, B, k + 1]` in nats, the same on every rank of the group; the last entry is
        -inf where there are no other tokens.
    """
    logits_sBV = logits_sBV.float()
    at_sBk = ids_sBk - _first_entry(logits_sBV, tp)
    here_sBk = (at_sBk >= 0) & (at_sBk < logits_sBV.shape[-1])
    at_sBk = at_sBk.where(here_sBk, 0)
    own_sBk = logits_sBV.gather(-1, at_sBk)
    some_sBk = own_sBk.where(here_sBk, 0.0)
    # The rest is summed with the tokens masked out: subtracting from 1 would lose a small rest to
    # rounding. With minimum and maximum, tokens of other ranks, which point to 0, have no effect.
    limit_sBk = torch.full_like(own_sBk, torch.inf).masked_fill(here_sBk, -torch.inf)
    logits_sBV.scatter_reduce_(-1, at_sBk, limit_sBk, "amin")
    rest_sB = logits_sBV.logsumexp(-1)
    logits_sBV.scatter_reduce_(-1, at_sBk, own_sBk.where(here_sBk, -torch.inf), "amax")
    if tp is not None and tp.size() > 1:
        dist.all_reduce(some_sBk, group=tp)
        rest_sB = torch.stack(_gathered(rest_sB, tp)).logsumexp(0)
    return torch.cat([some_sBk, rest_sB.unsqueeze(-1)], dim=-1).log_softmax(-1)


def soft_loss(logprobs_sBo: torch.Tensor, kept_sBo: torch.Tensor) -> torch.Tensor:
    """Returns the cross entropy between kept and current outcomes, nats, float32 `[s, B]`.

    The teacher's log-probabilities were rounded for storage and are renormalised.
    """
    weight_sBo = kept_sBo.float().exp()
    weight_sBo = weight_sBo / weight_sBo.sum(-1, keepdim=True)
    # an outcome of zero teacher probability costs nothing, even if the student also rules it out
    return (-weight_sBo * logprobs_sBo).where(weight_sBo > 0, 0.0).sum(-1)


class Targets:
    """What every position is scored by; as such the next token, and others in subclasses."""

    def batches(
        self, batches: Iterator[Batch], block_ids: np.ndarray, micro_batch_size: int
    ) -> Iterator[Batch]:
        """Returns the micro-batches of blocks int64 `[c]` with the data that their losses need."""
        return batches

    def begin(self, batch: Batch) -> None:
        """Receives this rank's part of the next micro-batch."""

    def loss(
        self, where: slice, logits_sBV: torch.Tensor, ordinary: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Returns the token losses `[B, s]` of a slice of its positions; see `SliceLoss`."""
        return ordinary()


class SoftTargets(Targets):
    """Scores blocks by a teacher's kept predictions if it covers them, and others by their loss."""

    def __init__(self, teacher: Teacher, tp: dist.ProcessGroup) -> None:
        self.teacher, self.tp = teacher, tp
        self._now: Batch = {}

    def batches(
        self, batches: Iterator[Batch], block_ids: np.ndarray, micro_batch_size: int
    ) -> Iterator[Batch]:
        """Adds the teacher's predictions where there are any."""
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
        """Keeps the teacher's predictions."""
        self._now = {key: batch[key] for key in (_IDS, _LOGPROBS, _ROWS) if key in batch}

    def loss(
        self, where: slice, logits_sBV: torch.Tensor, ordinary: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Returns the cross entropy with the teacher where it has predictions."""
        if not self._now:
            return ordinary()
        ids_sBk, kept_sBo, has_teacher_sB = (
            self._now[key][:, where].transpose(0, 1) for key in (_IDS, _LOGPROBS, _ROWS)
        )
        # before the ordinary loss, which overwrites fp32 logits
        logprobs_sBo = outcome_logprobs(logits_sBV, ids_sBk.long(), self.tp)
        soft_Bs = soft_loss(logprobs_sBo, kept_sBo).transpose(0, 1)
        return torch.where(has_teacher_sB.transpose(0, 1), soft_Bs, ordinary())


class TopKTargets(Targets):
    """Keeps a teacher's `top_k` predictions and computes its own cross entropy with them.

    Of Megatron's process groups, `tp` and `cp` are used; see `top_ids` for `vocab_size`.
    """

    def __init__(self, top_k: int, vocab_size: int, groups: Any) -> None:
        self.top_k, self.vocab_size, self.groups = top_k, vocab_size, groups
        # per micro-batch: first position of a slice -> token ids and log-probabilities
        self._made: list[dict[int, tuple[torch.Tensor, torch.Tensor]]] = []

    def begin(self, batch: Batch) -> None:
        """Starts a micro-batch."""
        self._made.append({})

    def loss(
        self, where: slice, logits_sBV: torch.Tensor, ordinary: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Returns the cross entropy with the model's own likeliest tokens, and keeps these."""
        ids_sBk = top_ids(logits_sBV, self.top_k, self.vocab_size, self.groups.tp)
        logprobs_sBo = outcome_logprobs(logits_sBV, ids_sBk, self.groups.tp)
        kept_sBo = logprobs_sBo.half()
        self._made[-1][where.start] = ids_sBk.int().transpose(0, 1), kept_sBo.transpose(0, 1)
        return soft_loss(logprobs_sBo, kept_sBo).transpose(0, 1)

    def take(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns the predictions kept since the last call. Collective over context-parallel ranks.

        Returns:
            Token ids int32 `[C, S, k]` and log-probabilities float16 `[C, S, k + 1]` of all blocks
            that went through the model, on ranks of the last pipeline stage; None elsewhere.
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
    every = [torch.empty_like(tensor) for _ in range(tp.size())]
    dist.all_gather(every, tensor.contiguous(), group=tp)
    return every


def _at_rows(rows: np.ndarray, values: np.ndarray, count: int) -> torch.Tensor:
    """Returns a batch of `count` rows with `values` in the given rows, and zeros elsewhere."""
    whole = np.zeros((count, *values.shape[1:]), dtype=values.dtype)
    whole[rows] = values
    return on_device(torch.from_numpy(whole))
