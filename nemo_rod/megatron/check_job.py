"""Builds a model as training would, and says what it would train besides the language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from nemo_rod.files import write_json
from nemo_rod.jobs import CheckJob
from nemo_rod.megatron.models import model_provider
from nemo_rod.megatron.ranks import is_recorder
from nemo_rod.upstream import functions

_BALANCING = ("moe_aux_loss_coeff", "moe_z_loss_coeff")


def check_model(job: CheckJob) -> None:
    """Builds the model in its layout and writes `model.json`.

    Raises:
        ValueError: if further tokens are predicted, or routers are balanced by a loss: both would
            be trained beside the language-modelling loss, by which blocks are chosen.
    """
    functions.check("scoring", "trainer")
    _, provider = model_provider(job.model, job.parallel, precision=job.precision, block_size=64)
    refuse_other_losses(provider, job.model)
    provider.finalize()
    provider.initialize_model_parallel(seed=job.seed)
    chunks = provider.provide_distributed_model(wrap_with_ddp=False)
    parameters = [(n, p) for chunk in chunks for n, p in chunk.named_parameters()]
    names = [name for name, _ in parameters]
    if further := [name for name in names if "mtp." in name]:
        raise ValueError(_predicts_further(job.model, f"builds {further[0]}"))
    everyone: list[Any] = [None] * dist.get_world_size()
    trained = sum(p.numel() for _, p in parameters if p.requires_grad)
    mine = {"parameters": sum(p.numel() for _, p in parameters), "trained": trained}
    dist.all_gather_object(everyone, mine)
    if is_recorder():
        found = {"provider": type(provider).__name__, "ranks": everyone}
        write_json(Path(job.out) / "model.json", found)
    del chunks, parameters
    parallel_state.destroy_model_parallel()


def refuse_other_losses(provider: Any, model: str) -> None:
    """Refuses a provider whose model would be trained by more than the language-modelling loss.

    Raises:
        ValueError: naming the setting.
    """
    if layers := getattr(provider, "mtp_num_layers", None):
        raise ValueError(_predicts_further(model, f"has mtp_num_layers={layers}"))
    if not (getattr(provider, "num_moe_experts", None) or 0) > 1:
        return
    kind = getattr(provider, "moe_router_load_balancing_type", "none")
    kinds = [kind] if isinstance(kind, str) else list(kind)
    by_loss = any("aux_loss" in name for name in kinds)
    for name in _BALANCING:
        value = getattr(provider, name, None)
        values = value if isinstance(value, list | tuple) else [value]
        if any(values) and (by_loss or name == "moe_z_loss_coeff"):
            raise ValueError(
                f"{model} is built with {name}={value} and moe_router_load_balancing_type={kind}: "
                "routers would be trained by a balancing loss beside the language-modelling loss; "
                "expected none."
            )


def _predicts_further(model: str, found: str) -> str:
    return (
        f"{model} {found}: a head for further tokens would be trained beside the language-"
        "modelling loss; expected none."
    )
