"""Which Megatron-Bridge, and which jobs of it, the selector can be swapped into."""

from __future__ import annotations

from typing import Any

from nemo_rod.megatron.scoring.forward_only import refuse_unsafe
from nemo_rod.swap_in.roles import Roles, assign_roles
from nemo_rod.upstream.functions import check

INSTALLED = "_nemo_rod"  # mark of the function that stands in for the trainer's


def check_version() -> None:
    """Refuses a Megatron-Bridge in which the functions to replace are not what they were.

    Raises:
        ValueError: naming the function.
    """
    from megatron.bridge.training import train

    if hasattr(train.train_step, INSTALLED):
        raise ValueError("A selector is installed already: uninstall() it before the next one.")
    check("scoring", "swap_in/megatron_bridge")


def refuse(cfg: Any, roles: Roles) -> None:
    """Refuses jobs that selection does not work in, before anything starts.

    Args:
        cfg: the job's ConfigContainer.
        roles: see `roles.py`.

    Raises:
        ValueError: naming the key, why it is refused and what to set.
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
    """Paths of the `.bin/.idx` files that the job trains on, in the blend's order.

    None where only the trainer finds them out, from `data_path`.
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
