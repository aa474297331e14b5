"""A job as its processes receive it: a small file of plain values, written before they start.

torchrun ... -m nemo_rod.megatron JOB.json

On several nodes, the processes of the first one have the file as an argument; the others read its
name from the job's key-value store.
"""

from __future__ import annotations

import dataclasses
import math
import os
import socket
import time
import types
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from nemo_rod.bounds import has_type
from nemo_rod.config import Config, Parallel
from nemo_rod.files import interpreting, read_json, write_json
from nemo_rod.loggers import logger_names
from nemo_rod.selection.arms import Arm
from nemo_rod.selection.held_out import Rule
from nemo_rod.selection.references.folder import precision_name
from nemo_rod.trust import KEY, sign, verify

STORE = "NEMO_ROD_STORE"  # environment variable: host:port of a multi-node job's store
FAULT_KEY = "fault"  # store key: the first fault, which ends all processes
_FILE_KEY = "job"
_SHARED_SECONDS = 30.0  # how long a file may take to appear on all nodes


@dataclass(kw_only=True)
class ModelJob:
    """The inputs of every job that runs a model: the resolved configuration, and its folders."""

    name: str  # label in progress lines
    config: Config  # for training jobs, with the arm's overrides applied
    blocks: str  # folder of the block store
    out: str  # folder that receives the results

    @property
    def parallel(self) -> Parallel:
        """The layout of its processes."""
        return self.config.parallel

    @property
    def stall_seconds(self) -> float:
        """Time without progress after which the job is ended; 0: never."""
        return self.config.launcher.stall_seconds

    @property
    def collective_minutes(self) -> int:
        """Timeout of collectives: longer than that of the watch, which can name the late rank."""
        return math.ceil(self.stall_seconds / 60) + 10 if self.stall_seconds else 7 * 24 * 60

    @property
    def arithmetic(self) -> str:
        """Name of the scoring pass's arithmetic, as manifests of references have it."""
        precision = self.config.model.precision
        return precision_name(self.config.scoring.precision or precision, over=precision)


@dataclass(kw_only=True)
class TrainJob(ModelJob):
    """Trains a model on the batches that its arm chooses."""

    start: str  # Hugging Face checkpoint to start from
    arm: Arm
    # folders of reference losses; empty where the policy needs none
    references: list[str] = field(default_factory=list)
    config_digest: str = ""  # digest of the settings that determine the choices
    convergence: Rule | None = None  # rule for an early stop

    @property
    def loggers(self) -> tuple[str, ...]:
        """Names of the loggers besides `metrics.jsonl` (`loggers.LOGGERS`)."""
        return logger_names(self.config.logger)

    @property
    def run_name(self) -> str:
        """Name of the run in these loggers."""
        return f"{self.config.recipe}/{self.arm.name}"


@dataclass(kw_only=True)
class ReferenceJob(ModelJob):
    """Writes a reference: a model's losses on the training blocks of one role."""

    start: str  # Hugging Face checkpoint of the model
    role: str  # "adaptation" or "replay"
    model_digest: str  # digest of the checkpoint's weights
    lengths: list[int]  # scored tokens of a block, from its start: one loss for each
    wanted: str = ""  # file of the blocks to score, bool [blocks of the store] (.npy); "": all


@dataclass(kw_only=True)
class EvaluateJob(ModelJob):
    """Writes the held-out losses of several models, per source."""

    # name -> Hugging Face checkpoint; each result goes to `<out>/<name>.json`
    models: dict[str, str]


@dataclass(kw_only=True)
class ExportJob(ModelJob):
    """Writes a step of a training run as a Hugging Face checkpoint, to `<out>/hf`."""

    start: str  # Hugging Face checkpoint that the run started from
    saved: str  # folder of the step's distributed checkpoint


Job = TrainJob | ReferenceJob | EvaluateJob | ExportJob
_KINDS: dict[str, type] = {
    "train": TrainJob,
    "reference": ReferenceJob,
    "evaluate": EvaluateJob,
    "export": ExportJob,
}


def write_job(job: Job, path: Path) -> None:
    """Writes a job to a JSON file."""
    kind = next(name for name, kind in _KINDS.items() if type(job) is kind)
    write_json(path, {"job": kind, **dataclasses.asdict(job)})


def read_job(path: Path) -> Job:
    """Reads a job from a JSON file.

    Raises:
        ValueError: the file is damaged, or of another version.
    """
    values = read_json(path, "job")
    with interpreting(path):
        job: Job = _as_type(values, _KINDS[values.pop("job")], "job")
        if isinstance(job, TrainJob):
            job.arm.num_candidates, job.arm.policy()  # each refuses values that it cannot use
        return job


def job_store(address: str, name: str, seconds: float = 300.0) -> Any:
    """Returns a connection to the key-value store of a job, which its torchrun keeps.

    `name` is torchrun's `--rdzv-id`; `seconds` is the timeout for the store, and for values.
    """
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    (host, port), patience = address.rsplit(":", 1), timedelta(seconds=seconds)
    name = sign(name.encode(), os.environ.get(KEY, "")).hex()  # a name that no stranger can guess
    store = TCPStore(host, int(port), is_master=False, timeout=patience, wait_for_workers=False)
    return PrefixStore(f"nemo_rod/{name}", store)


def shared_job(store: Any, arguments: list[str]) -> Job:
    """Reads the job file of the first node on every process.

    Raises:
        ValueError: the file is damaged, not of this job, or this node does not see it.
    """
    key = os.environ.get(KEY, "")
    if arguments:
        store.set(_FILE_KEY, sign(arguments[0].encode(), key))
        return read_job(Path(arguments[0]))
    order, record = verify(store.get(_FILE_KEY), key), Path(os.environ["NEMO_ROD_RECORD"])
    file, deadline = Path((order or b"a file").decode()), time.monotonic() + _SHARED_SECONDS
    is_ours = key and order and file.resolve().is_relative_to(record.parents[2].resolve())
    if not is_ours:
        raise ValueError(
            f"node {socket.gethostname()} was ordered to run {file}, which is not of this job: "
            f"keep strangers out of the nodes' network, and submit with launcher=slurm ({KEY})"
        )
    while not file.is_file():
        if time.monotonic() > deadline:
            raise ValueError(
                f"node {socket.gethostname()} does not see {file}, which the first node has "
                "written: put run_dir on a file system that all nodes share"
            )
        time.sleep(0.5)
    return read_job(file)


def _as_type(value: Any, hint: Any, name: str) -> Any:
    """Returns a value of a JSON file as the type that a field declares, dataclasses included."""
    for kind in get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,):
        if dataclasses.is_dataclass(kind) and isinstance(value, dict):
            make: Any = kind
            hints = get_type_hints(kind)
            return make(**{key: _as_type(item, hints[key], key) for key, item in value.items()})
    if not has_type(value, hint):
        raise ValueError(f"{name} is {value!r}, expected {getattr(hint, '__name__', hint)}")
    return value
