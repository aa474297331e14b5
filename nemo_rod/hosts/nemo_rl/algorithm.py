"""RoD as one of NeMo-RL's algorithms: `setup` and `rod_train`.

The driver holds neither tokens nor the model. It counts steps, writes the curriculum and the
metrics, logs, validates and saves.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rod.files import write_json
from nemo_rod.hosts.logger_runs import Prepared, known_metrics
from nemo_rod.hosts.nemo_rl import compat
from nemo_rod.hosts.nemo_rl.inputs import build_arm, config_digest, open_references, open_store
from nemo_rod.hosts.nemo_rl.policy import WorkerFailed, Workers, make_policy, sentence
from nemo_rod.hosts.nemo_rl.shown import end_runs, keep_runs, model_speed, use_loggers
from nemo_rod.hosts.nemo_rl.worker import Task
from nemo_rod.selection import CurriculumHeader
from nemo_rod.selection.arms import Arm, curriculum_header
from nemo_rod.selection.curriculum.journal import Journal
from nemo_rod.selection.held_out import START_FILE
from nemo_rod.signals import STOP_SIGNALS, Stopped


@dataclass
class Run:
    """The state of a run, which `setup` creates and `rod_train` uses."""

    config: dict[str, Any]  # all sections of the configuration, as plain values
    policy: Any  # NeMo-RL's, like the next one, the logger and the checkpointer
    cluster: Any
    arm: Arm
    workers: Workers
    header: CurriculumHeader
    logger: Any
    checkpointer: Any
    step: int  # the next one
    prepared: Prepared  # changes to this process for the loggers' runs

    def close(self, *, force: bool = False) -> None:
        """Ends the workers, frees the cluster and ends the loggers' runs.

        After a failure workers may hang: `force` kills them without asking.
        """
        group = self.policy.worker_group
        try:
            group.shutdown(cleanup_method=None if force else "shutdown", force=force)
            self.cluster.shutdown()
        finally:
            end_runs(self.logger, self.prepared, failed=force)


def setup(config: dict[str, Any]) -> Run:
    """Builds a run, from its latest checkpoint if there is one. Ray must be running.

    Raises:
        ValueError: store, references, model and configuration do not belong together.
        WorkerFailed: a worker refuses; the message names the reason.
    """
    from nemo_rl.utils.checkpoint import CheckpointManager
    from nemo_rl.utils.logger import Logger

    rod, policy_cfg = config["rod"], config["policy"]
    store = open_store(config)
    arm = build_arm(config, store)
    references = open_references(config, store) if arm.policy().needs_scores else None
    header = curriculum_header(arm, store, references, config=config_digest(config, arm))

    checkpointer = CheckpointManager(config["checkpointing"])
    latest = checkpointer.get_latest_checkpoint_path()
    info = checkpointer.load_training_info(latest) or {"step": 0}
    policy_cfg["megatron_cfg"]["train_iters"] = rod["steps"]
    policy, cluster = make_policy(config, resume_paths=checkpointer.get_resume_paths(latest))
    prepared = Prepared()
    try:
        task = Task(
            blocks=rod["blocks"],
            arm=arm,
            references=tuple(rod["references"]) if references is not None else (),
            scoring_micro_batch_size=rod["scoring"]["micro_batch_size"],
            validation_blocks=rod["validation"]["blocks"],
            on_nonfinite=rod["selection"]["on_nonfinite"],
        )
        workers = Workers(policy, task, stall_seconds=rod["stall_seconds"])
        prepared = use_loggers(config["logger"], Path(rod["out"]))
        logger = Logger(config["logger"])
        logger.log_hyperparams(config)
        keep_runs(logger, Path(rod["out"]), step=info["step"])
        return Run(
            config=config,
            policy=policy,
            cluster=cluster,
            arm=arm,
            workers=workers,
            header=header,
            logger=logger,
            checkpointer=checkpointer,
            step=info["step"],
            prepared=prepared,
        )
    except BaseException:
        policy.worker_group.shutdown(force=True)
        prepared.end(failed=True)
        raise


def rod_train(run: Run) -> None:
    """Trains to the end, resuming after the last completed step.

    Raises:
        WorkerFailed: a worker failed; raised at once, with the cause. The last checkpoint remains.
        Stopped: the run was asked to stop or its time is over; it has saved a checkpoint, or, if
            its workers ended first, has the last one.
    """
    from nemo_rl.utils.timer import TimeoutChecker

    rod, saving = run.config["rod"], run.config["checkpointing"]
    out = Path(rod["out"])
    out.mkdir(parents=True, exist_ok=True)
    journal = Journal(out, run.header, step=run.step)
    every = rod["validation"]["every"]
    timeout = TimeoutChecker(timeout=saving["checkpoint_must_save_by"], fit_last_save_time=True)
    timeout.start_iterations()
    run.policy.prepare_for_training()
    if every and run.step == 0:
        losses = run.workers.validate()
        write_json(out / START_FILE, losses)
        run.logger.log_metrics(known_metrics(losses), 0)
    with _stoppable(run) as stopping:
        while run.step < rod["steps"]:
            start = time.perf_counter()
            choice, metrics = run.workers.step(run.step)
            metrics["timing/train/total"] = time.perf_counter() - start
            done = run.step + 1
            metrics |= model_speed(run.workers, choice, metrics, run.arm, run.cluster.world_size())
            validated = run.workers.validate() if every and done % every == 0 else {}
            row = journal.append(run.step, choice, metrics | validated)
            run.logger.log_metrics(known_metrics(row), done)
            run.step = done
            timeout.mark_iteration()
            stop = stopping.is_set() or timeout.check_save()
            due = stop or done == rod["steps"] or done % saving["save_period"] == 0
            if saving["enabled"] and due:
                save(run, row)
            if stop and done < rod["steps"]:
                raise Stopped(f"{rod['arm']} stopped after step {done}: run it again to resume")


def save(run: Run, metrics: dict[str, Any]) -> None:
    """Writes a checkpoint of the state after `run.step` steps.

    NeMo-RL ranks checkpoints by a metric, `train:loss` or `val:<role>/<source>/loss` in its names.
    """
    saving = run.config["checkpointing"]
    info: dict[str, Any] = {"step": run.step}
    kind, _, name = (saving["metric_name"] or "").partition(":")
    ranked = metrics.get({"train": "train/", "val": "validation/"}.get(kind, "") + name)
    if ranked is not None:
        info[saving["metric_name"]] = ranked
    path = run.checkpointer.init_tmp_checkpoint(run.step, info, compat.run_config(run.config))
    folder = Path(path) / "policy"
    run.policy.save_checkpoint(
        weights_path=str(folder / "weights"),
        optimizer_path=str(folder / "optimizer") if run.checkpointer.save_optimizer else None,
        tokenizer_path=str(folder / "tokenizer"),
        checkpointing_cfg=saving,
    )
    compat.finish_checkpoint(run.checkpointer, run.policy, path)


@contextmanager
def _stoppable(run: Run) -> Iterator[threading.Event]:
    """Records a stop signal, so that the step can first be completed and saved.

    A failure after the signal becomes `Stopped`: the end of a job may end Ray before the driver has
    saved. A run with checkpoints resumes from its last one; without any, it stays a failure.
    """
    from ray.exceptions import RayError

    stopping, before = threading.Event(), {}
    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            before[number] = signal.signal(number, lambda *_: stopping.set())
    try:
        yield stopping
    except (WorkerFailed, RayError) as error:
        if not (stopping.is_set() and run.config["checkpointing"]["enabled"]):
            raise
        reason = str(error) if isinstance(error, WorkerFailed) else sentence(error)
        raise Stopped(
            f"{run.config['rod']['arm']} was asked to stop, and ended in step {run.step + 1} "
            f"before it had saved ({reason}): run it again to resume"
        ) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
