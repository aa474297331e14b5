"""RoD as one of NeMo-RL's algorithms: `setup`, `rod_train`, `export`.

The driver holds neither tokens nor the model. It counts steps, writes the curriculum and the
metrics, logs, validates and saves.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rod.config import Scoring, Selection
from nemo_rod.corpus.store import BlockStore
from nemo_rod.corpus.tokenizer import load_tokenizer
from nemo_rod.files import digest, digest_of_files, write_json
from nemo_rod.hosts.nemo_rl import compat, conversions
from nemo_rod.hosts.nemo_rl.learners import InWorkers, make_learner
from nemo_rod.hosts.nemo_rl.remote import WorkerFailed, call_all, sentence
from nemo_rod.hosts.nemo_rl.settings import short_precision
from nemo_rod.hosts.nemo_rl.shown import end_runs, keep_runs, log, model_speed, use_loggers
from nemo_rod.loggers import Prepared
from nemo_rod.selection import CurriculumHeader, ReferenceLosses, References
from nemo_rod.selection.arms import Arm, curriculum_header, make_arm
from nemo_rod.selection.curriculum.journal import Journal
from nemo_rod.selection.held_out import START_FILE
from nemo_rod.signals import STOP_SIGNALS, Stopped
from nemo_rod.trust import refuse_own_code

# Keys of the optimizer that, like the layout, may change between two attempts.
_OF_THE_MACHINE = {
    *("use_distributed_optimizer", "use_precision_aware_optimizer", "optimizer_cpu_offload"),
    *("optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d"),
}


@dataclass
class Run:
    """The state of a run, which `setup` creates and `rod_train` uses."""

    config: dict[str, Any]  # all sections of the configuration, as plain values
    policy: Any  # NeMo-RL's, like the next one, the logger and the checkpointer
    cluster: Any
    arm: Arm
    learner: InWorkers
    header: CurriculumHeader
    logger: Any
    checkpointer: Any
    step: int  # the next one
    prepared: Prepared  # what the loggers' runs have changed in this process

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
        WorkerFailed: a worker refuses; the message says why.
    """
    from nemo_rl.utils.checkpoint import CheckpointManager
    from nemo_rl.utils.logger import Logger

    rod, policy_cfg = config["rod"], config["policy"]
    store = open_store(config)
    arm = build_arm(config, store)
    references = references_of(config, store) if arm.policy().needs_scores else None
    header = curriculum_header(arm, store, references, config=_digest(config, arm))

    checkpointer = CheckpointManager(config["checkpointing"])
    latest = checkpointer.get_latest_checkpoint_path()
    info = checkpointer.load_training_info(latest) or {"step": 0}
    policy_cfg["megatron_cfg"]["train_iters"] = rod["steps"]
    policy, cluster = make_policy(config, resume_paths=checkpointer.get_resume_paths(latest))
    prepared = Prepared()
    try:
        learner = make_learner(policy, arm, config)
        prepared = use_loggers(config["logger"], Path(rod["out"]))
        logger = Logger(config["logger"])
        logger.log_hyperparams(config)
        keep_runs(logger, Path(rod["out"]), step=info["step"])
        return Run(
            config=config,
            policy=policy,
            cluster=cluster,
            arm=arm,
            learner=learner,
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


def open_store(config: dict[str, Any]) -> BlockStore:
    """Opens the block store and checks that it matches the configured model.

    Raises:
        ValueError: the block size or the tokenizer differs, or NeMo-RL would run code that lies
            beside the checkpoint and is not trusted.
    """
    policy, store = config["policy"], BlockStore(config["rod"]["blocks"])
    if policy["max_total_sequence_length"] != store.block_size:
        raise ValueError(
            f"policy.max_total_sequence_length is {policy['max_total_sequence_length']}, but the "
            f"blocks in {config['rod']['blocks']} have {store.block_size} tokens: set it to that."
        )
    rod, trusted = config["rod"], config["rod"]["trust_remote_code"]
    if not trusted:  # NeMo-RL itself asks nobody
        for name in (policy["model_name"], policy["tokenizer"]["name"]):
            refuse_own_code(name, "NeMo-RL", key="rod.trust_remote_code")
    name = rod["tokenizer"] or policy["tokenizer"]["name"]
    store.check_tokenizer(load_tokenizer(name, eod=rod["eod"], trust_remote_code=trusted))
    return store


def references_of(config: dict[str, Any], store: BlockStore) -> ReferenceLosses:
    """Opens the references; refuses those of another store, or another precision."""
    precision = short_precision(config["policy"])
    return References.open(config["rod"]["references"], store, precision=precision)


def build_arm(config: dict[str, Any], store: BlockStore) -> Arm:
    """Returns the configured arm, with its pools and policy.

    Raises:
        ValueError: there is no such arm.
    """
    rod = config["rod"]
    if rod["variant"] is not None:
        return Arm(**rod["variant"])
    return make_arm(
        rod["arm"],
        num_adaptation=store.num_adaptation,
        num_replay=store.num_replay,
        batch_size=config["policy"]["train_global_batch_size"],
        seed=rod["seed"],
        **Selection(**rod["selection"]).of_arm(Scoring(**rod["scoring"])),
    )


def make_policy(
    config: dict[str, Any],
    *,
    resume_paths: tuple[Path | None, Path | None] = (None, None),
    train: bool = True,
) -> tuple[Any, Any]:
    """Starts the policy workers, to train or only to score; returns NeMo-RL's policy and cluster.

    They load the weights and the optimizer state of `resume_paths`, if any.
    """
    import ray
    from nemo_rl.algorithms.utils import get_tokenizer, set_seed
    from nemo_rl.models.policy.lm_policy import Policy

    rod, policy_cfg = config["rod"], config["policy"]
    set_seed(rod["seed"])
    use_gpus = ray.cluster_resources().get("GPU", 0) > 0
    cluster = compat.make_cluster(config["cluster"], use_gpus=use_gpus)
    compat.register_worker(rod["worker"])
    policy = Policy(
        cluster=cluster,
        config=policy_cfg,
        tokenizer=get_tokenizer(policy_cfg["tokenizer"]),
        weights_path=resume_paths[0],
        optimizer_path=resume_paths[1],
        init_optimizer=train,
        init_reference_model=False,
        worker_extension_cls_fqn=rod["worker"],
    )
    return policy, cluster


def rod_train(run: Run) -> None:
    """Trains to the end, resuming after the last completed step.

    Raises:
        WorkerFailed: a worker failed; raised at once, with the cause. The last checkpoint remains.
        Stopped: the run was asked to stop or its time is over; it has saved a checkpoint, or, if
            its workers ended first, has the last one.
    """
    from nemo_rl.utils.timer import TimeoutChecker, Timer

    rod, saving = run.config["rod"], run.config["checkpointing"]
    out = Path(rod["out"])
    out.mkdir(parents=True, exist_ok=True)
    journal = Journal(out, run.header, step=run.step)
    timer, every = Timer(), rod["validation"]["every"]
    timeout = TimeoutChecker(timeout=saving["checkpoint_must_save_by"], fit_last_save_time=True)
    timeout.start_iterations()
    run.policy.prepare_for_training()
    if every and run.step == 0:
        losses = run.learner.validate()
        write_json(out / START_FILE, losses)
        log(run.logger, losses, step=0)
    with _asked_to_stop() as asked, _stopped_before_it_failed(run, asked):
        while run.step < rod["steps"]:
            with timer.time("total"):
                choice, metrics = run.learner.step(run.step)
            metrics |= {f"timing/train/{part}": time for part, time in choice.seconds.items()}
            metrics["timing/train/total"] = timer.reduce("total", "sum")
            timer.reset()
            done = run.step + 1
            metrics |= model_speed(run.learner, choice, metrics, run.arm, run.cluster.world_size())
            validated = run.learner.validate() if every and done % every == 0 else {}
            row = journal.append(run.step, choice, metrics | validated)
            log(run.logger, row, step=done)
            run.step = done
            timeout.mark_iteration()
            stop = asked.is_set() or timeout.check_save()
            due = stop or done == rod["steps"] or done % saving["save_period"] == 0
            if saving["enabled"] and due:
                save(run, row)
            if stop and done < rod["steps"]:
                raise Stopped(f"{rod['arm']} stopped after step {done}: run it again to resume")


def save(run: Run, metrics: dict[str, Any]) -> None:
    """Writes a checkpoint of the state after `run.step` steps."""
    saving = run.config["checkpointing"]
    info: dict[str, Any] = {"step": run.step}
    kept = _kept_metric(saving["metric_name"] or "", metrics)
    if kept is not None:  # NeMo-RL ranks checkpoints by this metric
        info[saving["metric_name"]] = kept
    path = run.checkpointer.init_tmp_checkpoint(run.step, info, compat.run_config(run.config))
    run.policy.save_checkpoint(
        weights_path=os.path.join(path, "policy", "weights"),
        optimizer_path=os.path.join(path, "policy", "optimizer")
        if run.checkpointer.save_optimizer
        else None,
        tokenizer_path=os.path.join(path, "policy", "tokenizer"),
        checkpointing_cfg=saving,
    )
    compat.finish_checkpoint(run.checkpointer, run.policy, path)


def export(run: Run) -> None:
    """Writes the trained weights as a Hugging Face checkpoint to `<out>/hf`."""
    rod = run.config["rod"]
    folder = str(Path(rod["out"]) / "hf")
    call_all(run.policy, "rod_export", stall_seconds=rod["stall_seconds"], folder=folder)


def _kept_metric(name: str, metrics: dict[str, Any]) -> float | None:
    """Looks up a metric by NeMo-RL's name: `train:loss` or `val:<role>/<source>/loss`."""
    kind, _, rest = name.partition(":")
    return metrics.get({"train": "train/", "val": "validation/"}.get(kind, "") + rest)


def _digest(config: dict[str, Any], arm: Arm) -> str:
    """Digest of what determines the choices, except store, references and layout.

    Like the layout, the paths of files and what saves memory may change between two attempts. A
    recipe's job has such a digest; its stage compares the model, and what `nemo_rl` sets.
    """
    policy, rod, recorded = config["policy"], config["rod"], arm.recorded
    if rod["config_digest"] is not None:
        return str(rod["config_digest"])
    megatron = policy["megatron_cfg"]
    optimizer = megatron.get("optimizer") or {}
    decides = {
        "model": conversions.identity(policy["model_name"]),
        **{key: policy[key] for key in ("precision", "train_global_batch_size")},
        "arm": arm.as_digested()
        | ({"recorded": digest_of_files([Path(recorded)])} if recorded else {}),
        "steps": rod["steps"],
        "on_nonfinite": rod["selection"]["on_nonfinite"],
        "optimizer": {k: v for k, v in optimizer.items() if k not in _OF_THE_MACHINE},
        "scheduler": megatron.get("scheduler"),
    }
    return digest(json.dumps(decides, sort_keys=True, default=str).encode())


@contextmanager
def _asked_to_stop() -> Iterator[threading.Event]:
    """Records a stop signal, so that the step can first be completed and saved."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.signal(number, lambda *_: asked.set()) for number in STOP_SIGNALS}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _stopped_before_it_failed(run: Run, asked: threading.Event) -> Iterator[None]:
    """Takes the failure of a run that was asked to stop for its stop.

    Whoever ends a job asks the driver to stop, and may end Ray before the driver has saved. A run
    with checkpoints resumes from its last one; without any, the failure stays a failure.
    """
    from ray.exceptions import RayError

    try:
        yield
    except (WorkerFailed, RayError) as error:
        if not (asked.is_set() and run.config["checkpointing"]["enabled"]):
            raise
        why = str(error) if isinstance(error, WorkerFailed) else sentence(error)
        raise Stopped(
            f"{run.config['rod']['arm']} was asked to stop, and ended in step {run.step + 1} "
            f"before it had saved ({why}): run it again to resume"
        ) from error
