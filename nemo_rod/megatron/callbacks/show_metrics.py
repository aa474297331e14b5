"""Shows every step's metrics in Megatron-Bridge's own loggers and in registered ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.config import LoggerConfig

from nemo_rod import parts
from nemo_rod.jobs import TrainJob
from nemo_rod.loggers import LOGGERS, continue_runs, known_metrics, project, show
from nemo_rod.megatron.callbacks.recorder import Recorder
from nemo_rod.megatron.callbacks.validation import Validation
from nemo_rod.ranks import is_recorder
from nemo_rod.selection.choice import ask


class Logger(Protocol):
    """A registered logger: `parts.load("loggers", name)(folder, run_name)` makes one."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Shows metrics by name, under the number of steps done."""

    def finish(self) -> None:
        """Ends the run in the logger."""


@dataclass(eq=False)
class Loggers(Callback):
    """Logs the recorder's rows, and the validation at step 0; placed after both callbacks."""

    recorder: Recorder
    validation: Validation
    names: Sequence[str]  # names that `logger=` takes
    run_name: str
    others: list[Logger] = field(default_factory=list, init=False)

    def on_train_start(self, context: CallbackContext) -> None:
        """Marks where a resumed run begins, and shows the losses at step 0."""
        if not is_recorder():
            return
        state, step = context.state, context.state.train_state.step
        folder, names = self.recorder.folder, [n for n in self.names if n not in LOGGERS]
        made = [parts.load("loggers", name, key="logger") for name in names]
        self.others = [ask(make, step, folder, self.run_name) for make in made]
        continue_runs(
            folder,
            step,
            writer=state.tensorboard_logger,
            wandb_run=state.wandb_logger and state.wandb_logger.run,
            mlflow=getattr(state, "mlflow_logger", None),
        )
        if self.validation.metrics:
            self._show(state, 0, self.validation.metrics)

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Shows the step's row, under the number of steps done."""
        if is_recorder() and self.recorder.row:
            self._show(context.state, self.recorder.row["step"] + 1, self.recorder.row)

    def on_train_end(self, context: CallbackContext) -> None:
        """Ends the run in the registered loggers."""
        for logger in self.others:
            ask(logger.finish, context.state.train_state.step)

    def _show(self, state: Any, done: int, metrics: Mapping[str, Any]) -> None:
        known = known_metrics(metrics)
        show(state, done, known)
        for logger in self.others:
            ask(logger.log, done, known, done)


def logger_config(job: TrainJob) -> LoggerConfig:
    """Returns Bridge's loggers that the job names; the others stay off."""
    out, names = Path(job.out), job.loggers
    options: dict[str, Any] = {}
    if "wandb" in names:
        options |= {
            "wandb_project": project("WANDB_PROJECT"),
            "wandb_exp_name": job.run_name,
            "wandb_save_dir": str(out),
        }
    if "mlflow" in names:
        options |= {
            "mlflow_experiment": project("MLFLOW_EXPERIMENT_NAME"),
            "mlflow_run_name": job.run_name,
        }
        if hasattr(LoggerConfig, "mlflow_log_artifacts"):
            options["mlflow_log_artifacts"] = False  # checkpoints stay in the run's folder
    return LoggerConfig(
        log_interval=max(1, job.config.train.steps // 20),
        # never: the trainer's own curves would repeat ours, each once more over samples
        tensorboard_log_interval=job.config.train.steps + 1,
        # which names runs by their folders, so that all arms and the base are in one
        tensorboard_dir=f"{job.config.run_dir}/tensorboard/{job.arm.name}"
        if "tensorboard" in names
        else None,
        **options,
    )
