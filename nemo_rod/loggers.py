"""Loggers of metrics in addition to `metrics.jsonl`: TensorBoard, W&B, MLflow, registered ones.

The hosts' own loggers write; `hosts/logger_runs.py` makes a resumed run one curve. W&B and MLflow
read accounts and addresses from the environment; neither is ever written to a file.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from nemo_rod import parts

LOGGERS = tuple(parts.OURS["loggers"])  # the hosts' own; packages register others
PROJECT = "nemo-rod"  # of W&B, and MLflow's experiment, unless the environment names one
SECRETS = ("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")


def logger_names(value: Any) -> tuple[str, ...]:
    """Returns the loggers that a value of `logger=` names: none, one, or a list of them."""
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(dict.fromkeys(value))


def are_loggers(value: Any) -> bool:
    """Returns whether a value of `logger=` is valid."""
    is_valid = isinstance(value, str | list | tuple)
    return is_valid and set(logger_names(value)) <= set(parts.names("loggers"))


def check_installed(names: Sequence[str]) -> None:
    """Refuses a logger whose package is missing.

    Raises:
        ValueError: A package is missing; the message names it and its extra.
    """
    for name in names:
        if name not in LOGGERS:
            parts.load("loggers", name, key="logger")
        elif importlib.util.find_spec(name) is None:
            raise ValueError(
                f"logger={name} is set, but the package {name} is not installed: pip install "
                f"'nemo-rod[{name}]', or leave the logger out."
            )


class Logger(Protocol):
    """A registered logger: `parts.load("loggers", name)(folder, run_name)` makes one."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Shows metrics by name, under the number of steps done."""

    def finish(self) -> None:
        """Ends the run in the logger."""


def registered_loggers(names: Sequence[str], folder: Path, run_name: str) -> list[Logger]:
    """Creates the loggers among `names` that packages have registered, for a run in `folder`."""
    others = [name for name in names if name not in LOGGERS]
    return [parts.load("loggers", name, key="logger")(folder, run_name) for name in others]


def project(variable: str) -> str:
    """Returns W&B's project, or MLflow's experiment, from its environment variable."""
    return os.environ.get(variable) or PROJECT


def known_metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics of a row that have a value, without the step number."""
    return {name: v for name, v in row.items() if v is not None and name != "step"}


def show(state: Any, done: int, metrics: Mapping[str, Any]) -> None:
    """Shows metrics after `done` steps in every logger of Megatron-Bridge's GlobalState `state`."""
    known = known_metrics(metrics)
    if writer := state.tensorboard_logger:
        write_scalars(writer, known, done)
    if wandb := state.wandb_logger:
        wandb.log(known, done)
    for name in ("mlflow_logger", "comet_logger"):  # Comet's since 0.6
        if logger := getattr(state, name, None):
            logger.log_metrics(known, step=done)


def write_scalars(writer: Any, metrics: Mapping[str, float], step: int) -> None:
    """Writes all metrics of a step to TensorBoard at once, ten times as fast as one by one."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
    writer.file_writer.add_summary(Summary(value=values), step)
    writer.flush()  # to the operating system, where it survives a kill
