"""Continued pretraining with Replay on Demand by NeMo Automodel's own training recipe.

torchrun automodel.py --config automodel.yaml [--rod.out=... and any other key]
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from nemo_automodel.components.config._arg_parser import parse_args_and_load_config
from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction

from nemo_rod import BlockStore, References, RoDBatches


class ShiftedBatches(RoDBatches):
    """Batches whose labels are shifted already: Automodel's loss compares position by position."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for batch in super().__iter__():
            batch["labels"] = batch["labels"].roll(-1, dims=1)
            batch["labels"][:, -1] = -100
            yield batch


class RoDRecipe(TrainFinetuneRecipeForNextTokenPrediction):
    """The recipe with batches that are chosen at every step, whatever its dataset is."""

    def load_checkpoint(self, restore_from: str | None = None) -> None:
        rod, scheduler = self.cfg.rod, self.step_scheduler
        store = BlockStore(rod.blocks)
        self.untrack_state("dataloader")
        self.dataloader = scheduler.dataloader = ShiftedBatches(
            self.model_parts[0],
            store,
            References.open([rod.adaptation, rod.replay], store),
            steps=scheduler.max_steps,
            batch_size=self.cfg.step_scheduler.global_batch_size,
            micro_batch_size=self.cfg.get("step_scheduler.local_batch_size", 1),
            out=rod.out,
            group=self._get_dp_group(),
        )
        super().load_checkpoint(restore_from)


def main() -> None:
    """Trains as the command line says."""
    recipe = RoDRecipe(parse_args_and_load_config())
    recipe.setup()
    recipe.run_train_validation_loop()


if __name__ == "__main__":
    main()
