"""Refuses what needs more memory than there is, on a GPU or on its host."""

from __future__ import annotations

from nemo_rod.config import Config
from nemo_rod.lab.plan.memory import GIB, Memory


def refuse_what_does_not_fit(memory: Memory) -> None:
    """Refuses a layout that needs more memory than its GPUs have, by a ValueError."""
    if memory.fits:
        return
    assert memory.limit is not None
    largest = max(memory.parts, key=lambda name: memory.parts[name])
    raise ValueError(
        f"The layout does not fit: a GPU of stage {memory.stage} would need {memory}, and has "
        f"{memory.limit / GIB:.0f} GiB. Most are {largest}: {_CURES[largest]}."
    )


def refuse_full_host(config: Config, memory: Memory) -> None:
    """Refuses an optimizer on hosts that do not have the memory for it, by a ValueError."""
    needed = memory.host * config.cluster.gpus_per_node / GIB
    if needed > config.cluster.node_memory_gib > 0:
        raise ValueError(
            f"train.optimizer_offload=true puts {needed:.0f} GiB on a node with cluster."
            f"node_memory_gib={config.cluster.node_memory_gib:g}: raise parallel.data, whose "
            "replicas share it."
        )


_CURES = {
    "weights": "raise parallel.tensor, parallel.pipeline or, with experts, parallel.expert",
    "gradients": "set train.grad_reduce=bf16, or raise parallel.tensor, parallel.pipeline or, with "
    "experts, parallel.expert",
    "optimizer": "raise parallel.data, whose replicas share its state, or set "
    "train.optimizer_offload=true",
    "activations": "set train.recompute=full, lower train.micro_batch_size, or raise "
    "parallel.tensor with sequence=true",
    "logits": "lower train.micro_batch_size, or raise parallel.tensor",
    "scoring": "lower scoring.micro_batch_size",
    "reserve": "lower plan.memory_reserve",
}
