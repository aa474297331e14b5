"""Runs a trainer's schedule forward-only for the losses of its samples.

Shapes: B samples per micro-batch, S tokens per sample, s of them on this context-parallel rank, L
scored lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config

from nemo_rod.megatron.batches import Batch
from nemo_rod.megatron.scoring.forward_only import forward_only
from nemo_rod.megatron.scoring.logits import sliced_logits

# (micro-batches, chunk of the model) -> the chunk's output and the mask of its losses
ForwardStep = Callable[[Any, Any], tuple[Any, torch.Tensor]]


def scoring_pass(
    schedule: Callable[..., list[torch.Tensor]],
    model: list,
    forward_step: ForwardStep,
    *,
    beat: Callable[[], None] = lambda: None,
    cp: dist.ProcessGroup | None = None,
    lengths: Sequence[int] | None = None,
    **options: Any,
) -> list[torch.Tensor]:
    """Runs a trainer's schedule forward-only for the losses of its samples.

    Args:
        schedule: the trainer's forward-backward function.
        model: the model's chunks on this rank.
        forward_step: function that runs the model on a micro-batch.
        beat: called after every micro-batch.
        cp: the context-parallel group, if `forward_step` returns only this rank's positions.
        lengths: leading positions of every sample that are averaged, one loss for each; by default
            all positions.
        options: further arguments of the schedule.

    Returns:
        float32 `[b, L]` per micro-batch on ranks of the last pipeline stage, nothing elsewhere: the
        mean loss over the targets of each sample (paper, Eq. "sequence loss"), in nats; -inf for a
        sample without targets, as padding is.
    """

    def step(batches: Any, chunk: Any, *_: Any) -> tuple:
        output, loss_mask = forward_step(batches, chunk)
        beat()
        return output, partial(loss_sums, loss_mask, cp=cp, lengths=lengths)

    with forward_only(model, get_model_config(model[0])), sliced_logits(model):
        outputs = schedule(
            forward_step_func=step,
            model=model,
            forward_only=True,
            collect_non_loss_data=True,
            **options,
        )
    return mean_losses(outputs, cp)


def plain_forward_step(
    batches: Iterator[Batch], model: Any, *, cp: dist.ProcessGroup | None = None
) -> tuple[Any, torch.Tensor]:
    """Models one micro-batch causally; returns token losses `[b, S / cp]` and their mask."""
    batch = next(batches)
    if cp is not None:
        batch = {name: own_positions(tensor, cp) for name, tensor in batch.items()}
    output = model(
        input_ids=batch["tokens"],
        position_ids=batch["position_ids"],
        attention_mask=None,
        labels=batch["labels"],
    )
    return output, batch["loss_mask"]


def loss_sums(
    loss_mask: torch.Tensor,
    loss: torch.Tensor | tuple,
    non_loss_data: bool = True,
    *,
    cp: dist.ProcessGroup | None = None,
    lengths: Sequence[int] | None = None,
) -> torch.Tensor:
    """Reduces token losses `[b, s]` to sums and numbers of targets, float64 `[b, L, 2]`.

    Sums in float64, rounded to float32, do not depend on their order: a block's loss is identical
    for any batch composition, prefix length and layout, provided the token losses are.
    Under context parallelism, they cover only this rank's positions.
    """
    loss = loss[0] if isinstance(loss, tuple) else loss  # models with images add the mask
    mask = loss_mask.view(loss.shape).double()
    both = torch.stack([loss.double() * mask, mask], dim=-1)
    if cp is not None and cp.size() > 1:
        both = at_their_places(both, cp)
    return torch.stack([both[:, :end].sum(dim=1) for end in lengths or [both.shape[1]]], dim=1)


def mean_losses(
    sums: Sequence[torch.Tensor], cp: dist.ProcessGroup | None = None
) -> list[torch.Tensor]:
    """Returns losses float32 `[b, L]` of `loss_sums` per micro-batch. Collective over `cp`."""
    means = []
    for both in sums:
        if cp is not None and cp.size() > 1:
            dist.all_reduce(both, group=cp)
        loss, targets = both.unbind(dim=-1)
        means.append(torch.where(targets > 0, loss / targets, -torch.inf).float())
    return means


def own_positions(whole_BS: torch.Tensor, cp: dist.ProcessGroup) -> torch.Tensor:
    """Returns this rank's positions `[B, s, ...]` of the whole sequence `[B, S, ...]`.

    Of 2 x size runs of positions, rank r has runs r and 2 x size - 1 - r, so that causal attention
    costs every rank the same. Megatron's own function is not called: its second parameter is the
    group up to core 0.17, but a switch since 0.18, which then cuts by the whole world.
    """
    if cp.size() == 1:
        return whole_BS
    runs, own = 2 * cp.size(), [cp.rank(), 2 * cp.size() - 1 - cp.rank()]
    return whole_BS.unflatten(1, (runs, -1))[:, own].flatten(1, 2).contiguous()


def at_their_places(part_Bs: torch.Tensor, cp: dist.ProcessGroup) -> torch.Tensor:
    """Inverts `own_positions`: the whole sequence `[B, S, ...]`, zeros at others' positions."""
    runs, own = 2 * cp.size(), [cp.rank(), 2 * cp.size() - 1 - cp.rank()]
    parts = part_Bs.unflatten(1, (2, -1))
    whole = parts.new_zeros(len(parts), runs, *parts.shape[2:])
    whole[:, own] = parts
    return whole.flatten(1, 2)
