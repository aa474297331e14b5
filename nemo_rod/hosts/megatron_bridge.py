"""The host Megatron-Bridge: swaps the selector into its `pretrain(cfg, forward_step)`.

    megatron.bridge.training.train.train_step                 its schedule selects first
    megatron.bridge.data.loaders
        .get_train_valid_test_num_samples                     requests m times the training samples
        .build_train_valid_test_datasets                      exposes the job's training data

The names are module globals, the same from 0.3.1 to main. Arguments are bound by name, as their
order differs between versions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from nemo_rod.hosts.logger_runs import show
from nemo_rod.hosts.swap_in.job import (
    Installed,
    Job,
    SelectingJob,
    check_host,
    refuse_job,
    train_blend,
)
from nemo_rod.hosts.swap_in.job_references import HostReferenceJob
from nemo_rod.hosts.swap_in.roles import Roles
from nemo_rod.megatron.scoring.forward_only import refuse_unsafe
from nemo_rod.upstream.changes import operation_counters


def install(cfg: Any, **options: Any) -> Installed:
    """Makes the job of `pretrain(cfg, ...)` select its training samples.

    Args:
        cfg: the job's ConfigContainer.
        options: see `nemo_rod.hosts.swap_in.install`.
    """
    from megatron.bridge.training import train

    check_host("megatron_bridge", train.train_step)
    job = _SelectingJob(**options)
    refuse(cfg, job.roles)
    job.write_to(cfg.checkpoint.save)
    if getattr(cfg.dataset, "skip_getting_attention_mask_from_dataset", True):
        job.unused = ("attention_mask",)  # created, if at all, for a trainer that ignores it
    installed = Installed()
    _watch_data(installed, cfg, job)
    installed.replace(train, "train_step", job.selecting(train.train_step, job.place))
    return installed


def reference(cfg: Any, forward_step: Callable, **options: Any) -> None:
    """Writes reference losses with the model that the job's own `setup` builds and loads.

    Args:
        cfg: the ConfigContainer of the job that will select; it is not modified.
        forward_step: the job's own forward step.
        options: see `nemo_rod.hosts.swap_in.reference`.
    """
    from megatron.bridge.data.utils import get_dataset_provider
    from megatron.bridge.training import train
    from megatron.bridge.training.config import runtime_config_update
    from megatron.bridge.training.initialize import destroy_global_state
    from megatron.bridge.training.setup import setup
    from megatron.bridge.training.state import GlobalState
    from megatron.bridge.training.utils import checkpoint_utils
    from megatron.bridge.training.utils.train_utils import prepare_forward_step_func

    check_host("megatron_bridge", train.train_step)
    job = HostReferenceJob(**options)
    refuse(cfg, job.roles)
    cfg, state = copy.deepcopy(cfg), GlobalState()
    saved = cfg.checkpoint
    # Bridge loads a Hugging Face folder as pretrained weights alone; 0.3 and 0.4 load none
    is_hf = getattr(checkpoint_utils, "is_hf_checkpoint_dir", lambda folder: False)
    folder = job.model_folder(
        lambda folder: checkpoint_utils.checkpoint_exists(folder) or is_hf(folder),
        saved.pretrained_checkpoint,
        saved.load,
    )
    if cfg.peft is not None or _holds_adapters(Path(folder)):
        raise ValueError(
            "The job trains adapters (peft), which references do not load: give a configuration "
            "with peft=None and, as 'checkpoint', whole weights: the base's for replay, and for "
            "adaptation the specialist's with its adapter merged."
        )
    saved.pretrained_checkpoint = folder if is_hf(folder) else None
    job.load_weights_alone(saved, None if is_hf(folder) else folder)
    cfg.dataset.num_workers, cfg.dataset.persistent_workers = 0, False
    try:
        with Installed() as installed:
            _watch_data(installed, cfg, job)
            runtime_config_update(cfg)
            refuse(cfg, job.roles)  # precision and overlap are set from here on
            state.cfg = cfg
            ready = setup(state, get_dataset_provider(cfg.dataset))
        job.write(
            model=ready.model,
            groups=ready.pg_collection,
            forward_step_func=prepare_forward_step_func(forward_step, state),
            micro_batch_size=cfg.train.micro_batch_size,
        )
    finally:  # so that the process can train, or score again
        # the process group stays for that: ranks that end it apart do not connect a second time
        destroy_global_state()


def _holds_adapters(folder: Path) -> bool:
    """Returns whether the job that saved checkpoints had adapters, which are then all they hold."""
    files = [*folder.glob("run_config.yaml"), *folder.glob("iter_*/run_config.yaml")]
    values = [yaml.safe_load(file.read_text(encoding="utf-8")) for file in files]
    return any(isinstance(value, dict) and value.get("peft") for value in values)


def _watch_data(installed: Installed, cfg: Any, job: Job) -> None:
    from megatron.bridge.data import loaders

    def facts() -> dict[str, Any]:
        # precision and overlap settings reach the model's configuration only when the job starts
        refuse(cfg, job.roles)
        return {
            "batch_size": cfg.train.global_batch_size,
            "seed": cfg.dataset.random_seed,
            "steps": cfg.train.train_iters,
            "every": getattr(cfg, "validation", cfg.train).eval_interval,  # `train` before 0.4
        }

    job.watch_data(installed, loaders, facts)


class _SelectingJob(SelectingJob):
    """A job whose trainer has a GlobalState, which is known from its first step on."""

    state: Any = None

    def place(self, call: dict[str, Any]) -> tuple[int, Any, int]:
        """Returns step, process groups and consumed samples of a call of `train_step`."""
        self.state = call["global_state"]
        progress = self.state.train_state
        return progress.step, call["pg_collection"], progress.consumed_train_samples

    @contextmanager
    def around_scoring(self) -> Iterator[None]:
        """Excludes the scoring pass from the trainer's operation counters."""
        before = operation_counters(self.state)
        yield
        vars(self.state).update(before)

    def log(self, done: int, metrics: dict[str, float]) -> None:
        """Shows the metrics in TensorBoard, W&B, MLflow and Comet, if the job writes them."""
        show(self.state, done, metrics)


def refuse(cfg: Any, roles: Roles) -> None:
    """Refuses jobs that selection does not support, before anything starts.

    Args:
        cfg: the job's ConfigContainer.
        roles: see `nemo_rod.hosts.swap_in.install`.

    Raises:
        ValueError: the job is not supported; the message names the key, the reason and the cure.
    """
    refuse_unsafe(cfg.model, cfg.ddp)
    data = cfg.dataset
    blend = train_blend(getattr(data, "blend", None), getattr(data, "blend_per_split", None))
    # from `data_path` only the trainer can derive the blend
    if blend is None and getattr(data, "data_path", None) is None:
        raise ValueError(
            f"The job's data is a {type(data).__name__} without a blend of files: expected a "
            "GPTDatasetConfig with 'blend' or 'blend_per_split'."
        )
    packed = getattr(data, "packed_sequence_specs", None) is not None
    refuse_job(
        {"dist.": cfg.dist, "dataset.": data, "train.": cfg.train},
        (packed, "dataset.packed_sequence_specs", "packs documents into a row",
         "set a GPTDatasetConfig"),
        blend=blend,
        roles=roles,
    )  # fmt: skip
