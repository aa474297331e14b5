"""The extension of a Megatron policy worker, which makes it choose the blocks of its training.

The driver calls these methods on all ranks at once. `RoDSelector.choose` makes the choice, as in
any other job, and each replica passes its share of the winners to the stock `train`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rod.corpus.store import BlockStore
from nemo_rod.selection import Choice, OnNonfinite, References, Selector
from nemo_rod.selection.arms import Arm
from nemo_rod.selection.held_out import source_losses
from nemo_rod.upstream import functions


@dataclass(frozen=True)
class Task:
    """Settings that every worker receives once, at setup."""

    blocks: str  # folder of the block store
    scoring_micro_batch_size: int  # blocks in a forward-only pass of one replica
    arm: Arm | None = None  # its pools and its policy; None to score only
    references: tuple[str, ...] = ()  # folders of reference losses
    validation_blocks: int = 0  # maximum number of held-out blocks per source in a validation
    on_nonfinite: OnNonfinite = "refuse"  # candidates with a non-finite score: or "exclude"


class RoDWorkerMixin:
    """Mixin for a worker with `model`, `cfg` and `train` like NeMo-RL's Megatron worker.

    Inherit from it before the worker class. It does not use Ray. All methods are collective over
    all ranks.
    """

    model: Any
    cfg: dict[str, Any]
    train: Callable[..., dict[str, Any]]

    def rod_setup(self, *, task: Task) -> None:
        """Opens the store and the references, before the first step.

        Raises:
            ValueError: they do not belong together, the model uses a feature that breaks scoring,
                or Megatron's version is untested.
        """
        from nemo_rl.algorithms.loss.loss_functions import NLLLossFn

        functions.check("scoring")
        self._rod_task = task
        self._rod_store = BlockStore(task.blocks)
        self._rod_loss = NLLLossFn()  # normalised by the global batch's valid tokens
        self._rod_scorer(self._rod_store)  # refuses models that cannot be scored
        if task.arm is not None:
            from megatron.core.utils import get_model_config

            from nemo_rod.megatron.objective import refuse_other_losses
            from nemo_rod.megatron.rod_selector import RoDSelector
            from nemo_rod.megatron.scoring.forward_only import refuse_other_shapes

            refuse_other_losses(self._rod_chunks())
            refuse_other_shapes(
                get_model_config(self._rod_chunks()[0]),
                scoring=task.scoring_micro_batch_size,
                training=self.cfg["train_micro_batch_size"],
                is_prefix=task.arm.scored_part < 1,
            )
            folders, store = task.references, self._rod_store
            length = task.arm.scored_length(store.block_size)
            references = References.open(folders, store, length=length) if folders else None
            self._rod_selector = RoDSelector(
                Selector.for_arm(task.arm, store, references, task.on_nonfinite),
                store,
                scoring_micro_batch_size=task.scoring_micro_batch_size,
            )

    def rod_step(self, *, step: int) -> tuple[Choice, dict[str, float]] | None:
        """Chooses and trains one step (paper, algorithm 1).

        Returns:
            On the last rank the choice and the metrics of the update; None on the others.
        """
        import torch.distributed as dist

        from nemo_rod.megatron.ranks import peak_memory
        from nemo_rod.megatron.rod_selector import own_share

        groups, size = self._rod_groups(), self.cfg["train_micro_batch_size"]
        choice = self._rod_selector.choose(step, self._rod_chunks(), groups, size)
        own_ids = own_share(choice, size, groups)
        start = time.perf_counter()
        trained = self.train(
            train_batch(self._rod_store.checked_tokens(own_ids)),
            self._rod_loss,
            gbs=len(choice.block_ids),
            mbs=size,
        )
        seconds = time.perf_counter() - start
        if dist.get_rank() != dist.get_world_size() - 1:
            return None
        return choice, update_metrics(trained, seconds) | peak_memory()

    def rod_validate(self) -> dict[str, float]:
        """Returns the loss on the first held-out blocks of every source, nats per token."""
        held_out = BlockStore(self._rod_task.blocks, split="holdout")
        scorer = self._rod_scorer(held_out)
        return source_losses(scorer, held_out.sources, num_blocks=self._rod_task.validation_blocks)

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
        gather_weights(self._rod_chunks(), no_pass_follows=True)
        save_hf(self.megatron_bridge, self._rod_chunks(), Path(folder))  # type: ignore[attr-defined]

    def _rod_scorer(self, store: BlockStore) -> Any:
        from nemo_rod.megatron.scoring.scorer import MegatronScorer

        return MegatronScorer(
            self._rod_chunks(),
            store,
            self._rod_groups(),
            micro_batch_size=self._rod_task.scoring_micro_batch_size,
        )

    def _rod_chunks(self) -> list[Any]:
        return self.model if isinstance(self.model, list) else [self.model]

    def _rod_groups(self) -> Any:
        from megatron.core.process_groups_config import ProcessGroupCollection

        return ProcessGroupCollection.use_mpu_process_groups()


def update_metrics(trained: dict[str, Any], seconds: float) -> dict[str, float]:
    """Returns an update's metrics, from the result of a worker's `train`.

    They have `flops`, the operations of the update, if NeMo-RL has counted them: v0.6.0 and v0.7.0
    do not.
    """
    metrics = {
        "train/loss": float(np.mean(np.asarray(trained["global_loss"]))),
        "train/grad_norm": float(np.mean(np.asarray(trained["grad_norm"]))),
        "train/lr": float(np.mean(trained["all_mb_metrics"].get("lr", [np.nan]))),
        "timing/train/update": seconds,
    }
    return metrics | ({"flops": trained["total_flops"]} if "total_flops" in trained else {})


def train_batch(tokens: np.ndarray) -> Any:
    """Returns a batch of blocks in which every token counts, made of int32 `[n, S]`.

    Returns:
        A BatchedDataDict of `input_ids` int64 `[n, S]`, `input_lengths` int64 `[n]`, `token_mask`
        float32 `[n, S]` and `sample_mask` float32 `[n]`. NeMo-RL masks targets, so the mask's first
        column is never used: S - 1 targets.
    """
    import torch
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    input_ids = torch.from_numpy(tokens.astype(np.int64))
    count, size = input_ids.shape
    return BatchedDataDict(
        {
            "input_ids": input_ids,
            "input_lengths": torch.full((count,), size),
            "token_mask": torch.ones(count, size),
            "sample_mask": torch.ones(count),
        }
    )
