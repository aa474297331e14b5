"""Where metrics are shown besides `metrics.jsonl`: TensorBoard, W&B, MLflow, registered loggers.

The hosts' own loggers write. What is kept here is what makes a resumed run one curve: the ids of
its runs, in `loggers.json` of the run's folder, and TensorBoard's mark of a restart. Accounts and
addresses are read from the environment by W&B and MLflow themselves, and never written to a file.
"""

from __future__ import annotations

import importlib.util
import netrc
import os
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from nemo_rod import parts
from nemo_rod.files import read_json, read_lines, write_json

LOGGERS = tuple(parts.OURS["loggers"])  # the hosts' own; packages register others
PROJECT = "nemo-rod"  # of W&B, and MLflow's experiment, unless the environment names one
SECRETS = ("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")


def logger_names(found: Any) -> tuple[str, ...]:
    """Returns the loggers that `logger=` names: none, one, or a list of them."""
    if found is None:
        return ()
    return (found,) if isinstance(found, str) else tuple(dict.fromkeys(found))


def are_loggers(found: Any) -> bool:
    """Returns whether a value of `logger=` is valid."""
    is_list = isinstance(found, str | list | tuple)
    return is_list and all(name in parts.names("loggers") for name in logger_names(found))


def check_installed(names: Sequence[str]) -> None:
    """Refuses a logger whose package is missing, with a ValueError that names it and its extra."""
    for name in names:
        if name not in LOGGERS:
            parts.load("loggers", name, key="logger")
        elif importlib.util.find_spec(name) is None:
            raise ValueError(
                f"logger={name} is set, but the package {name} is not installed: pip install "
                f"'nemo-rod[{name}]' brings it, or leave the logger out."
            )


class Logger(Protocol):
    """A registered logger: `parts.load("loggers", name)(folder, run_name)` makes one."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Shows metrics by name, under the number of steps done."""

    def finish(self) -> None:
        """Ends the run in the logger."""


def registered_loggers(names: Sequence[str], folder: Path, run_name: str) -> list[Logger]:
    """Makes the loggers among `names` that packages have registered, for a run in `folder`."""
    others = [name for name in names if name not in LOGGERS]
    return [parts.load("loggers", name, key="logger")(folder, run_name) for name in others]


def project(variable: str) -> str:
    """Returns W&B's project, or MLflow's experiment, from its variable of the environment."""
    return os.environ.get(variable) or PROJECT


@dataclass
class Prepared:
    """What `prepare_runs` has changed in this process.

    Attributes:
        before: Variables of the environment as they were; None where there was none.
        log_params: MLflow's own function, where it was replaced.
    """

    before: dict[str, str | None] = field(default_factory=dict)
    log_params: Any = None

    def end(self, *, failed: bool = False) -> None:
        """Ends the runs of W&B and MLflow, so that a later run of this process has its own."""
        if wandb := sys.modules.get("wandb"):
            wandb.finish(exit_code=int(failed))
            wandb.teardown()  # it reads the environment once, and would keep the first run's id
        if mlflow := sys.modules.get("mlflow"):
            mlflow.end_run("FAILED" if failed else "FINISHED")
            if self.log_params is not None:
                mlflow.log_params = self.log_params  # type: ignore[attr-defined]
        for name, value in self.before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self.before.clear()

    def set(self, name: str, value: str) -> None:
        """Sets a variable of the environment until the end."""
        self.before.setdefault(name, os.environ.get(name))
        os.environ[name] = value


def prepare_runs(names: Sequence[str], folder: Path) -> Prepared:
    """Makes the loggers of this process go on with the runs that the folder knows.

    Called before the host starts its loggers, in the process that logs; it ends what is returned
    before it turns to another run. Without an account, W&B writes to files, which `wandb sync`
    uploads later. `loggers.json` is in the folder.
    """
    runs, prepared = known_runs(folder), Prepared()
    if "wandb" in names:
        if "wandb" not in runs:
            keep_run(folder, "wandb", uuid.uuid4().hex[:16])
            runs = known_runs(folder)
        prepared.set("WANDB_RUN_ID", runs["wandb"])
        prepared.set("WANDB_RESUME", "allow")
        if "WANDB_MODE" not in os.environ and not _has_account():
            prepared.set("WANDB_MODE", "offline")
            print(
                "nemo-rod: W&B has no account here (set WANDB_API_KEY, or `wandb login`): the run "
                f"is logged to files in {folder}, which `wandb sync` uploads.",
                file=sys.stderr,
                flush=True,
            )
    if "mlflow" in names:
        if "MLFLOW_TRACKING_URI" not in os.environ:  # MLflow refuses plain files since 3.7
            prepared.set("MLFLOW_TRACKING_URI", f"sqlite:///{folder.absolute()}/mlflow.db")
        if "mlflow" in runs:
            import mlflow

            prepared.set("MLFLOW_RUN_ID", runs["mlflow"])
            # the hosts log their configuration again, and MLflow refuses one that differs
            prepared.log_params = mlflow.log_params
            mlflow.log_params = lambda params: None
    return prepared


def known_runs(folder: Path) -> Mapping[str, str]:
    """Returns the ids of the folder's runs, by logger."""
    path = folder / "loggers.json"
    return read_json(path) if path.exists() else {}


def keep_run(folder: Path, name: str, run_id: str) -> None:
    """Notes the id of a logger's run."""
    write_json(folder / "loggers.json", {**known_runs(folder), name: run_id})


def recorded(folder: Path, *, first: int, last: int) -> Iterator[tuple[int, dict[str, float]]]:
    """Yields the metrics that the run's folder has, for a logger that a kill has cost some of them.

    W&B keeps the newest ones in memory; after a resume they are logged again from here: steps done,
    from `first` to `last` of them, and metrics by name.
    """
    start, steps = folder / "validation_start.json", folder / "metrics.jsonl"
    if start.exists() and first <= 0:
        yield 0, read_json(start)
    for row in read_lines(steps) if steps.exists() else []:
        if first <= row["step"] + 1 <= last:
            yield row["step"] + 1, known_metrics(row)


def known_metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns a row's metrics that have a value, without the number of the step."""
    return {name: v for name, v in row.items() if v is not None and name != "step"}


def show(state: Any, done: int, metrics: Mapping[str, Any]) -> None:
    """Shows metrics in every logger that Megatron-Bridge has, under the number of steps done.

    `state` is its GlobalState, on the rank that logs.
    """
    known = known_metrics(metrics)
    if writer := state.tensorboard_logger:
        write_scalars(writer, known, done)
    if wandb := state.wandb_logger:
        wandb.log(known, done)
    if mlflow := getattr(state, "mlflow_logger", None):
        mlflow.log_metrics(known, step=done)


def write_scalars(writer: Any, metrics: Mapping[str, float], step: int) -> None:
    """Writes all metrics of a step to TensorBoard at once, a tenth of the time of one by one."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
    writer.file_writer.add_summary(Summary(value=values), step)
    writer.flush()  # to the system, which a kill does not take it from


def mark_restart(writer: Any, step: int) -> None:
    """Makes a SummaryWriter drop what a killed run wrote of this step and later ones."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    # what torch writes for `purge_step`, which no host passes on
    start = SessionLog(status=SessionLog.START)
    writer.file_writer.add_event(Event(step=step, file_version="brain.Event:2"))
    writer.file_writer.add_event(Event(step=step, session_log=start))


def _has_account() -> bool:
    """Returns whether W&B finds a key, where it looks itself; asking it would fix its settings."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname
    named = os.environ.get("NETRC")
    for path in [Path(named)] if named else [Path.home() / name for name in (".netrc", "_netrc")]:
        try:
            if host and netrc.netrc(path).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False
