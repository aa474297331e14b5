"""Checks that the selector can be swapped into this Megatron-Bridge and this job."""

from __future__ import annotations

from typing import Any

from nemo_rod.megatron.scoring.forward_only import refuse_unsafe
from nemo_rod.swap_in.job import INSTALLED
from nemo_rod.swap_in.roles import Roles, assign_roles
from nemo_rod.upstream.functions import check


def check_version() -> None:
    """Refuses a Megatron-Bridge whose functions to replace differ from the tested ones.

    Raises:
        ValueError: a function differs, or a selector is already installed.
    """
    from megatron.bridge.training import train

    if hasattr(train.train_step, INSTALLED):
        raise ValueError("A selector is installed already: uninstall() it before the next one.")
    check("scoring", "swap_in/megatron_bridge")


def refuse(cfg: Any, roles: Roles) -> None:
    """Refuses jobs that selection does not support, before anything starts.

    Raises:
        ValueError: the job is not supported; the message names the key, why it is refused and what
            to set.
    """
    refuse_unsafe(cfg.model, cfg.ddp)
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
