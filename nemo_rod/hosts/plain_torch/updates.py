"""Notices a loop whose updates of the weights do not fall between the steps of its batches."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

_SAMPLE = 1000  # elements of each weight that are compared


class Updates:
    """Watches the weights that a loop trains, from one step to the next.

    An optimizer of PyTorch tells its updates, even at a learning rate of 0. Any other changes the
    version of a weight, or values alone where it writes past PyTorch's counters; these are compared
    until an update has changed a version, and where a weight lies elsewhere than before. A step
    without an update is none of the loop's mistakes if its gradients were discarded, as by a scaler
    of losses that found an overflow.

    Args:
        model: the model, of which only weights that have gradients are watched.
        batches: batches of a step in this process.
    """

    def __init__(self, model: torch.nn.Module, *, batches: int) -> None:
        self._batches = batches
        weights: list[Any] = [weight for weight in model.parameters() if weight.requires_grad]
        # of FSDP2, whose whole weights come and go between passes
        sharded = [weight for weight in weights if isinstance(weight, DTensor)]
        self._weights = sharded or weights
        self._step = -1  # of the last choice
        self.done = 0  # batches of it that the loop was given
        self._proved = self._counted = self._told = False
        self._versions: list[int] = []
        self._places: list[int] = []
        self._values: list[torch.Tensor] = []
        self._trained = self._updated = False  # whether gradients, an update came since the choice
        mine = weakref.proxy(self)  # hooks end with their object

        def note_gradient(weight: Any) -> None:
            mine._trained = True

        def note_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            held = (weight for group in optimizer.param_groups for weight in group["params"])
            mine._updated |= not set(mine._weights).isdisjoint(held)

        hooks = [each.register_post_accumulate_grad_hook(note_gradient) for each in self._weights]
        for hook in (*hooks, register_optimizer_step_post_hook(note_update)):
            weakref.finalize(self, hook.remove)

    def note_weights(self, step: int) -> None:
        """Takes note of the weights by which the blocks of a step were chosen."""
        self._step, self._trained, self._updated = step, False, False
        self._versions = [weight._version for weight in self._weights]
        self._places = self._found_at()
        self._values = [part.clone() for part in self._samples()]

    def refuse_within(self) -> None:
        """Refuses an update after `done` batches of a step that has more.

        Raises:
            ValueError: the weights have changed since the choice.
        """
        if self._have_changed():
            raise ValueError(
                f"The weights have changed after {self.done} of the {self._batches} batches of "
                f"step {self._step}, which belong to one update: {self._cure()}."
            )

    def refuse_between(self, step: int) -> None:
        """Refuses a next step without an update since the last; once proved, prints it.

        Raises:
            ValueError: the next step is asked for before the last one was trained on, or one that
                has begun is asked for again after an update.
        """
        if step == self._step:
            return self.refuse_within()
        if self._step < 0 or not self._versions:  # nothing chosen, or nothing to train
            return
        if self._have_changed():
            self._proved = True
            self._counted |= self._have_other_versions()
            return
        if self._trained and not self._has_gradients():
            return  # discarded
        sentence = (
            f"The batches of step {step} are asked for, but the weights have not changed since "
            f"those of step {self._step} were chosen: {self._cure()}."
        )
        if not self._proved:
            raise ValueError(sentence)
        if not self._told:
            print(f"nemo-rod: {sentence}", file=sys.stderr, flush=True)
        self._told = True

    def _cure(self) -> str:
        return (
            f"update them once for {self._batches} batches (Trainer's and Accelerate's "
            f"gradient_accumulation_steps={self._batches}), read no batch ahead of the update, and "
            "call load_state_dict before a resumed loop; or give another micro_batch_size"
        )

    def _samples(self) -> Iterator[torch.Tensor]:
        for weight in self._weights:
            flat = _local(weight).reshape(-1)
            yield flat[:: max(1, len(flat) // _SAMPLE)]

    def _have_other_versions(self) -> bool:
        return [weight._version for weight in self._weights] != self._versions

    def _have_changed(self) -> bool:
        if self._updated or self._have_other_versions():
            return True
        if self._counted and self._places == self._found_at():
            return False
        pairs = zip(self._values, self._samples(), strict=True)
        return any(not torch.equal(before, now.to(before.device)) for before, now in pairs)

    def _found_at(self) -> list[int]:
        return [_local(weight).data_ptr() for weight in self._weights]

    def _has_gradients(self) -> bool:
        """Returns whether gradients wait for an update that they can be used for."""
        gradients = [_local(weight.grad) for weight in self._weights if weight.grad is not None]
        has_any = any(bool(gradient.any()) for gradient in gradients)
        return has_any and all(bool(gradient.isfinite().all()) for gradient in gradients)


def _local(weight: Any) -> torch.Tensor:
    """Returns this process's part of a tensor, without its history."""
    whole = weight.detach()
    return whole.to_local() if isinstance(whole, DTensor) else whole
