"""Passes winners between real processes, and compares with a list that all of them hold."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist

from nemo_rod import cpu  # noqa: F401  `cuda()` on a machine without a GPU
from nemo_rod.hosts.swap_in.host_selector import StreamSelector
from nemo_rod.hosts.swap_in.stream import broadcast_from_readers, winners
from nemo_rod.megatron.scoring.scoring_pass import loss_sums, mean_losses

SIZE, DRAWN, LENGTH = 2, 6, 5


def main() -> None:
    dist.init_process_group("gloo")
    replicas, me = dist.get_world_size(), dist.get_rank()
    stream = torch.arange(DRAWN * replicas * SIZE * LENGTH).view(-1, SIZE, LENGTH)
    batches = [
        {
            "tokens": tokens,
            "loss_mask": tokens.float() / 3,
            "attention_mask": (tokens[:, None, None] % 3 == 0),
            "dataset_id": torch.zeros(SIZE, dtype=torch.int16),
            "nothing": None,
        }
        for tokens in stream[me::replicas]
    ]
    rng = np.random.default_rng(0)  # the same on all replicas
    flat = stream.view(-1, LENGTH)
    for trial in range(40):
        num_chosen = replicas * SIZE * int(rng.integers(1, DRAWN + 1))
        chosen = np.sort(rng.choice(len(flat), num_chosen, replace=False))
        if trial == 0:  # all winners on one replica, which others then train on
            chosen = np.flatnonzero(np.arange(len(flat)) // SIZE % replicas == 1)
            chosen = chosen[: len(chosen) // (replicas * SIZE) * replicas * SIZE]
        taken = winners(batches, chosen, SIZE, dist.group.WORLD)
        expected = flat[chosen].view(-1, SIZE, LENGTH)[me::replicas]
        assert len(taken) == len(expected), trial
        for batch, tokens in zip(taken, expected, strict=True):
            assert set(batch) == {"tokens", "loss_mask", "attention_mask", "nothing"}
            assert batch["nothing"] is None
            assert torch.equal(batch["tokens"], tokens)
            assert torch.equal(batch["loss_mask"], tokens.float() / 3)
            assert torch.equal(batch["attention_mask"], tokens[:, None, None] % 3 == 0)
    broadcast(me)
    masked()
    print("PASSED")
    dist.destroy_process_group()


def broadcast(me: int) -> None:
    """All ranks get the numbers of every reader, or an error if one reader raises one."""
    alone = dist.new_subgroups(1)[0]
    groups = SimpleNamespace(tp=alone, pp=alone, dp=dist.group.WORLD)
    numbers = broadcast_from_readers(lambda: np.array([[me, 2**53 - 1]]), (1, 2), groups)
    assert numbers[:, 0].tolist() == [[r, 2**53 - 1] for r in range(dist.get_world_size())]

    def refuse() -> np.ndarray:
        if me == 1:
            raise ValueError("no reference")
        return np.zeros(1)

    try:
        broadcast_from_readers(refuse, (1,), groups)
    except ValueError as error:
        assert str(error) == "no reference" if me == 1 else "Replica 1" in str(error), error
    else:
        raise AssertionError("went on without a reader")


def masked() -> None:
    """A sample's loss is the mean over the targets that its mask leaves; without any, -inf."""
    rng = np.random.default_rng(1)
    token_loss, mask = rng.random((4, 16)), rng.random((4, 16)) < 0.7
    mask[2] = False
    references = rng.random(4).astype(np.float32)
    sums = loss_sums(torch.tensor(mask).float(), torch.tensor(token_loss).float())
    (output,) = mean_losses([sums])
    selector = SimpleNamespace(references=SimpleNamespace(losses=lambda ids: references[ids]))
    pairs = StreamSelector._loss_pair(selector, np.array([3, 2, 1, 0]), [output[:2], output[2:]])
    for row, (loss, reference) in enumerate(pairs):
        if row == 2:
            assert loss == -np.inf and np.isfinite(reference)
            continue
        np.testing.assert_allclose(loss, token_loss[row][mask[row]].mean(), rtol=1e-6)
        assert reference == references[3 - row]


if __name__ == "__main__":
    sys.exit(main())
