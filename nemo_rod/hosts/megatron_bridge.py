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

from nemo_rod.files import interpreting
from nemo_rod.hosts.swap_in.job import Facts, Installed, Job, SelectingJob
from nemo_rod.hosts.swap_in.job_references import HostReferenceJob, refuse_unreadable
from nemo_rod.loggers import show
from nemo_rod.upstream.changes import operation_counters


def install(cfg: Any, **options: Any) -> Installed:
    """Makes the job of `pretrain(cfg, ...)` select its training samples; see `swap_in.install`."""
    job = _SelectingJob(**options)
    installed = _put_into_trainer(cfg, job)
    if getattr(cfg.dataset, "skip_getting_attention_mask_from_dataset", True):
        job.unused = ("attention_mask",)  # created, if at all, for a trainer that ignores it
    return installed


def reference(cfg: Any, forward_step: Callable, **options: Any) -> None:
    """Writes reference losses with the model that the job's own `setup` builds and loads.

    The job's configuration is not modified; see `swap_in.reference` for the arguments.
    """
    from megatron.bridge.data.utils import get_dataset_provider
    from megatron.bridge.training.config import runtime_config_update
    from megatron.bridge.training.initialize import destroy_global_state
    from megatron.bridge.training.setup import setup
    from megatron.bridge.training.state import GlobalState
    from megatron.bridge.training.utils import checkpoint_utils
    from megatron.bridge.training.utils.train_utils import prepare_forward_step_func

    job = HostReferenceJob(**options)
    cfg, state = copy.deepcopy(cfg), GlobalState()
    with _put_into_trainer(cfg, job):
        saved = cfg.checkpoint
        # Bridge loads a Hugging Face folder as pretrained weights alone; 0.3 and 0.4 load none
        is_hf = getattr(checkpoint_utils, "is_hf_checkpoint_dir", lambda folder: False)
        folder = job.model_folder(
            lambda folder: checkpoint_utils.checkpoint_exists(folder) or is_hf(folder),
            saved.pretrained_checkpoint,
            saved.load,
        )
        refuse_unreadable(Path(folder))
        # of a job that had adapters, checkpoints hold nothing else
        files = [
            *Path(folder).glob("run_config.yaml"),
            *Path(folder).glob("iter_*/run_config.yaml"),
        ]
        has_adapters = cfg.peft is not None
        for file in files:
            with interpreting(file):
                has_adapters |= bool((yaml.safe_load(file.read_text()) or {}).get("peft"))
        if has_adapters:
            raise ValueError(
                "The job trains adapters (peft), which references do not load: give a "
                "configuration with peft=None and, as 'checkpoint', whole weights: the base's for "
                "replay, and for adaptation the specialist's with its adapter merged."
            )
        saved.pretrained_checkpoint = folder if is_hf(folder) else None
        job.load_weights_alone(saved, None if is_hf(folder) else folder)
        cfg.dataset.num_workers, cfg.dataset.persistent_workers = 0, False
        try:
            runtime_config_update(cfg)
            refuse(job, cfg)  # precision and overlap are set from here on
            state.cfg = cfg
            ready = setup(state, get_dataset_provider(cfg.dataset))
            job.write(
                model=ready.model,
                groups=ready.pg_collection,
                forward_step_func=prepare_forward_step_func(forward_step, state),
                micro_batch_size=cfg.train.micro_batch_size,
            )
        finally:  # so that the process can train, or score again
            # the process group stays for that: ranks that end it apart do not connect again
            destroy_global_state()


def _put_into_trainer(cfg: Any, job: Job) -> Installed:
    """Puts a job into the trainer, once it is checked."""
    from megatron.bridge.data import loaders
    from megatron.bridge.training import train

    def facts() -> Facts:
        # precision and overlap settings reach the model's configuration only when the job starts
        refuse(job, cfg)
        size, steps = cfg.train.global_batch_size, cfg.train.train_iters
        every = getattr(cfg, "validation", cfg.train).eval_interval  # `train` before 0.4
        saved = cfg.checkpoint
        return Facts(size, cfg.dataset.random_seed, steps, every, saved.save, saved.load)

    def place(call: dict[str, Any]) -> tuple[int, Any, int]:
        job.state = call["global_state"]
        progress = job.state.train_state
        return progress.step, call["pg_collection"], progress.consumed_train_samples

    refuse(job, cfg)
    return job.put_into("megatron_bridge", train, loaders, facts, place)


class _SelectingJob(SelectingJob):
    """A job whose state is the trainer's GlobalState, which is known from its first step on."""

    @contextmanager
    def around_scoring(self) -> Iterator[None]:
        """Excludes the scoring pass from the trainer's operation counters."""
        before = operation_counters(self.state)
        yield
        vars(self.state).update(before)

    def log(self, done: int, metrics: dict[str, float]) -> None:
        """Shows the metrics in TensorBoard, W&B, MLflow and Comet, if the job writes them."""
        show(self.state, done, metrics)


def refuse(job: Job, cfg: Any) -> None:
    """Refuses configurations that selection does not support; see `Job.refuse`."""
    data = cfg.dataset
    blends = job.blends(getattr(data, "blend", None), getattr(data, "blend_per_split", None))
    # from `data_path` only the trainer can derive the blend
    if not blends and getattr(data, "data_path", None) is None:
        raise ValueError(
            f"The job's data is a {type(data).__name__} without a blend of files: expected a "
            "GPTDatasetConfig with 'blend' or 'blend_per_split'."
        )
    sections = {"dist.": cfg.dist, "dataset.": data, "train.": cfg.train}
    job.refuse(cfg.model, cfg.ddp, sections, blends=blends)
