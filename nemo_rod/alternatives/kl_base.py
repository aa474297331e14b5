"""`ARM_kl_base_<weight>`: the loss of replay has weight x KL(base || model) besides.

The divergence is between the two distributions of the next token, in nats, at every position of a
replay block, averaged as the loss is. The base reads each replay block once more: a forward pass.
ModelOpt's loss, which Megatron-Bridge distils with, computes it over a split vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from nemo_rod.alternatives import read_name
from nemo_rod.alternatives.base_weights import BaseWeights
from nemo_rod.config import Config
from nemo_rod.selection.arrays import Mask
from nemo_rod.terms import Term


def arm(config: Config, name: str) -> dict[str, Any] | None:
    """Returns the variant that a name means; None for other names."""
    if (found := read_name(name, "kl_base")) is None:
        return None
    of, weight = found
    if of == "no_replay":
        raise ValueError(
            f"The arm {name} has no replay, on which it would be compared with the base: name "
            f"fixed replay, such as fixed_10_{name.removeprefix('no_replay_')}."
        )
    _refuse_split(config.parallel.pipeline, config.parallel.expert)
    return {"of": of, "train": {"terms": {"kl_base": weight}}}


def _refuse_split(pipeline: int, expert: int) -> None:
    for key, size in (("pipeline", pipeline), ("expert", expert)):
        if size > 1:
            raise ValueError(
                f"parallel.{key}={size} does not work with kl_base, whose base reads its blocks "
                "in the middle of a step: set it to 1, or take that arm out."
            )


class KLBase(Term):
    """The term of a loss.

    Raises:
        ValueError: the layout splits the layers or the experts of the model over processes.
    """

    passes = 1.0

    def __init__(self, weight: float, provider: Any) -> None:
        _refuse_split(provider.pipeline_model_parallel_size, provider.expert_model_parallel_size)
        self.weight, self.base = weight, BaseWeights(provider)

    def around(self, schedule: Callable, is_replay: Mask) -> Callable:
        """Returns a schedule whose forward steps have the term in their loss."""

        def with_term(**options: Any) -> Any:
            ((model, base),) = self.base.beside(options["model"])
            forward_step, size = options["forward_step_func"], options["micro_batch_size"]
            micro_batches = iter(is_replay.reshape(-1, size))

            def with_divergence(*args: Any, **kwargs: Any) -> tuple:
                rows = np.flatnonzero(next(micro_batches))
                if not len(rows):
                    return tuple(forward_step(*args, **kwargs))
                with _logits(model, rows) as seen:
                    output, loss_function = forward_step(*args, **kwargs)
                divergence = self._divergence(model, base, rows, *seen)
                mask = loss_function.args[0]

                def loss_with_term(mask: Any, output: Any, **options: Any) -> tuple:
                    loss, *others = loss_function(output, **options)
                    term = (divergence * mask.view(size, -1)[rows]).sum()
                    return loss + self.weight * term, *others

                return output, partial(loss_with_term, mask)

            return schedule(**{**options, "forward_step_func": with_divergence})

        return with_term

    def _divergence(
        self, model: Any, base: dict[str, Any], rows: np.ndarray, call: Any, logits: Any
    ) -> Any:
        """Returns KL(base || model) by block and position, nats, float32 [rows, S].

        Args:
            model: the model's chunk, without its wrappers.
            base: the base's weights by name.
            rows: the replay blocks of the micro-batch.
            call: arguments of the model's forward pass over the micro-batch.
            logits: its logits of these blocks, [S, rows, vocabulary of the rank].
        """
        import torch
        from modelopt.torch.distill.plugins.megatron import LogitsKLLoss

        args, kwargs = call
        size = kwargs.get("input_ids", args[0] if args else None).shape[0]
        index = torch.from_numpy(rows).to(logits.device)

        def of_rows(value: Any) -> Any:
            is_batch = torch.is_tensor(value) and value.dim() and value.shape[0] == size
            return value[index] if is_batch else value

        args, kwargs = [*map(of_rows, args)], {k: of_rows(v) for k, v in kwargs.items()}
        with torch.no_grad(), _logits(model, np.arange(len(rows))) as seen:
            torch.func.functional_call(model, base, tuple(args), kwargs)
        return LogitsKLLoss(model.config)(logits, seen[1])[0]


@contextmanager
def _logits(model: Any, rows: np.ndarray) -> Iterator[list[Any]]:
    """Yields a list that the next pass of a model fills: its arguments, and logits of some blocks.

    The logits are a copy: the cross entropy that follows overwrites them.
    """
    import torch

    seen: list[Any] = []
    head = next(m for name, m in model.named_modules() if name.split(".")[-1] == "output_layer")

    def keep(module: Any, args: Any, output: Any) -> None:
        logits = output[0]
        seen.append(logits.index_select(1, torch.from_numpy(rows).to(logits.device)))

    hooks = [
        model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append((args, kwargs)), with_kwargs=True
        ),
        head.register_forward_hook(keep),
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
