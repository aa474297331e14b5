"""Loggers of metrics in addition to `metrics.jsonl`: TensorBoard, W&B, MLflow, registered ones.

The hosts' own loggers write; `hosts/logger_runs.py` makes a resumed run one curve. W&B and MLflow
read accounts and addresses from the environment; neither is ever written to a file.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from nemo_rod import parts

LOGGERS = tuple(parts.OURS["loggers"])  # the hosts' own; packages register others
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
        ValueError: a package is missing; the message names it and its extra.
    """
    for name in names:
        if name not in LOGGERS:
            parts.load("loggers", name, key="logger")
        elif importlib.util.find_spec(name) is None:
            raise ValueError(
                f"logger={name} is set, but the package {name} is not installed: pip install "
                f"'nemo-rod[{name}]', or leave the logger out."
            )
