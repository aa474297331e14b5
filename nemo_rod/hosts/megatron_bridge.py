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

from nemo_rod.hosts.swap_in.job import Installed, Job, SelectingJob, check_host, refuse_job
from nemo_rod.hosts.swap_in.job_references import HostReferenceJob
from nemo_rod.hosts.swap_in.roles import Roles
from nemo_rod.loggers import show
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
    if job.out is None and cfg.checkpoint.save is not None:
        job.out = Path(cfg.checkpoint.save) / "rod"
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
    if cfg.peft is not None:
        raise ValueError(
            "The job trains adapters (peft), which references do not load: give a configuration "
            "with peft=None and, as 'checkpoint', whole weights: the base's for replay, and for "
            "adaptation the specialist's with its adapter merged."
        )
    cfg, state = copy.deepcopy(cfg), GlobalState()
    saved = cfg.checkpoint
    # Bridge loads a Hugging Face folder as pretrained weights alone; 0.3 and 0.4 load none
    is_hf = getattr(checkpoint_utils, "is_hf_checkpoint_dir", lambda folder: False)
    folder = job.model_folder(
        lambda folder: checkpoint_utils.checkpoint_exists(folder) or is_hf(folder),
        saved.pretrained_checkpoint,
        saved.load,
    )
    saved.load, saved.pretrained_checkpoint = (None, folder) if is_hf(folder) else (folder, None)
    saved.finetune, saved.save = True, None  # weights only; starts at step 0
    saved.ckpt_step = None  # of the job's own checkpoints, from which it resumes
    cfg.dataset.num_workers, cfg.dataset.persistent_workers = 0, False
    try:
        with Installed() as installed:
            _watch_data(installed, cfg, job)
            runtime_config_update(cfg)
            refuse(cfg, job.roles)  # precision and overlap are set from here on
            state.cfg = cfg
            ready = setup(state, get_dataset_provider(cfg.dataset))
        job.write(
            ready.model,
            ready.pg_collection,
            prepare_forward_step_func(forward_step, state),
            micro_batch_size=cfg.train.micro_batch_size,
        )
    finally:  # so that the process can train, or score again
        # the process group stays for that: ranks that end it apart do not connect a second time
        destroy_global_state()


def _watch_data(installed: Installed, cfg: Any, job: Job) -> None:
    from megatron.bridge.data import loaders

    def built(train: Any, valid: Any) -> None:
        # precision and overlap settings reach the model's configuration only when the job starts
        refuse(cfg, job.roles)
        job.built(
            train,
            valid,
            num_drawn=loaders.get_train_valid_test_num_samples(cfg)[0],
            batch_size=cfg.train.global_batch_size,
            seed=cfg.dataset.random_seed,
            steps=cfg.train.train_iters,
            every=getattr(cfg, "validation", cfg.train).eval_interval,  # in `train` before 0.4
        )

    job.watch_data(installed, loaders, built, lambda: cfg.train.global_batch_size)


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
    data, train = cfg.dataset, cfg.train
    packed = getattr(data, "packed_sequence_specs", None) is not None
    blend, per_split = getattr(data, "blend", None), getattr(data, "blend_per_split", None)
    if blend is None and per_split is not None:
        blend = per_split[0]
    # from `data_path` only the trainer can derive the blend
    if blend is None and getattr(data, "data_path", None) is None:
        raise ValueError(
            f"The job's data is a {type(data).__name__} without a blend of files: expected a "
            "GPTDatasetConfig with 'blend' or 'blend_per_split'."
        )
    features = (
        (getattr(cfg.dist, "use_megatron_fsdp", False), "dist.use_megatron_fsdp",
         "is not supported yet", "set dist.use_megatron_fsdp=False"),
        (getattr(cfg.dist, "use_torch_fsdp2", False), "dist.use_torch_fsdp2",
         "is not supported yet", "set dist.use_torch_fsdp2=False"),
        (packed or data.dataloader_type == "batch", "packed or variable-length batches",
         "needs one sample per row", "set a GPTDatasetConfig with dataloader_type='single'"),
        (getattr(data, "inter_document_masking", False), "dataset.inter_document_masking",
         "packs documents into a row", "set dataset.inter_document_masking=False"),
        (data.dataloader_type == "external", "dataset.dataloader_type='external'",
         "resumes at an offset that only the job knows", "set dataset.dataloader_type='single'"),
        (data.dataloader_type == "cyclic", "dataset.dataloader_type='cyclic'",
         "reads in an order of its own", "set dataset.dataloader_type='single'"),
        (hasattr(data, "fim_data"), "fill-in-the-middle data",
         "needs references of samples that are drawn anew", "set a GPTDatasetConfig"),
        (getattr(train, "rampup_batch_size", None) is not None, "train.rampup_batch_size",
         "changes the size of the pools", "set train.rampup_batch_size=None"),
        (getattr(train, "decrease_batch_size_if_needed", False),
         "train.decrease_batch_size_if_needed", "changes the size of the pools",
         "set train.decrease_batch_size_if_needed=False"),
        (bool(getattr(train, "iterations_to_skip", None)), "train.iterations_to_skip",
         "skips a different number of samples from a step's draw",
         "set train.iterations_to_skip=[]"),
    )  # fmt: skip
    refuse_job(
        features,
        sample_length=data.seq_length,
        length_key="dataset.seq_length=",
        prefixes=None if blend is None else blend[0],
        roles=roles,
    )
