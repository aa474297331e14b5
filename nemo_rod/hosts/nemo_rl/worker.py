"""The extension of a Megatron policy worker, which makes it choose the blocks of its training.

The driver calls these methods on all ranks at once. The stock `train` takes the place of a
schedule in the step of `RoDSelector.around`, which chooses and deals as in any other job.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

from nemo_rod.corpus.store import BlockStore
from nemo_rod.selection import Choice, References, Selector
from nemo_rod.selection.arms import Arm
from nemo_rod.selection.held_out import source_losses
from nemo_rod.upstream import functions


class RoDWorkerMixin:
    """Mixin for a worker with `model`, `cfg` and `train` like NeMo-RL's Megatron worker.

    Inherit from it before the worker class. It does not use Ray. All methods are collective over
    all ranks.
    """

    model: Any
    cfg: dict[str, Any]
    train: Callable[..., dict[str, Any]]

    def rod_setup(
        self,
        *,
        blocks: str,
        scoring_micro_batch_size: int,
        arm: Arm | None,
        references: list[str],
        on_nonfinite: Literal["refuse", "exclude"],
        steps: int,
    ) -> None:
        """Opens the store and the references, before the first step.

        Args:
            blocks: folder of the block store.
            scoring_micro_batch_size: blocks of a forward pass.
            arm: its pools and its policy; None to score only.
            references: folders of reference losses.
            on_nonfinite: what becomes of a score that is not finite, "refuse" or "exclude".
            steps: number of updates.

        Raises:
            ValueError: the data do not match, the model uses a feature that breaks scoring,
                or Megatron's version is untested.
        """
        functions.check("scoring")
        self._rod_store, self._rod_scoring_size = BlockStore(blocks), scoring_micro_batch_size
        self._rod_scorer(self._rod_store)  # refuses models that cannot be scored
        if arm is None:
            return
        from megatron.core.utils import get_model_config

        from nemo_rod.megatron.objective import refuse_other_losses
        from nemo_rod.megatron.rod_selector import RoDSelector
        from nemo_rod.megatron.scoring.forward_only import refuse_other_shapes

        size, store = scoring_micro_batch_size, self._rod_store
        refuse_other_losses([self.model])
        refuse_other_shapes(
            get_model_config(self.model),
            scoring=size,
            training=self.cfg["train_micro_batch_size"],
            is_prefix=arm.scored_prefix < 1,
        )
        opened = None
        if "references" in arm.needs:
            length = arm.scored_length(store.block_size)
            opened = References.open(references, store, length=length)
        self._rod_selector = RoDSelector(
            Selector.for_arm(arm, store, opened, on_nonfinite, steps=steps),
            store,
            scoring_micro_batch_size=size,
        )

    def rod_step(self, *, step: int) -> tuple[Choice, dict[str, float]] | None:
        """Chooses and trains one step (paper, algorithm 1).

        Returns:
            On the last rank the choice and the metrics of the update; None on the others.
        """
        import torch.distributed as dist

        from nemo_rod.ranks import peak_memory

        def train(*, data_iterator: Iterator[Any], micro_batch_size: int, **_: Any) -> Any:
            """Takes the place of a trainer's schedule: the stock `train` runs one and updates."""
            from nemo_rl.algorithms.loss.loss_functions import NLLLossFn
            from nemo_rl.distributed.batched_data_dict import BatchedDataDict

            batch = BatchedDataDict(train_batch([batch["tokens"] for batch in data_iterator]))
            loss = NLLLossFn()  # normalised by the global batch's valid tokens
            return self.train(batch, loss, gbs=rod.selector.batch_size, mbs=micro_batch_size)

        rod, size = self._rod_selector, self.cfg["train_micro_batch_size"]
        step_on_chosen = rod.around(train, step=step, groups=self._rod_groups())
        trained = step_on_chosen(forward_only=False, model=[self.model], micro_batch_size=size)
        choice = step_on_chosen.finish()
        if choice is None or dist.get_rank() != dist.get_world_size() - 1:
            return None
        return choice, update_metrics(trained) | peak_memory()

    def rod_validate(self, *, blocks: int) -> dict[str, float]:
        """Returns the loss on the first held-out blocks of every source, nats per token."""
        held_out = BlockStore(self._rod_store.root, split="holdout")
        scorer = self._rod_scorer(held_out)
        return source_losses(scorer, held_out.sources, num_blocks=blocks)

    def rod_losses_at(
        self, *, block_ids: np.ndarray, lengths: tuple[int, ...]
    ) -> np.ndarray | None:
        """Scores blocks, whose ids are int64 `[C]`.

        Returns:
            On the last rank the losses over the first `lengths` tokens of each block, float32
            `[C, L]` in nats per token; None on the others.
        """
        import torch.distributed as dist

        losses = self._rod_scorer(self._rod_store).losses_at(block_ids, lengths)
        return losses if dist.get_rank() == dist.get_world_size() - 1 else None

    def rod_export(self, *, folder: str) -> None:
        """Writes the weights as a Hugging Face checkpoint."""
        from nemo_rod.megatron.gaps import save_hf
        from nemo_rod.megatron.scoring.forward_only import gather_weights

        # since the last step, unless a checkpoint was saved, each replica has its own share alone
        gather_weights([self.model], no_pass_follows=True)
        save_hf(self.megatron_bridge, [self.model], Path(folder))  # type: ignore[attr-defined]

    def _rod_scorer(self, store: BlockStore) -> Any:
        from nemo_rod.megatron.scoring.scorer import MegatronScorer

        return MegatronScorer(
            [self.model], store, self._rod_groups(), micro_batch_size=self._rod_scoring_size
        )

    def _rod_groups(self) -> Any:
        from megatron.core.process_groups_config import ProcessGroupCollection

        return ProcessGroupCollection.use_mpu_process_groups()


def update_metrics(trained: dict[str, Any]) -> dict[str, float]:
    """Returns an update's metrics, from the result of a worker's `train`.

    They have `flops`, the operations of the update, if NeMo-RL has counted them: v0.6.0 and v0.7.0
    do not.
    """
    metrics = {
        "train/loss": float(np.mean(np.asarray(trained["global_loss"]))),
        "train/grad_norm": float(np.mean(np.asarray(trained["grad_norm"]))),
        "train/lr": float(np.mean(trained["all_mb_metrics"].get("lr", [np.nan]))),
    }
    return metrics | ({"flops": trained["total_flops"]} if "total_flops" in trained else {})


def train_batch(micro_batches: list[Any]) -> dict[str, Any]:
    """Returns a batch of NeMo-RL in which every token counts, of micro-batches int64 `[b, S]`.

    Returns:
        `input_ids` int64 `[n, S]`, `input_lengths` int64 `[n]`, `token_mask` float32 `[n, S]` and
        `sample_mask` float32 `[n]`. NeMo-RL masks targets, so the mask's first column is never
        used: S - 1 targets.
    """
    import torch

    tokens = torch.cat(micro_batches).cpu()
    count, size = tokens.shape
    return {
        "input_ids": tokens,
        "input_lengths": torch.full((count,), size),
        "token_mask": torch.ones(count, size),
        "sample_mask": torch.ones(count),
    }


@contextmanager
def whole_loads() -> Iterator[None]:
    """Refuses the gaps of every checkpoint that a host loads by Megatron-Bridge within the block.

    Heads for further tokens are left out: Megatron-Bridge fails on those whose weights it cannot
    name.
    """
    from megatron.bridge import AutoBridge

    from nemo_rod.megatron.gaps import refuse_gaps
    from nemo_rod.megatron.objective import next_token_alone
    from nemo_rod.megatron.scoring.forward_only import patching

    describe = AutoBridge.to_megatron_provider

    @functools.wraps(describe)
    def to_provider(bridge: Any, load_weights: bool = True, *args: Any, **options: Any) -> Any:
        provider = describe(bridge, load_weights, *args, **options)
        next_token_alone(provider)
        if load_weights:
            checkpoint = bridge.hf_pretrained
            refuse_gaps(provider, checkpoint.state, str(checkpoint.model_name_or_path))
        return provider

    with patching(AutoBridge, "to_megatron_provider", to_provider):
        yield
