"""Loggers of metrics in addition to `metrics.jsonl`: TensorBoard, W&B, MLflow, registered ones.

The hosts' own loggers write. Metrics have other names there, and an interrupted run continues as
one curve: the ids of a run are recorded in `loggers.json` of its folder, and restarts are marked
for TensorBoard. Accounts and addresses are read from the environment and never written to a file.
"""

from __future__ import annotations

import importlib.util
import netrc
import os
import re
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nemo_rod import parts
from nemo_rod.files import digest, read_json, read_lines, write_json
from nemo_rod.installation import pip_install
from nemo_rod.selection.held_out import START_FILE

LOGGERS = tuple(parts.HOUSE["loggers"])  # the hosts' own; packages register others

# the most important metrics form a group that loggers, which sort by name, show first
_AT_A_GLANCE = {
    "validation/adaptation_loss": "adaptation_loss",
    "validation/forgetting": "forgetting",
    "rod/replay_share": "replay_share",
    "train/loss": "training_loss",
    "throughput/tokens_per_second": "tokens_per_second",
}
# beginning of a metric's name -> the same in loggers
_GROUPS = {
    **dict.fromkeys(("train/", "throughput/", "memory/"), "host/"),
    "timing/train/": "rod/seconds_",
    "validation/": "rod_by_source/",
    **{
        f"rod/{of}/": f"rod_by_source/{of}/"
        for of in ("rho", "loss", "candidates", "chosen", "share", "mix/target", "odm")
    },
}


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
                f"logger={name} is set, but the package {name} is not installed: "
                f"{pip_install(name)}, or leave the logger out."
            )


class Prepared(ExitStack):
    """The changes that `prepare_runs` has made in this process; they stay until `end`."""

    def end(self, *, failed: bool = False) -> None:
        """Ends the runs of W&B and MLflow, and undoes the changes for later runs of the process."""
        if wandb := sys.modules.get("wandb"):
            wandb.finish(exit_code=int(failed))
            wandb.teardown()  # it reads the environment once; a later run would get this run's id
        if mlflow := sys.modules.get("mlflow"):
            mlflow.end_run("FAILED" if failed else "FINISHED")
        self.close()

    def set(self, name: str, value: str) -> None:
        """Sets an environment variable until `end`."""
        was = {name: os.environ[name]} if name in os.environ else {}
        self.callback(lambda: (os.environ.pop(name, None), os.environ.update(was)))
        os.environ[name] = value


def prepare_runs(names: Sequence[str], folder: Path) -> Prepared:
    """Makes the loggers of this process continue the runs in the folder's `loggers.json`.

    Must be called before the host starts its loggers, in the process that logs. Without an account,
    W&B writes to files, which `wandb sync` uploads later.

    Returns:
        The changes in this process; to be ended before it begins another run.
    """
    runs, prepared = known_runs(folder), Prepared()
    if "wandb" in names:
        run_id = runs.get("wandb") or uuid.uuid4().hex[:16]
        keep_run(folder, "wandb", run_id)
        prepared.set("WANDB_RUN_ID", run_id)
        prepared.set("WANDB_RESUME", "allow")
        if "WANDB_MODE" not in os.environ and not _has_account():
            prepared.set("WANDB_MODE", "offline")
            print(
                "nemo-rod: W&B has no account here (set WANDB_API_KEY, or `wandb login`): the run "
                f"is logged to files in {folder}, which `wandb sync` uploads.",
                file=sys.stderr,
            )
    if "mlflow" in names:
        if "MLFLOW_TRACKING_URI" not in os.environ:  # MLflow refuses plain files since 3.7
            prepared.set("MLFLOW_TRACKING_URI", f"sqlite:///{folder.absolute()}/mlflow.db")
        if "mlflow" in runs:
            import mlflow

            prepared.set("MLFLOW_RUN_ID", runs["mlflow"])
            # the hosts log their configuration again, and MLflow refuses a different one
            prepared.callback(setattr, mlflow, "log_params", mlflow.log_params)
            mlflow.log_params = lambda params: None
    return prepared


def known_runs(folder: Path) -> Mapping[str, str]:
    """Returns the ids of the folder's runs, by logger."""
    path = folder / "loggers.json"
    return read_json(path) if path.exists() else {}


def keep_run(folder: Path, name: str, run_id: str) -> None:
    """Records the id of a logger's run."""
    write_json(folder / "loggers.json", {**known_runs(folder), name: run_id})


def read_steps(folder: Path, *, first: int, last: int) -> Iterator[tuple[int, dict[str, float]]]:
    """Yields the recorded metrics of a run, for a logger that lost some of them in a kill.

    W&B holds the newest metrics in memory; after a resume they are logged again from here.

    Yields:
        The number of steps done, from `first` to `last`, and metrics by name.
    """
    start, steps = folder / START_FILE, folder / "metrics.jsonl"
    if start.exists() and first <= 0:
        yield 0, known_metrics(read_json(start))
    for row in read_lines(steps) if steps.exists() else []:
        if first <= row["step"] + 1 <= last:
            yield row["step"] + 1, known_metrics(row)


def continue_runs(
    folder: Path, step: int, *, writer: Any = None, wandb_run: Any = None, mlflow: Any = None
) -> None:
    """Makes started loggers continue the curves of earlier attempts, of those that are given.

    Args:
        folder: folder of the run.
        step: step at which it starts or resumes; at 0, what is there is of a run that is made
            again.
        writer: TensorBoard's SummaryWriter.
        wandb_run: W&B's run, to which what it lost of earlier steps in a kill is logged again.
        mlflow: MLflow's module, whose run is kept for the next attempt.
    """
    if writer:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        # drops what a killed run wrote, as torch does for `purge_step`, which no host passes
        start, first = SessionLog(status=SessionLog.START), step + 1 if step else 0
        writer.file_writer.add_event(Event(step=first, file_version="brain.Event:2"))
        writer.file_writer.add_event(Event(step=first, session_log=start))
    if wandb_run and step:
        for done, metrics in read_steps(folder, first=wandb_run.step, last=step):
            wandb_run.log(legal_names(metrics, "wandb"), done)
    if mlflow:
        keep_run(folder, "mlflow", mlflow.active_run().info.run_id)


def known_metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics of a row that have a value, as loggers name them, without the step."""
    return {shown_name(name): v for name, v in row.items() if v is not None and name != "step"}


def legal_names(metrics: Mapping[str, float], logger: str) -> dict[str, float]:
    """Returns metrics by names that a logger takes.

    Names of sources are folders of a user, with any characters. A name that is changed ends in a
    digest of the original: it may be another metric's, which has no value at some steps.

    Args:
        metrics: metrics by name.
        logger: its name as in `LOGGERS`; others than MLflow only lose control characters.
    """
    legal: dict[str, float] = {}
    for name, value in metrics.items():
        changed = "".join(char if char.isprintable() else "_" for char in name)
        if logger == "mlflow":  # mlflow.utils.validation also demands the shortest path
            changed = re.sub(r"[^/\w.\- :]|(?<=/)/|/$|(?<![^/])\.\.?(?![^/])", "_", changed)[:250]
        if changed != name:
            changed = f"{changed[:241]}_{digest(ascii(name).encode())[:8]}"
        legal[changed] = value
    return legal


def shown_name(name: str) -> str:
    """Returns the name of a metric in loggers: there it has a group, by who measures it."""
    if name in _AT_A_GLANCE:
        return f"at_a_glance/{_AT_A_GLANCE[name]}"
    start = next((start for start in _GROUPS if name.startswith(start)), "")
    return _GROUPS.get(start, "") + name.removeprefix(start)


def show(state: Any, done: int, known: Mapping[str, float]) -> None:
    """Shows `known_metrics` after `done` steps in every logger of Bridge's GlobalState `state`."""
    if writer := state.tensorboard_logger:
        write_scalars(writer, known, done)
    if wandb := state.wandb_logger:
        wandb.log(legal_names(known, "wandb"), done)
    for name in ("mlflow", "comet"):  # Comet's since 0.6
        if logger := getattr(state, f"{name}_logger", None):
            logger.log_metrics(legal_names(known, name), step=done)


def write_scalars(writer: Any, metrics: Mapping[str, float], step: int) -> None:
    """Writes all metrics of a step to TensorBoard at once, ten times as fast as one by one."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    named = legal_names(metrics, "tensorboard")
    values = [Summary.Value(tag=name, simple_value=value) for name, value in named.items()]
    writer.file_writer.add_summary(Summary(value=values), step)
    writer.flush()  # the operating system keeps it through a kill


def project(variable: str) -> str:
    """Returns W&B's project, or MLflow's experiment, from its environment variable."""
    return os.environ.get(variable) or "nemo-rod"


def _has_account() -> bool:
    """Returns whether W&B would find a key; its own function for this would freeze its settings."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname
    custom = os.environ.get("NETRC")
    for path in [Path(custom)] if custom else [Path.home() / name for name in (".netrc", "_netrc")]:
        try:
            if host and netrc.netrc(path).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False
