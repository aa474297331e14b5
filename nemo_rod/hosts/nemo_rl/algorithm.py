"""RoD as one of NeMo-RL's algorithms: the driver of a run.

The driver holds neither tokens nor the model. It counts steps, writes the curriculum and the
metrics, logs, validates and saves.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from nemo_rod.files import write_json
from nemo_rod.hosts.nemo_rl import compat
from nemo_rod.hosts.nemo_rl.policy import (
    WorkerFailed,
    Workers,
    sentence,
    separate_conversions,
    using_workers,
)
from nemo_rod.hosts.nemo_rl.settings import open_store
from nemo_rod.jobs import ReferenceJob, TrainJob
from nemo_rod.loggers import LOGGERS, check_installed, continue_runs, known_metrics, prepare_runs
from nemo_rod.selection import References
from nemo_rod.selection.arms import curriculum_header
from nemo_rod.selection.competition import model_tflops
from nemo_rod.selection.curriculum.journal import Journal
from nemo_rod.selection.held_out import START_FILE, is_due
from nemo_rod.selection.references.folder import holds, precision_name, role_manifest
from nemo_rod.selection.references.reference_pass import write_references
from nemo_rod.signals import STOP_SIGNALS, Stopped


def run(job: TrainJob | ReferenceJob, config: dict[str, Any]) -> None:
    """Runs a job with its configuration, which `settings.resolve_job` returns.

    It joins the running Ray cluster, or starts one on this machine.

    Raises:
        ValueError: store, references, model and configuration do not belong together.
        WorkerFailed: a worker failed; the message names it and the reason.
        Stopped: the run was asked to stop, and resumes when it is started again.
    """
    separate_conversions(config["policy"]["model_name"], job.out)
    import ray
    from nemo_rl.distributed.virtual_cluster import init_ray
    from ray.exceptions import RayError

    if not ray.is_initialized():
        init_ray()
    try:
        if isinstance(job, TrainJob):
            train(job, config)
        else:
            write_reference(job, config)
    except RayError as error:  # NeMo-RL's own calls raise it
        raise WorkerFailed(sentence(error)) from error


def write_reference(job: ReferenceJob, config: dict[str, Any]) -> None:
    """Writes a model's losses on the training blocks of the job's role.

    An interrupted run resumes where it stopped.

    Raises:
        ValueError: the role is missing or has no blocks, or the folder has references of another
            model, role, store or precision.
        WorkerFailed: a worker failed; raised at once, with the cause.
    """
    store, out = open_store(config, job), Path(job.out)
    manifest = role_manifest(
        store,
        job.role,
        model=job.model_digest,
        lengths=job.lengths,
        precision=precision_name(config["policy"]["precision"]),
    )
    required = np.load(job.wanted)[manifest.start : manifest.stop] if job.wanted else None
    if holds(out, manifest, required):
        return
    with using_workers(config, job) as workers:
        scorer = SimpleNamespace(
            store=store,
            losses_at=lambda ids, lengths: workers.call(
                "rod_losses_at", block_ids=ids, lengths=lengths
            ),
            micro_batch_size=job.config.scoring.micro_batch_size,
            replicas=workers.policy.sharding_annotations.get_axis_size("data_parallel"),
        )
        write_references(
            scorer,
            out,
            manifest=manifest,
            name="reference",
            required=required,
            agree=lambda function: function(),  # the driver alone writes
        )


def train(job: TrainJob, config: dict[str, Any]) -> None:
    """Trains its arm, resuming after the last step that has a checkpoint; see `run`."""
    from nemo_rl.utils.checkpoint import CheckpointManager
    from nemo_rl.utils.logger import Logger

    out, store, references = Path(job.out), open_store(config, job), None
    if "references" in job.arm.needs:
        precision = precision_name(config["policy"]["precision"])
        references = References.open(job.references, store, precision=precision)
    header = curriculum_header(job.arm, store, references, config=job.config_digest)
    checkpointer = CheckpointManager(config["checkpointing"])
    latest = checkpointer.get_latest_checkpoint_path()
    step = (checkpointer.load_training_info(latest) or {"step": 0})["step"]
    with using_workers(config, job, resume_paths=checkpointer.get_resume_paths(latest)) as workers:
        section = config["logger"]
        with continued_logger(lambda: Logger(section), section, out, step=step) as logger:
            logger.log_hyperparams(config)
            journal = Journal(out, header, step=step)
            train_steps(job, config, workers, journal, logger, checkpointer, step=step)
            workers.call("rod_export", folder=str(out / "hf"))


def train_steps(
    job: TrainJob,
    config: dict[str, Any],
    workers: Workers,
    journal: Journal,
    logger: Any,
    checkpointer: Any,
    *,
    step: int,
) -> None:
    """Trains from `step` to the end; the logger and the checkpoint manager are NeMo-RL's.

    A stop signal lets the step under way be completed and saved. If the workers fail after it, as
    the end of a job may end Ray before the driver has saved, a run with checkpoints has stopped;
    without any, it has failed.

    Raises:
        WorkerFailed: a worker failed; raised at once, with the cause. The last checkpoint remains.
        Stopped: the run was asked to stop or its time is over; it has saved a checkpoint, or, if
            its workers ended first, has the last one.
    """
    from nemo_rl.utils.timer import TimeoutChecker
    from ray.exceptions import RayError

    saving, name = config["checkpointing"], job.arm.name
    every, last = job.config.validation.every, job.config.train.steps
    timeout = TimeoutChecker(timeout=saving["checkpoint_must_save_by"], fit_last_save_time=True)
    timeout.start_iterations()
    workers.policy.prepare_for_training()
    if every and step == 0:
        losses = workers.call("rod_validate", blocks=job.config.validation.blocks)
        write_json(Path(job.out) / START_FILE, losses)
        logger.log_metrics(known_metrics(losses), 0)
    with _stop_signals() as stopping:
        try:
            while step < last:
                start = time.perf_counter()
                choice, metrics = workers.call("rod_step", step=step)
                seconds = metrics["timing/train/total"] = time.perf_counter() - start
                flops = metrics.pop("flops", None) or workers.update_flops(len(choice.chosen))
                if flops:  # NeMo-RL can count this model's operations
                    tflops = model_tflops(choice, flops, seconds, prefix=job.arm.scored_prefix)
                    metrics["throughput/model_tflops_per_gpu"] = tflops / workers.count
                done = step + 1
                if every and is_due(done, every=every, steps=last):
                    metrics |= workers.call("rod_validate", blocks=job.config.validation.blocks)
                row = journal.append(step, choice, metrics)
                logger.log_metrics(known_metrics(row), done)
                step = done
                timeout.mark_iteration()
                stop = stopping.is_set() or timeout.check_save()
                due = stop or step == last or step % saving["save_period"] == 0
                if saving["enabled"] and due:
                    save(config, workers.policy, checkpointer, row, step=step)
                if stop and step < last:
                    raise Stopped(f"{name} stopped after step {step}: run it again to resume")
        except (WorkerFailed, RayError) as error:
            if not (stopping.is_set() and saving["enabled"]):
                raise
            reason = str(error) if isinstance(error, WorkerFailed) else sentence(error)
            raise Stopped(
                f"{name} was asked to stop, and ended in step {step + 1} before it had saved "
                f"({reason}): run it again to resume"
            ) from error


def save(
    config: dict[str, Any], policy: Any, checkpointer: Any, metrics: dict[str, Any], *, step: int
) -> None:
    """Writes a checkpoint of the state after `step` steps.

    NeMo-RL ranks checkpoints by a metric, `train:loss` or `val:<role>/<source>/loss` in its names.
    """
    saving = config["checkpointing"]
    info: dict[str, Any] = {"step": step}
    kind, _, name = (saving["metric_name"] or "").partition(":")
    ranked = metrics.get({"train": "train/", "val": "validation/"}.get(kind, "") + name)
    if ranked is not None:
        info[saving["metric_name"]] = ranked
    path = checkpointer.init_tmp_checkpoint(step, info, compat.run_config(config))
    folder = Path(path) / "policy"
    policy.save_checkpoint(
        weights_path=str(folder / "weights"),
        optimizer_path=str(folder / "optimizer") if checkpointer.save_optimizer else None,
        tokenizer_path=str(folder / "tokenizer"),
        checkpointing_cfg=saving,
    )
    compat.finish_checkpoint(checkpointer, policy, path)


@contextmanager
def continued_logger(
    make: Callable[[], Any], section: dict[str, Any], out: Path, *, step: int
) -> Iterator[Any]:
    """Makes NeMo-RL's logger and ends it, so that the next arm of this process has its own runs.

    Its backends continue the runs of an earlier attempt (`loggers.py`).

    Args:
        make: makes NeMo-RL's `Logger` of the section.
        section: the configuration `logger`.
        out: folder of the run.
        step: step at which the run starts or resumes; earlier steps that backends lost in a kill
            are logged again.
    """
    names = [name for name in LOGGERS if section.get(f"{name}_enabled")]
    check_installed(names)
    out.mkdir(parents=True, exist_ok=True)
    prepared, failed = prepare_runs(names, out), True
    try:
        logger = make()
        kinds = {type(backend).__name__: backend for backend in logger.loggers}
        continue_runs(
            out,
            step,
            writer=getattr(kinds.get("TensorboardLogger"), "writer", None),
            wandb_run=getattr(kinds.get("WandbLogger"), "run", None),
            mlflow=sys.modules["mlflow"] if "MLflowLogger" in kinds else None,
        )
        try:
            yield logger
            failed = False
        finally:
            if logger.gpu_monitor:
                logger.gpu_monitor.stop()  # a thread of its own, which logs
            for backend in logger.loggers:
                if hasattr(backend, "writer"):
                    backend.writer.close()
            # MLflow's backend ends the current run when it is garbage-collected: do so now, not in
            # the next arm
            logger.loggers.clear()
    finally:
        prepared.end(failed=failed)


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """Yields an event that a stop signal sets instead of ending the process."""
    stopping, before = threading.Event(), {}
    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            before[number] = signal.signal(number, lambda *_: stopping.set())
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
