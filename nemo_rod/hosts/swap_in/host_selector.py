"""Replay on Demand around any Megatron host's forward-backward function.

    host's iterator --m x--> candidates --schedule, forward only--> losses --references--> scores
         --policy--> winners --redistributed over the replicas--> host's schedule, as usual

A host replaces the `forward_backward_func` of one training step by `StreamSelector.around(...)`,
which runs after gradients are zeroed, because some optimizers share one buffer between gradients
and weights. It is called with keyword arguments, as in Megatron's own trainers.

Shape suffixes: c = candidates of this replica, C = candidates of all replicas, K = chosen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.utils import get_model_config

from nemo_rod.hosts.swap_in.blend import Blend
from nemo_rod.hosts.swap_in.stream import (
    Batch,
    broadcast_from_readers,
    draw,
    in_pool_order,
    winners,
    without_identity,
)
from nemo_rod.megatron.ranks import refuse_different_choices
from nemo_rod.megatron.scoring.forward_only import replaced
from nemo_rod.megatron.scoring.scoring_pass import scoring_pass
from nemo_rod.selection import Choice, Policy, Pool, References, choose
from nemo_rod.selection.curriculum.log import PADDING_ID

Record = Callable[[Choice, np.ndarray], None]


class StreamSelector:
    """Chooses from the micro-batches of a job's own iterators.

    Args:
        blend: the job's training data.
        policy: policy that turns scores into the chosen samples.
        multiplier: candidates per trained sample (m).
        references: reference losses of the blend; required if the policy needs scores. Without
            them candidates have no ids.
        record: function called on every rank with a step's choice and the source of every
            candidate, int64 `[C]`, an index in `blend.sources`.
        unused, around_scoring: see `SelectingJob`.
    """

    def __init__(
        self,
        *,
        blend: Blend,
        policy: Policy,
        multiplier: int,
        references: References | None,
        record: Record = lambda choice, source_C: None,
        unused: Collection[str] = (),
        around_scoring: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        assert references is not None or not policy.needs_scores, policy
        self.blend, self.policy, self.multiplier = blend, policy, multiplier
        self.references, self.record = references, record
        self.unused, self.around_scoring = unused, around_scoring

    def around(self, schedule: Callable, *, step: int, groups: Any) -> Callable:
        """Returns the replacement for the schedule of one training step.

        Args:
            schedule: the host's forward-backward function.
            step: number of the training step, from 0.
            groups: Megatron's process groups (`tp`, `pp` and `dp`).

        Returns:
            A function with the schedule's keyword arguments and result. Called again, as by a
            rerun of the same step on a rewound iterator, it trains on the same winners.
        """
        choice: Choice | None = None

        def on_winners(**options: Any) -> Any:
            nonlocal choice
            if options["forward_only"]:
                return schedule(**options)
            iterators = options["data_iterator"]
            chunks = iterators if isinstance(iterators, list) else [iterators]
            count = self.multiplier * options["num_microbatches"]
            drawn = [None if chunk is None else draw(chunk, count, self.unused) for chunk in chunks]
            if choice is None:
                choice, source_C = self._choose(schedule, options, drawn, step, groups)
                refuse_different_choices(choice)
                self.record(choice, source_C)
            options["data_iterator"] = _like(
                iterators,
                [
                    None
                    if batches is None
                    else winners(batches, choice.chosen, options["micro_batch_size"], groups.dp)
                    for batches in drawn
                ],
            )
            if not self.policy.needs_scores:
                return schedule(**options)
            # scoring has gathered every parameter; gathering again would read a buffer that the
            # optimizer may share with gradients and that has since been zeroed
            with replaced(get_model_config(options["model"][0]), "param_sync_func", None):
                return schedule(**options)

        return on_winners

    def _choose(
        self, schedule: Callable, options: dict[str, Any], drawn: list, step: int, groups: Any
    ) -> tuple[Choice, np.ndarray]:
        """Returns a step's choice and the source of every candidate, int64 `[C]`. Collective."""
        size, count = options["micro_batch_size"], options["num_microbatches"]
        batches: list[Batch] = next((chunk for chunk in drawn if chunk is not None), [])
        shape = (self.multiplier * count * size, 2)
        identities = broadcast_from_readers(lambda: self._identify(batches), shape, groups)
        identities = identities.astype(np.int64)
        id_C, source_C = in_pool_order(identities, size).T
        is_replay_by_source = np.array([row.role == "replay" for row in self.blend.sources])
        pool = Pool(step, id_C, is_replay_by_source[source_C])
        batch_size = count * size * groups.dp.size()
        if not self.policy.needs_scores:
            return choose(pool, self.policy, batch_size), source_C
        set_by_scoring = {
            *("forward_step_func", "model", "data_iterator", "num_microbatches"),
            *("forward_only", "collect_non_loss_data"),
        }
        start = time.perf_counter()
        with self.around_scoring():
            outputs = scoring_pass(
                schedule,
                options["model"],
                losses_and_mask(options["forward_step_func"]),
                **{key: value for key, value in options.items() if key not in set_by_scoring},
                data_iterator=_like(options["data_iterator"], drawn),
                num_microbatches=self.multiplier * count,
            )
        id_c = identities[groups.dp.rank(), :, 0]
        pairs = broadcast_from_readers(lambda: self._loss_pair(id_c, outputs), shape, groups)
        loss_C, reference_C = in_pool_order(pairs, size).astype(np.float32).T
        seconds = time.perf_counter() - start
        choice = choose(pool, self.policy, batch_size, loss_C, reference_C)
        return choice.preceded_by(scoring=seconds), source_C

    def _identify(self, batches: list[Batch]) -> np.ndarray:
        """Returns the id and source of this replica's candidates, `[c, 2]`."""
        source_c = np.concatenate([self.blend.source_of_batch(batch) for batch in batches])
        if self.references is None:
            id_c = np.full(len(source_c), PADDING_ID)
        else:
            hashes = np.concatenate([self.blend.hash_batch(batch) for batch in batches])
            id_c = self.references.find(hashes)
        return np.stack([id_c, source_c], axis=1)

    def _loss_pair(self, id_c: np.ndarray, outputs: list[torch.Tensor]) -> np.ndarray:
        """Returns this replica's losses and reference losses, in nats per token, `[c, 2]`."""
        assert self.references is not None
        loss_c = torch.cat(outputs)[:, 0].cpu().numpy()
        return np.stack([loss_c, self.references.losses(id_c)], axis=1)


def _like(iterators: Any, chunks: list[list[Batch] | None]) -> Any:
    """Returns batches in the form of the host's iterators: one, or one per model chunk."""
    result = [None if c is None else iter([without_identity(b) for b in c]) for c in chunks]
    return result if isinstance(iterators, list) else result[0]


def losses_and_mask(forward_step: Callable) -> Callable:
    """Wraps the job's forward step to return token losses and their mask instead of one number.

    Megatron's forward steps bind the mask to the loss function that they return.
    """

    def step(batches: Any, chunk: Any) -> tuple[Any, torch.Tensor]:
        output, loss_function = forward_step(batches, chunk)
        if not isinstance(loss_function, partial) or not loss_function.args:
            raise ValueError(
                "The job's forward step does not return functools.partial(loss, loss_mask, ...), "
                "as Megatron's own steps do: selection reads the mask of the losses from there; "
                "return such a partial."
            )
        return output, loss_function.args[0]

    return step
