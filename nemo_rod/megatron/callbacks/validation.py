"""Held-out losses per source during training, and before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.utils.pg_utils import get_pg_collection

from nemo_rod.corpus.store import BlockStore
from nemo_rod.files import write_json
from nemo_rod.megatron.ranks import is_recorder
from nemo_rod.megatron.scoring.scorer import MegatronScorer
from nemo_rod.selection.held_out import START_FILE, source_losses


@dataclass(eq=False)
class Validation(Callback):
    """Measures the loss on a store's first held-out blocks of every source at regular intervals.

    Before the first step, too: `validation_start.json` of the run's folder has these losses, since
    `metrics.jsonl` has a line per step. All arms are measured on the same blocks.

    Attributes:
        every: steps between two validations; 0 for never.
        num_blocks: maximum number of blocks per source.
        micro_batch_size: blocks in one forward pass.
        beat: heartbeat, called whenever this rank makes progress.
        metrics: `validation/<role>/<source>/loss` in nats per token after the step that just
            ended, or of the initial weights before the first; empty if there was no validation.
    """

    store: BlockStore
    folder: Path
    _: KW_ONLY
    every: int
    num_blocks: int
    micro_batch_size: int
    beat: Callable[[], None] = lambda: None
    metrics: dict[str, float] = field(default_factory=dict, init=False)

    def on_train_start(self, context: CallbackContext) -> None:
        """Scores the held-out blocks with the initial weights, unless the run resumes. Collective.

        A run that was killed before its first checkpoint starts, and measures, again.
        """
        if not self.every or context.state.train_state.step:
            return
        self.metrics = self.measure(context)
        if is_recorder():
            write_json(self.folder / START_FILE, self.metrics)

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Scores the held-out blocks if a validation is due. Collective."""
        self.metrics = {}
        done = context.state.train_state.step + 1  # the counter advances after this callback
        if self.every and done % self.every == 0:
            self.metrics = self.measure(context)

    def measure(self, context: CallbackContext) -> dict[str, float]:
        """Scores the held-out blocks with the current weights. Collective."""
        groups = get_pg_collection(context.model[0])
        scorer = MegatronScorer(
            context.model,
            self.store,
            groups,
            micro_batch_size=self.micro_batch_size,
            beat=self.beat,
        )
        return source_losses(scorer, self.store, num_blocks=self.num_blocks)
