"""The micro-batches of a job's own iterators: drawing more of them, and exchanging data on them.

Every replica r of R draws its own micro-batches of b samples. For any R, the global pool has the
order in which a job on one process would have read the same samples:

    position   0 .. b-1          b .. 2b-1         ...   R*b .. R*b+b-1
    sample     micro-batch 0     micro-batch 0     ...   micro-batch 1
               of replica 0      of replica 1            of replica 0

Winners are dealt to the replicas in the same way, so that choosing all candidates changes nothing.

Jobs differ in which ranks read data: all of them, or the first tensor-parallel rank of the first
and the last pipeline stage. The *reader* of a replica is the one rank that always reads data and
also has the losses: the first tensor-parallel rank of the last stage.

Shapes: c candidates of this replica, C of all replicas, K winners of all replicas, b samples per
micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

Batch = dict[str, Any]

# Keys that only selection uses: a job's own code may not expect them.
_IDENTITY = ("dataset_id",)


def draw(iterator: Iterator[Batch], count: int, unused: Collection[str] = ()) -> list[Batch]:
    """Takes micro-batches from a job's iterator.

    Args:
        iterator: the job's own iterator.
        count: number of micro-batches.
        unused: keys that the job's forward step does not read, which are dropped.

    Raises:
        ValueError: the job's data is exhausted, or its batches are packed.
    """
    batches = []
    for number in range(count):
        try:
            batch = next(iterator)
        except StopIteration:
            raise ValueError(
                f"The job's data ended {count - number} micro-batches before a pool of {count} was "
                "complete: it holds fewer than multiplier x the samples that are trained on; lower "
                "the multiplier or the number of steps."
            ) from None
        batches.append({name: value for name, value in batch.items() if name not in unused})
    packed = [name for name in (batches[0] if batches else ()) if name.startswith("cu_seqlens")]
    if packed:
        raise ValueError(
            f"The job's batches are packed with '{packed[0]}', where a row holds several samples: "
            "selection needs one sample per row; turn packing off."
        )
    return batches


def broadcast_from_readers(
    function: Callable[[], np.ndarray], shape: tuple[int, ...], groups: Any
) -> np.ndarray:
    """Calls a function on the readers and broadcasts its results to all ranks. Collective.

    Args:
        function: function that returns numbers of shape `shape`; it is only called on readers and
            must not be collective itself.
        shape: shape of one replica's numbers.
        groups: Megatron's process groups (`tp`, `pp` and `dp`).

    Returns:
        The numbers by replica, float64 `[R, *shape]`, the same on every rank. Whole numbers below
        2**53 are exact.

    Raises:
        ValueError: the function raised it on some reader; raised on all ranks.
    """
    tp, pp, dp = groups.tp, groups.pp, groups.dp
    in_last_stage = pp.rank() == pp.size() - 1
    numbers = np.zeros(1 + int(np.prod(shape)))  # 1 after an error, then the results
    own_error: ValueError | None = None
    if in_last_stage and tp.rank() == 0:
        try:
            numbers[1:] = function().ravel()
        except ValueError as error:
            numbers[0], own_error = 1, error
    row = torch.from_numpy(numbers).cuda()
    if tp.size() > 1 and in_last_stage:
        dist.broadcast(row, group=tp, group_src=0)
    if pp.size() > 1:
        dist.broadcast(row, group=pp, group_src=pp.size() - 1)
    rows = row
    if dp.size() > 1:
        rows = row.new_empty(dp.size() * len(row))
        dist.all_gather_into_tensor(rows, row, group=dp)
    by_replica = rows.view(dp.size(), len(row)).cpu().numpy()
    if own_error is not None:
        raise own_error
    if by_replica[:, 0].any():
        replica = int(np.argmax(by_replica[:, 0]))
        raise ValueError(f"Replica {replica} cannot continue: see the error of its reader.")
    return by_replica[:, 1:].reshape(-1, *shape)


def without_identity(batch: Batch) -> Batch:
    """Returns a copy of a batch that the job may modify, without keys that it may not expect."""
    return {name: value for name, value in batch.items() if name not in _IDENTITY}


def in_pool_order(candidates: np.ndarray, micro_batch_size: int) -> np.ndarray:
    """Reorders data on the candidates of every replica `[R, c, n]` to the pool's order `[C, n]`."""
    replicas, count = candidates.shape[:2]
    by_batch = candidates.reshape(replicas, count // micro_batch_size, micro_batch_size, -1)
    return by_batch.swapaxes(0, 1).reshape(replicas * count, -1)


class Place(NamedTuple):
    """Locations of positions of a pool: int64 `[K]` each."""

    replica: np.ndarray
    row: np.ndarray  # index among the candidates of that replica


def place(positions: np.ndarray, micro_batch_size: int, replicas: int) -> Place:
    """Returns the replica that holds each position, and its row there."""
    batch, row = np.divmod(positions, micro_batch_size)
    return Place(batch % replicas, batch // replicas * micro_batch_size + row)


def winners(
    batches: list[Batch], chosen: np.ndarray, micro_batch_size: int, group: Any
) -> list[Batch]:
    """Returns the micro-batches that this replica trains on. Collective over the replicas.

    Args:
        batches: the candidates that this replica drew.
        chosen: positions in the pool, int64 `[K]`, ascending, the same on all replicas.
        micro_batch_size: samples per micro-batch (b).
        group: process group of the replicas; their batches have the same keys and shapes.

    Raises:
        ValueError: a key of the batches does not have one row per sample.
    """
    columns = {}
    for name, value in batches[0].items():
        if name in _IDENTITY or not torch.is_tensor(value):
            continue
        if value.shape[:1] != (micro_batch_size,):
            raise ValueError(
                f"The job's batches have '{name}' of shape {list(value.shape)}: expected one row "
                f"for each of the {micro_batch_size} samples of a micro-batch."
            )
        columns[name] = torch.cat([batch[name] for batch in batches])
    replicas, me = group.size(), group.rank()
    holder = place(chosen, micro_batch_size, replicas)
    taker = place(np.arange(len(chosen)), micro_batch_size, replicas).replica
    mine = taker == me
    if (holder.replica == taker).all():
        rows = torch.from_numpy(holder.row[mine])
        received = {name: column[rows] for name, column in columns.items()}
    else:
        received = _exchange(columns, holder, taker, group)
    trained = []
    for batch, start in zip(batches, range(0, int(mine.sum()), micro_batch_size), strict=False):
        # entries that are no tensors stay, such as a key that is None
        others = {name: value for name, value in batch.items() if not torch.is_tensor(value)}
        rows_of_batch = slice(start, start + micro_batch_size)
        trained.append(others | {name: rows[rows_of_batch] for name, rows in received.items()})
    return trained


def _exchange(
    columns: dict[str, torch.Tensor], holder: Place, taker: np.ndarray, group: Any
) -> dict[str, torch.Tensor]:
    """Sends each winner from the replica that holds it to the one that trains on it."""
    replicas, me = group.size(), group.rank()
    # winners in the order they are sent: by taker, then by position in the pool
    sent = np.flatnonzero(holder.replica == me)
    sent = sent[np.argsort(taker[sent], kind="stable")]
    received = np.flatnonzero(taker == me)
    received = received[np.argsort(holder.replica[received], kind="stable")]
    rows = torch.from_numpy(holder.row[sent])
    parcels = torch.cat([_bytes(column[rows]) for column in columns.values()], dim=1).cuda()
    arrived = parcels.new_empty(len(received), parcels.shape[1])
    dist.all_to_all_single(
        arrived,
        parcels,
        output_split_sizes=np.bincount(holder.replica[received], minlength=replicas).tolist(),
        input_split_sizes=np.bincount(taker[sent], minlength=replicas).tolist(),
        group=group,
    )
    arrived = arrived[torch.from_numpy(np.argsort(received)).to(arrived.device)]
    widths = [_bytes(column[:1]).shape[1] for column in columns.values()]
    return {
        name: part.contiguous().view(column.dtype).view(len(part), *column.shape[1:])
        for (name, column), part in zip(columns.items(), arrived.split(widths, dim=1), strict=True)
    }


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    """Views rows of any type as uint8 `[n, bytes]`."""
    return rows.contiguous().view(len(rows), math.prod(rows.shape[1:])).view(torch.uint8)
