"""The distance of a loss from a model's, where rounding may exchange two experts."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from nemo_rod.checkpoints.losses import TOLERANCE, block_losses, distance

TOKENS = np.random.default_rng(0).integers(0, 7, (2, 8), dtype=np.int32)


class TwoExperts(nn.Module):
    """Every token is answered by the expert of the higher score."""

    def __init__(self, *scores: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores = nn.Parameter(torch.tensor(scores))
        self.experts = nn.Parameter(torch.randn(2, 7, 7))

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.experts[self.scores.argmax()][input_ids])


def smallest(model: TwoExperts, loss: float) -> float:
    return distance(model, TOKENS, loss, TOLERANCE["fp32"])


def loss_with(*scores: float) -> float:
    return float(block_losses(TwoExperts(*scores), TOKENS).mean())


def test_either_of_two_equal_experts_is_right():
    model = TwoExperts(1.0, 1.0 + 2e-7)
    before = [weight.detach().clone() for weight in model.parameters()]
    first, second = loss_with(1.0, 0.0), loss_with(0.0, 1.0)
    assert abs(first - second) > 0.01
    assert smallest(model, second) < 1e-12
    assert smallest(model, first) <= TOLERANCE["fp32"]
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("loss", [loss_with(1.0, 0.0), loss_with(0.0, 1.0) + 3e-5])
def test_a_difference_beyond_rounding_is_reported(loss):
    result = smallest(TwoExperts(1.0, 1.001), loss)
    assert result == pytest.approx(abs(loss - loss_with(0.0, 1.0)), abs=1e-5)
    assert result > TOLERANCE["fp32"]
