"""Checks that the selector can be swapped into this NeMo and this job."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Any

from nemo_rod.megatron.scoring.forward_only import refuse_unsafe
from nemo_rod.swap_in.roles import Roles, assign_roles
from nemo_rod.upstream.functions import check

SUPPORTED = (2, 7)


def check_version() -> None:
    """Refuses a NeMo without an LLM collection of the tested form.

    Raises:
        ValueError: NeMo is missing or not supported; the message says what was found and what to
            use.
    """
    try:
        version = importlib.metadata.version("nemo-toolkit")
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            "NeMo is not installed: install nemo-toolkit 2.7 for the host 'nemo2'."
        ) from None
    refuse_version(version)
    if importlib.util.find_spec("nemo.collections.llm") is None:
        raise ValueError(
            f"nemo-toolkit {version} has no nemo.collections.llm here: install all of 2.7."
        )
    check("scoring", "swap_in/nemo2")


def refuse_version(version: str) -> None:
    """Refuses versions of nemo-toolkit that the selector does not support.

    Raises:
        ValueError: the version is not supported; the message says what to use.
    """
    number = tuple(int(part) for part in version.split(".")[:2])
    if number >= (3, 0):
        raise ValueError(
            f"nemo-toolkit {version} has no LLM collection (it ended with 2.7): move the job to "
            "Megatron-Bridge and use the host 'megatron_bridge'."
        )
    if number != SUPPORTED:
        raise ValueError(
            f"nemo-toolkit {version} is not supported: it pairs with a megatron-core that lacks "
            "what scoring asks of it; install 2.7, which pairs with 0.15."
        )


def refuse(model: Any, data: Any, trainer: Any, roles: Roles) -> None:
    """Refuses jobs that selection does not support, before anything starts.

    Raises:
        ValueError: the job is not supported; the message says what was found, why it is refused
            and what to set.
    """
    from nemo.collections.llm.gpt.data.pre_training import PreTrainingDataModule
    from nemo.lightning.pytorch.strategies import MegatronStrategy

    if any(hasattr(callback, "drawn_before") for callback in trainer.callbacks):
        raise ValueError("A selector is installed already: uninstall() it before the next one.")
    strategy = trainer.strategy
    if not isinstance(strategy, MegatronStrategy):
        raise ValueError(
            f"The trainer's strategy is {type(strategy).__name__}: expected nl.MegatronStrategy."
        )
    if not isinstance(data, PreTrainingDataModule):
        raise ValueError(
            f"The job's data is {type(data).__name__}: expected llm.PreTrainingDataModule, which "
            "reads .bin and .idx files."
        )
    refuse_unsafe(model.config, strategy.ddp_config)
    sampler = strategy.data_sampler or data.data_sampler
    for found, key, why, instead in (
        (strategy._fsdp is not None, "MegatronStrategy(fsdp=...)",
         "is not supported yet", "fsdp=None"),
        (strategy.context_parallel_size > 1, "context_parallel_size",
         "splits the samples it would score", "context_parallel_size=1"),
        (sampler.rampup_batch_size is not None, "rampup_batch_size",
         "changes the size of the pools", "rampup_batch_size=None"),
        (sampler.dataloader_type == "batch", "dataloader_type='batch'",
         "gives samples of many lengths", "dataloader_type='single'"),
        (isinstance(trainer.limit_train_batches, int), "limit_train_batches",
         "counts the candidates of an epoch", "limit_train_batches=1.0"),
        (trainer.max_steps < 1, f"max_steps={trainer.max_steps}",
         "must know how many samples the job draws", "max_steps"),
    ):  # fmt: skip
        if found:
            raise ValueError(f"Selection does not work with {key}: it {why}; set {instead}.")
    if data.seq_length % 8:
        raise ValueError(
            f"seq_length={data.seq_length}: expected a multiple of 8, for the 8 partial sums of "
            "each sample's loss."
        )
    blend = data.build_kwargs.get("blend") or data.build_kwargs["blend_per_split"][0]
    assign_roles(blend[0], roles)
