"""Records a training run: metrics, the curriculum and progress."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.utils.flop_utils import num_floating_point_operations

from nemo_rod.megatron.callbacks.validation import Validation
from nemo_rod.megatron.rod_selector import RoDSelector
from nemo_rod.progress import Progress
from nemo_rod.ranks import from_recorder, is_recorder, peak_memory
from nemo_rod.selection import Choice, CurriculumHeader
from nemo_rod.selection.competition import model_tflops, number
from nemo_rod.selection.curriculum.journal import Journal


@dataclass(eq=False)
class Recorder(Callback):
    """Writes one record in `curriculum.rod` and one line in `metrics.jsonl` for every step.

    The line includes the metrics of the validation.
    """

    folder: Path
    selector: RoDSelector
    validation: Validation
    header: CurriculumHeader
    progress: Progress
    peak_tflops: float | None = None  # peak of one GPU; if known, lines also show the MFU
    journal: Journal | None = field(default=None, init=False)
    trained: tuple[Choice, float] | None = field(default=None, init=False)
    lr: float = field(default=math.nan, init=False)
    # all metrics of the step that just ended, on the recording rank
    row: dict[str, Any] = field(default_factory=dict, init=False)

    def on_train_start(self, context: CallbackContext) -> None:
        """Opens the files at the step training starts from and drops later entries."""
        step = context.state.train_state.step
        if is_recorder():
            self.journal = Journal(self.folder, self.header, step=step)
            self.progress.start(step)
        file = self.folder / "curriculum.rod"
        self.selector.selector.resume(step, lambda: [(file, step)], from_recorder)

    def on_choice(self, choice: Choice) -> None:
        """Records the choice before the update, which overlaps with the write."""
        if self.journal is not None:
            self.journal.begin(choice)

    def on_step(self, choice: Choice, seconds: float) -> None:
        """Keeps a step's choice and duration until the trainer reports its loss."""
        self.trained = choice, seconds

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Keeps this step's learning rate, which the trainer advances before the step ends."""
        self.lr = next(group["lr"] for group in context.optimizer.param_groups if group)

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Records the step that just ended."""
        if is_recorder():
            assert self.journal is not None and self.trained is not None
            # the step counter advances after this callback, so it still holds the step that ran
            step, (choice, seconds) = context.state.train_state.step, self.trained
            size = self.header.block_size
            prefix = (self.selector.selector.length or size) / size
            operations = num_floating_point_operations(context.state.cfg, len(choice.chosen))
            tflops = model_tflops(choice, operations, seconds, prefix=prefix)
            tflops /= dist.get_world_size()
            metrics = {
                "train/loss": number((context.loss_dict or {}).get("lm loss")),
                "train/grad_norm": number(context.grad_norm),
                "train/lr": self.lr,
                "timing/train/total": seconds,
                "throughput/model_tflops_per_gpu": tflops,
                **peak_memory(),
                **self.validation.metrics,
            }
            row = self.row = self.journal.append(step, choice, metrics)
            note = f"loss {row['train/loss'] or math.nan:.3f}  replay {row['rod/replay_share']:.0%}"
            mfu = f"  MFU {tflops / self.peak_tflops:.0%}" if self.peak_tflops else ""
            self.progress.step(step + 1, note + mfu)
        if self.validation.metrics:
            self.selector.selector.tell_policy(self.row, from_recorder)
        self.selector.beat()  # a rank that hangs in a write falls behind the others
