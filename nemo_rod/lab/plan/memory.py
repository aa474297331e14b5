"""Memory of one GPU in a layout, and checks that a layout fits a model and a cluster.

These parts are counted, in this order:

- weights: the GPU's share of the model
- gradients: in the dtype in which replicas sum them
- optimizer: fp32 weights if training is in bf16, and Adam's moments; sharded over replicas. Also a
  copy in fp32 of bf16 gradients, unless it is precision-aware; nothing if it is on the host
- activations: inputs of the backward passes of all micro-batches in flight; of layers that are
  recomputed, only their own input, and one whole layer
- logits: those of one micro-batch in training, with their loss and gradient; or their gradient with
  that of the output layer's weight, which exists whole before it is added to the others'
- scoring: the further need of a forward-only pass: one layer, and a slice of the logits
- reserve: CUDA, NCCL, fragmentation
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_rod.config import MAX_LOGITS_BYTES, Config, Parallel, section
from nemo_rod.lab.plan.section import Plan
from nemo_rod.lab.plan.shapes import Block, Shape
from nemo_rod.layout import check_layers, check_nodes, check_parallel

if TYPE_CHECKING:
    from nemo_rod.run.variants import ArmSettings

# Types whose activations were compared with those of models that Megatron-Bridge builds.
MEASURED = (
    "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "exaone4", "exaone_moe", "falcon_h1", "gemma",
    "gemma2", "gemma3_text", "glm4_moe", "glm4_moe_lite", "gpt_oss", "hy_v3", "llama", "minimax_m2",
    "mistral", "nemotron", "nemotron_h", "olmoe", "qwen2", "qwen3", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_moe", "qwen3_next",
)  # fmt: skip
GIB = 2.0**30
BYTES = {"bf16": 2, "fp32": 4}
# In the loss, the logits in bf16 and their exponentials in fp32; in its backward pass the latter,
# and the gradient in bf16. TransformerEngine's loss, with which a GPU scores, needs no more.
LOGIT_BYTES = 6
CAPPED_BYTES = 2  # a tanh of capped logits, in bf16


@dataclass(frozen=True)
class Memory:
    """Memory of the fullest GPU, in bytes."""

    parts: dict[str, float]  # bytes by name, in the order of the module's docstring
    limit: float | None  # memory of the GPU; None if unknown
    stage: int  # pipeline stage of the GPU
    host: float = 0.0  # bytes of its optimizer on its host

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether the total is within the limit."""
        return self.limit is None or self.total <= self.limit

    def __str__(self) -> str:
        listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in self.parts.items())
        return f"{self.total / GIB:.1f} GiB ({listed})"


def memory_per_gpu(shape: Shape, config: Config, settings: ArmSettings | Config) -> Memory:
    """Returns the memory of the fullest GPU of a layout that `check_layout` accepts.

    Args:
        shape: shape of the model.
        config: precision, block size, layout and cluster, which has the memory of a GPU.
        settings: an arm's training and scoring, or the recipe's own.
    """
    pipeline = range(config.parallel.pipeline)
    stages = [_stage(shape, config, settings, stage) for stage in pipeline]
    return max(stages, key=lambda memory: memory.total)


def _stage(shape: Shape, config: Config, settings: ArmSettings | Config, stage: int) -> Memory:
    parallel, cluster, assumed = config.parallel, config.cluster, section(config, Plan)
    train, precision, block_size = settings.train, config.model.precision, config.domain.block_size
    limit, split = cluster.gpu_memory_gib * GIB or None, parallel.distributed_optimizer
    tensor, last = parallel.tensor, stage == parallel.pipeline - 1
    per_stage = len(shape.layers) // parallel.pipeline
    layers = shape.layers[stage * per_stage : (stage + 1) * per_stage]
    blocks = [block for layer in layers for block in layer]

    ends = shape.embedding * (int(stage == 0) + int(last and not (shape.tied and stage == 0)))
    dense = (sum(b.split for b in blocks) + ends) / tensor + sum(b.whole for b in blocks)
    experts_split = parallel.expert if parallel.expert > 1 else tensor
    experts = sum(b.expert * b.num_experts for b in blocks) / experts_split
    weight_bytes, gradient_bytes = BYTES[precision], BYTES[train.grad_reduce]
    gradient_bytes = max(gradient_bytes, weight_bytes)  # those of fp32 weights are in fp32
    state_bytes = {"bf16": 12, "fp32": 8}[precision]  # fp32 weights are the weights
    if gradient_bytes < 4 and not train.precision_aware_optimizer:
        state_bytes += 4
    is_split = bool(cluster.gpu) if split is None else split  # replicas share its state
    copies = parallel.data * parallel.context if is_split else 1
    expert_copies = copies * tensor / experts_split if is_split else 1

    tokens = block_size / parallel.context
    depth, chunks = parallel.pipeline, parallel.virtual_pipeline
    # micro-batches with live activations, in the 1F1B schedules
    micro_batches = train.batch_size // (train.micro_batch_size * parallel.data)
    in_flight = float(min(micro_batches, depth - stage))
    if chunks > 1:
        in_flight = depth * (1.0 + (depth - 1) / (depth * chunks))
    # without fusion; "selective" computes them again. Fused attention keeps nothing of its core, so
    # that "selective" counts as "none" then
    scores = 0 if train.recompute == "selective" else block_size

    def kept_values(block: Block) -> float:
        saved = _saved_values(block, parallel, assumed.expert_imbalance)
        return saved + scores * block.saved_scores / tensor

    by_layer = [sum(map(kept_values, layer)) for layer in layers]
    saved = sum(by_layer) * in_flight  # values per token
    hidden = shape.hidden_size / (tensor if parallel.sequence else 1)
    if train.recompute == "full":
        saved = len(layers) * hidden * in_flight + max(by_layer)
    if last:  # the last norm, and the output layer's input
        saved += 2 * hidden
    activations = weight_bytes * tokens * train.micro_batch_size * saved
    optimizer = state_bytes * (dense / copies + experts / max(1.0, expert_copies))
    rows, vocabulary = tokens * train.micro_batch_size, shape.vocab_size / tensor
    logits = rows * vocabulary * (LOGIT_BYTES + CAPPED_BYTES * int(shape.capped))
    # backward pass of the output layer: gradients of the logits, the weight and the input
    width = shape.hidden_size
    output = weight_bytes * (rows * vocabulary + vocabulary * width + rows * width)
    parts = {
        "weights": weight_bytes * (dense + experts),
        "gradients": gradient_bytes * (dense + experts),
        "optimizer": 0.0 if train.optimizer_offload else optimizer,
        "activations": activations,
        "logits": max(logits, output) if last else 0.0,
        "scoring": 0.0,
        "reserve": assumed.memory_reserve * (limit or 0.0),
    }
    scored = settings.scoring.micro_batch_size * block_size
    layer = max(map(kept_values, blocks))
    scoring = weight_bytes * scored * (layer + 2 * shape.hidden_size)
    if last:
        num_logits = min(scored * shape.vocab_size / tensor, MAX_LOGITS_BYTES / 4)
        scoring += LOGIT_BYTES * num_logits
    # scoring precedes the update and frees its memory
    parts["scoring"] = max(0.0, scoring - parts["activations"] - parts["logits"])
    return Memory(parts, limit, stage, host=optimizer if train.optimizer_offload else 0.0)


def _saved_values(block: Block, parallel: Parallel, imbalance: float) -> float:
    """Returns the values per token of a block that one GPU keeps."""
    tokens = parallel.tensor if parallel.sequence else 1  # GPUs that share the tokens
    if parallel.expert > 1:
        routed = imbalance * (block.saved_dispatched + block.saved_routed) / tokens
    else:  # every GPU has a slice of all experts, and the tokens of all
        routed = block.saved_dispatched + block.saved_routed / parallel.tensor
    return (
        block.saved_hidden / tokens
        + block.saved_tables
        + block.saved_gathered * int(parallel.sequence)
        + block.saved_split / parallel.tensor
        + block.saved_copied / parallel.tensor * int(block.groups > parallel.tensor)
        + routed
    )


def check_layout(shape: Shape, parallel: Parallel, *, block_size: int, gpus_per_node: int) -> None:
    """Refuses a layout that does not divide the model, or the nodes, if any.

    Raises:
        ValueError: it does not divide one, or Megatron cannot split the layers by it; the message
            names the size and the choices.
    """
    counts = {block.num_experts for block in shape.blocks if block.num_experts} or {1}
    sizes = [
        ("pipeline", "num_hidden_layers", len(shape.layers)),
        *(("tensor", *size) for block in shape.blocks for size in block.tensor_divides),
        *(("expert", "num_experts", count) for count in counts),
        ("sequence", "domain.block_size", block_size),
    ]
    check_parallel(parallel, sizes)
    kinds = {block.kind for block in shape.blocks}
    check_layers(parallel, {*kinds, *(["gemma4"] if shape.kind.startswith("gemma4") else [])})
    if not gpus_per_node:
        return
    check_nodes(parallel, gpus_per_node)
    tensor = parallel.tensor
    if tensor > gpus_per_node or gpus_per_node % tensor:
        raise ValueError(
            f"parallel.tensor={tensor} does not stay within a node of {gpus_per_node} GPUs: choose "
            "a divisor."
        )


def check_memory(config: Config, memory: Memory) -> None:
    """Refuses a layout that needs more memory than its GPUs or their hosts have.

    Raises:
        ValueError: with the part of the memory to reduce, and how.
    """
    if not memory.fits:
        assert memory.limit is not None
        largest = max(memory.parts, key=lambda name: memory.parts[name])
        raise ValueError(
            f"The layout does not fit: a GPU of stage {memory.stage} would need {memory}, and has "
            f"{memory.limit / GIB:.0f} GiB. Most are {largest}: {_CURES[largest]}."
        )
    on_node = memory.host * config.cluster.gpus_per_node / GIB
    if on_node > config.cluster.node_memory_gib > 0:
        raise ValueError(
            f"train.optimizer_offload=true puts {on_node:.0f} GiB on a node with cluster."
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
