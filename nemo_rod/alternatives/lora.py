"""`[ARM_]lora_<rank>`: adapters of a rank are trained, and the base's weights stay (LoRA).

They are Megatron-Bridge's own, beside the matrices of every layer, and merged into the weights in
the export. What they save is not in an arm's cost, that of plain steps.
"""

from __future__ import annotations

from typing import Any

from nemo_rod.alternatives import read_name
from nemo_rod.config import Config
from nemo_rod.terms import Term

# of attention, MLPs and Mamba; a model has some of them
_MATRICES = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj"]


def arm(config: Config, name: str) -> dict[str, Any] | None:
    """Returns the variant that a name means; None for other names."""
    if (found := read_name(name, "lora")) is None:
        return None
    of, rank = found
    _refuse_rank(rank, config.parallel.tensor)
    return {"of": of, "train": {"terms": {"lora": rank}}}


def _refuse_rank(rank: float, tensor: int) -> None:
    if rank % tensor:
        raise ValueError(
            f"parallel.tensor={tensor} does not divide the rank {rank:g} of lora: choose a "
            "multiple of it."
        )


class LoRA(Term):
    """The adapters, which are added when the model is built.

    Raises:
        ValueError: the processes that share a matrix do not divide the rank.
    """

    def __init__(self, weight: float, provider: Any) -> None:
        from megatron.bridge.peft.lora import LoRA as Adapters

        _refuse_rank(weight, provider.tensor_model_parallel_size)
        rank = int(weight)
        adapters = Adapters(target_modules=_MATRICES, dim=rank, alpha=rank)
        provider.register_pre_wrap_hook(adapters)
