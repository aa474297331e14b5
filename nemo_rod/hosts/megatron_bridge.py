"""The host Megatron-Bridge: swaps the selector into its `pretrain(cfg, forward_step)`.

    megatron.bridge.training.train.train_step                 its schedule selects first
    megatron.bridge.data.loaders
        .get_train_valid_test_num_samples                     requests m times the training samples
        .build_train_valid_test_datasets                      exposes the job's training data
        .build_pretraining_data_loader                        resumes at m times the offset

The names are module globals, the same from 0.3.1 to main. Arguments are bound by name, as their
order differs between versions.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nemo_rod.hosts.swap_in.job import INSTALLED, Job, SelectingJob
from nemo_rod.hosts.swap_in.job_references import HostReferenceJob
from nemo_rod.hosts.swap_in.patches import Installed
from nemo_rod.hosts.swap_in.roles import Roles, assign_roles
from nemo_rod.loggers import show
from nemo_rod.megatron.scoring.forward_only import refuse_unsafe
from nemo_rod.upstream.changes import operation_counters
from nemo_rod.upstream.functions import check


def install(cfg: Any, **options: Any) -> Installed:
    """Makes the job that `pretrain(cfg, ...)` runs choose what it trains on.

    Args:
        cfg: the job's ConfigContainer.
        options: see `nemo_rod.hosts.swap_in.install`.
    """
    from megatron.bridge.training import train

    check_version()
    job = _SelectingJob(**options)
    refuse(cfg, job.roles)
    if job.out is None and cfg.checkpoint.save is not None:
        job.out = Path(cfg.checkpoint.save) / "rod"
    if getattr(cfg.dataset, "skip_getting_attention_mask_from_dataset", True):
        job.unused = ("attention_mask",)  # created, if at all, for a trainer that ignores it
    installed = Installed()
    _show_data(installed, cfg, job)
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
    from megatron.bridge.training.config import runtime_config_update
    from megatron.bridge.training.initialize import destroy_global_state
    from megatron.bridge.training.setup import setup
    from megatron.bridge.training.state import GlobalState
    from megatron.bridge.training.utils.train_utils import prepare_forward_step_func

    check_version()
    job = HostReferenceJob(**options)
    refuse(cfg, job.roles, between_steps=True)
    cfg, state = _for_scoring(cfg, job), GlobalState()
    began_here = not dist.is_initialized()
    try:
        with Installed() as installed:
            _show_data(installed, cfg, job)
            runtime_config_update(cfg)
            refuse(cfg, job.roles, between_steps=True)  # precision and overlap are set from here on
            state.cfg = cfg
            ready = setup(state, get_dataset_provider(cfg.dataset))
        job.write(
            ready.model,
            ready.pg_collection,
            prepare_forward_step_func(forward_step, state),
            micro_batch_size=cfg.train.micro_batch_size,
        )
    finally:  # so that the process can train, or score again
        destroy_global_state()
        if began_here and dist.is_initialized():
            dist.destroy_process_group()


def _for_scoring(cfg: Any, job: HostReferenceJob) -> Any:
    """Returns a copy of the job's configuration that only loads weights and saves nothing."""
    from megatron.bridge.training.utils.checkpoint_utils import checkpoint_exists

    cfg = copy.deepcopy(cfg)
    saved = cfg.checkpoint
    folder = job.model_folder(checkpoint_exists, saved.pretrained_checkpoint, saved.load)
    saved.load, saved.pretrained_checkpoint = folder, None
    saved.finetune, saved.save = True, None  # weights only; starts at step 0
    cfg.dataset.num_workers, cfg.dataset.persistent_workers = 0, False
    return cfg


def _show_data(installed: Installed, cfg: Any, job: Job) -> None:
    """Gives the job m times the training samples, and passes the dataset on.

    With virtual pipeline stages the trainer builds the same data once per stage.
    """
    from megatron.bridge.data import loaders

    count = loaders.get_train_valid_test_num_samples
    build = loaders.build_train_valid_test_datasets
    load = loaders.build_pretraining_data_loader
    load_signature = inspect.signature(load)

    def more_samples(cfg: Any) -> tuple[int, int, int]:
        train, valid, test = count(cfg)
        return job.candidates(train), valid, test

    def shown(*args: Any, **kwargs: Any) -> tuple:
        datasets = build(*args, **kwargs)
        # precision and overlap settings reach the model's configuration only when the job starts
        refuse(cfg, job.roles)
        job.built(
            datasets[0],
            num_drawn=more_samples(cfg)[0],
            dataloader_type=cfg.dataset.dataloader_type,
            batch_size=cfg.train.global_batch_size,
            seed=cfg.dataset.random_seed,
        )
        return datasets

    def resumed(*args: Any, **kwargs: Any) -> Any:
        call = load_signature.bind(*args, **kwargs).arguments
        call["consumed_samples"] = job.resumes_at(call["dataset"], call["consumed_samples"])
        return load(**call)

    installed.replace(loaders, "get_train_valid_test_num_samples", more_samples)
    installed.replace(loaders, "build_train_valid_test_datasets", shown)
    installed.replace(loaders, "build_pretraining_data_loader", resumed)


class _SelectingJob(SelectingJob):
    """A job whose trainer has a GlobalState, which is known from its first step on."""

    state: Any = None

    def place(self, call: dict[str, Any]) -> tuple[int, Any]:
        """Returns the number of the step, and the process groups, of a call of `train_step`."""
        self.state = call["global_state"]
        return self.state.train_state.step, call["pg_collection"]

    @contextmanager
    def around_scoring(self) -> Iterator[None]:
        """Excludes the scoring pass from the trainer's operation counters."""
        before = operation_counters(self.state)
        yield
        vars(self.state).update(before)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Shows the metrics in TensorBoard, W&B and MLflow, if the job writes them."""
        show(self.state, step + 1, metrics)  # as the trainer counts what it logs


def check_version() -> None:
    """Refuses a Megatron-Bridge whose functions to replace differ from the tested ones.

    Raises:
        ValueError: a function differs, or a selector is already installed.
    """
    from megatron.bridge.training import train

    if hasattr(train.train_step, INSTALLED):
        raise ValueError("A selector is installed already: uninstall() it before the next one.")
    check("scoring", "swap_in/megatron_bridge")


def refuse(cfg: Any, roles: Roles, *, between_steps: bool = False) -> None:
    """Refuses jobs that selection does not support, before anything starts.

    Args:
        cfg: the job's ConfigContainer.
        roles: see `nemo_rod.hosts.swap_in.install`.
        between_steps: whether samples are scored outside training steps; see `refuse_unsafe`.

    Raises:
        ValueError: the job is not supported; the message names the key, why it is refused and what
            to set.
    """
    refuse_unsafe(cfg.model, cfg.ddp, between_steps=between_steps)
    data, train = cfg.dataset, cfg.train
    packed = getattr(data, "packed_sequence_specs", None) is not None
    for found, key, why, instead in (
        (getattr(cfg.dist, "use_megatron_fsdp", False), "dist.use_megatron_fsdp",
         "is not supported yet", "dist.use_megatron_fsdp=False"),
        (getattr(cfg.dist, "use_torch_fsdp2", False), "dist.use_torch_fsdp2",
         "is not supported yet", "dist.use_torch_fsdp2=False"),
        (packed or data.dataloader_type == "batch", "packed batches or such of variable length",
         "needs one sample per row", "a GPTDatasetConfig with dataloader_type='single'"),
        (getattr(data, "inter_document_masking", False), "dataset.inter_document_masking",
         "packs documents into a row", "dataset.inter_document_masking=False"),
        (data.dataloader_type == "external", "dataset.dataloader_type='external'",
         "leaves it to the job where it resumes", "dataset.dataloader_type='single'"),
        (hasattr(data, "fim_data"), "fill-in-the-middle data",
         "would need references of samples that are made anew", "a GPTDatasetConfig"),
        (getattr(train, "rampup_batch_size", None) is not None, "train.rampup_batch_size",
         "changes the size of the pools", "train.rampup_batch_size=None"),
        (getattr(train, "decrease_batch_size_if_needed", False),
         "train.decrease_batch_size_if_needed", "changes the size of the pools",
         "train.decrease_batch_size_if_needed=False"),
        (bool(getattr(train, "iterations_to_skip", None)), "train.iterations_to_skip",
         "skips another number of samples than a step draws", "train.iterations_to_skip=[]"),
    ):  # fmt: skip
        if found:
            raise ValueError(f"Selection does not work with {key}: it {why}; set {instead}.")
    if (prefixes := _prefixes(data)) is not None:
        assign_roles(prefixes, roles)
    if data.seq_length % 8:
        raise ValueError(
            f"dataset.seq_length={data.seq_length}: expected a multiple of 8, for the 8 partial "
            "sums of each sample's loss."
        )


def _prefixes(data: Any) -> list[str] | None:
    """Returns the paths of the job's `.bin/.idx` training files, in the blend's order.

    None if only the trainer can derive them, from `data_path`.
    """
    blend = getattr(data, "blend", None)
    per_split = getattr(data, "blend_per_split", None)
    if blend is None and per_split is not None:
        blend = per_split[0]
    if blend is None and getattr(data, "data_path", None) is not None:
        return None
    if blend is None:
        raise ValueError(
            f"The job's data is a {type(data).__name__} without a blend of files: expected a "
            "GPTDatasetConfig with 'blend' or 'blend_per_split'."
        )
    return list(blend[0])
