"""The host's part of a step: tokens cross the bus once, as int32, and nothing waits too early."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from corpus_cases import run
from tiny import sources

pytestmark = pytest.mark.usefixtures("megatron")
SIZE = 64


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return run(tmp_path_factory.mktemp("host_side"), sources(), block_size=SIZE)


def made_on_the_host(tokens_BS: np.ndarray) -> dict[str, torch.Tensor]:
    """Batches as they were when all four tensors were made on the host."""
    tokens = torch.from_numpy(tokens_BS.astype(np.int64))
    loss_mask = torch.ones(tokens.shape, dtype=torch.float32)
    loss_mask[:, -1] = 0
    position_ids = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
    labels = tokens.roll(-1, dims=1)
    names = ("tokens", "labels", "loss_mask", "position_ids")
    return dict(zip(names, (tokens, labels, loss_mask, position_ids), strict=True))


@pytest.mark.parametrize("length", [SIZE, SIZE // 2, SIZE // 8])
def test_int32_tokens_are_sent_once_and_the_rest_is_derived(store, length, monkeypatch):
    from nemo_rod.megatron import batches

    sent: list[torch.Tensor] = []
    monkeypatch.setattr(batches, "on_device", lambda tensor: sent.append(tensor) or tensor)
    ids = np.array([3, 1, 2, 0, 5, 4])
    actual = list(batches.micro_batches(store, ids, 2, length=length))
    expected = [
        {name: tensor[:, :length] for name, tensor in whole.items()}
        for whole in (made_on_the_host(store.tokens(part)) for part in ids.reshape(3, 2))
    ]
    assert len(actual) == len(sent) == 3
    for batch, made in zip(actual, expected, strict=True):
        assert batch.keys() == made.keys()
        for name, tensor in made.items():
            assert batch[name].dtype == tensor.dtype and batch[name].is_contiguous()
            assert torch.equal(batch[name], tensor), name
    # a prefix's last target is the token after it
    assert all(one.dtype == torch.int32 for one in sent)
    assert {tuple(one.shape) for one in sent} == {(2, min(SIZE, length + 1))}


def test_chunks_share_batches_that_are_made_once(store):
    from nemo_rod.megatron.batches import for_each, micro_batches

    first, second = for_each(micro_batches(store, np.arange(4), 2), 2)
    one = next(first)
    one["added"] = one["tokens"]
    same = next(second)
    assert "added" not in same and same["tokens"] is one["tokens"]
    assert len(list(first)) == len(list(second)) == 1


def test_losses_of_training_are_fetched_after_the_optimizer_has_its_work(monkeypatch, store):
    """Fetching the losses of a step of estimated scores waits for the backward pass."""
    from nemo_rod.megatron import rod_selector

    order: list[str] = []

    class Captured:
        def __init__(self, forward_step: Any, groups: Any) -> None:
            self.forward_step = forward_step

        def gather(self, num_blocks: int, size: int) -> np.ndarray:
            order.append(f"fetch {num_blocks} in {size}")
            return np.zeros(num_blocks, dtype=np.float32)

    choice = SimpleNamespace(block_ids=np.arange(4), is_pending=True)
    selector: Any = SimpleNamespace(
        length=8,
        choose=lambda step, scorer: choice,
        learn=lambda made, losses: order.append(f"learn {losses.shape}") or "learned",
    )
    monkeypatch.setattr(rod_selector, "TrainingLosses", Captured)
    monkeypatch.setattr(rod_selector, "MegatronScorer", lambda *_, **__: None)
    monkeypatch.setattr(rod_selector, "refuse_different_choices", lambda _: None)
    ours, ended = rod_selector.RoDSelector(selector, store), list[Any]()
    ours.on_step = lambda choice, seconds: ended.append(choice)

    def train_step(forward_backward_func: Any, global_state: Any, pg_collection: Any) -> str:
        for _ in range(2):  # the trainer may run a step again, to find what differs
            forward_backward_func(
                forward_step_func=None, model=[None], micro_batch_size=2, forward_only=False
            )
        order.append("optimizer")
        return "result"

    replica = SimpleNamespace(dp=SimpleNamespace(size=lambda: 1, rank=lambda: 0))
    state = SimpleNamespace(train_state=SimpleNamespace(step=0))
    schedule = lambda **_: order.append("backward")  # noqa: E731
    wrapped = ours.wrap(train_step)
    assert wrapped(schedule, state, replica) == "result"
    assert order == ["backward", "backward", "optimizer", "fetch 4 in 2", "learn (4,)"]
    assert ended == ["learned"]
