"""A model's shape: its blocks, their parameters, and the FLOPs of a forward pass.

Each of `READERS` reads the layers of some types from the keys of a Hugging Face config. Counts
equal those of the real classes exactly (tests/lab/test_shapes.py). Modules that continued
pretraining on text does not train are left out: vision towers and multi-token-prediction heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Block:
    """One residual block: a token mixer or an MLP."""

    kind: str  # "attention", "mamba", "delta" (gated delta rule), "mlp" or "experts"
    split: int = 0  # parameters of matrices sharded by tensor parallelism
    whole: int = 0  # parameters replicated on every tensor-parallel rank: norms, the router
    expert: int = 0  # parameters of one routed expert
    num_experts: int = 0  # number of routed experts
    top_k: int = 0  # routed experts per token
    router: int = 0  # parameters among `whole` that are multiplied with every token
    mixing: float = 0.0  # forward FLOPs per token outside parameter matrices
    attending: float = 0.0  # forward FLOPs per token and attended position
    window: int = 0  # positions that a token attends to at most; 0: all before it
    # values per token saved for backward:
    saved_hidden: int = 0  # on every tensor-parallel rank, for its own tokens
    saved_tables: int = 0  # on every tensor-parallel rank, for all tokens
    saved_gathered: int = 0  # likewise, where tensor-parallel ranks have tokens of their own
    saved_split: int = 0  # sharded by tensor parallelism
    saved_copied: int = 0  # likewise, by a rank that has several groups of keys and values
    saved_dispatched: int = 0  # inputs of a token's routed experts
    saved_routed: int = 0  # within these experts
    groups: int = 0  # number of key and value heads
    saved_scores: int = 0  # sharded likewise, for every position of the block
    # sizes that the tensor-parallel size must divide, by name
    tensor_divides: tuple[tuple[str, int], ...] = ()

    @property
    def parameters(self) -> int:
        """Total number of parameters."""
        return self.split + self.whole + self.expert * self.num_experts

    @property
    def matrix_parameters(self) -> int:
        """Parameters multiplied with one token."""
        return self.split + self.router + self.expert * self.top_k


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A language model."""

    # the blocks of each layer; pipeline stages hold whole layers
    layers: tuple[tuple[Block, ...], ...]
    hidden_size: int  # width of the residual stream
    vocab_size: int  # number of rows of the embedding
    tied: bool  # whether the output layer is the embedding
    capped: bool = False  # whether the logits are capped by a tanh
    kind: str = ""  # Hugging Face's model type

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks, in order."""
        return tuple(block for layer in self.layers for block in layer)

    @property
    def embedding(self) -> int:
        """Parameters of the embedding; an untied output layer has as many."""
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """Total number of parameters."""
        ends = self.embedding * (1 if self.tied else 2) + self.hidden_size  # the last norm, too
        return ends + sum(block.parameters for block in self.blocks)

    @property
    def active_parameters(self) -> int:
        """Parameters used for one token, the embedding included."""
        idle = sum(b.expert * (b.num_experts - b.top_k) for b in self.blocks)
        return self.parameters - idle

    @property
    def has_experts(self) -> bool:
        """Whether any block routes tokens to experts."""
        return any(block.num_experts for block in self.blocks)


def forward_flops(shape: Shape, block_size: int) -> float:
    """Returns the mean FLOPs of one token in a forward pass over blocks.

    By the usual count: two per parameter that processes a token. Operations without parameters are
    added: attention over the preceding positions, and the state of Mamba and DeltaNet blocks, which
    is a few percent.
    """
    return 2.0 * shape.embedding + sum(  # of the output layer
        2.0 * b.matrix_parameters + b.mixing + _attention_flops(b, block_size) for b in shape.blocks
    )


def _attention_flops(block: Block, size: int) -> float:
    """Returns a token's mean FLOPs over the positions that it attends to, itself included."""
    window = min(block.window or size, size)
    return block.attending * (window - window * (window - 1) / (2 * size))


def recomputed_share(shape: Shape, block_size: int, recompute: str) -> float:
    """Returns the share of a forward pass that `train.recompute` adds to a backward pass."""
    if recompute == "selective":  # the core of attention
        attending = sum(_attention_flops(block, block_size) for block in shape.blocks)
        return attending / forward_flops(shape, block_size)
    return float(recompute == "full")


Layers = list[tuple[Block, ...]]


def _transformer(c: dict[str, Any]) -> Layers:
    """Returns the layers of Llama, Ministral 3 and Qwen3: attention and a gated MLP each."""
    fused, routed = c["model_type"] == "llama", c["model_type"].endswith("moe")
    attention = _attention(c, qk_norm=c["model_type"].startswith("qwen"), fused=fused)
    mlp = _experts(c, shared=0) if routed else _mlp(c, int(c["intermediate_size"]), fused=fused)
    return [(attention, mlp)] * int(c["num_hidden_layers"])


def _qwen3_5(c: dict[str, Any]) -> Layers:
    """Returns groups of three layers with the gated delta rule and one with full attention."""
    count = int(c["num_hidden_layers"])
    every = int(c.get("full_attention_interval", 4))
    kinds = c.get("layer_types") or [
        "linear_attention" if (i + 1) % every else "full_attention" for i in range(count)
    ]
    rotated = float((c.get("rope_parameters") or {}).get("partial_rotary_factor", 0.25))
    mixers = {
        "full_attention": _attention(c, qk_norm=True, gated=True, rotated=rotated),
        "linear_attention": _delta(c),
    }
    # Bridge fuses the activation in the published classes, which have images, and in no other
    fused = "ForConditionalGeneration" in str(c.get("architectures"))
    if "num_experts" in c:
        shared = int(c["shared_expert_intermediate_size"])
        mlp = _experts(c, shared=shared, shared_gate=True, fused=fused)
    else:
        mlp = _mlp(c, int(c["intermediate_size"]), fused=fused)
    return [(mixers[kind], mlp) for kind in kinds]


def _nemotron_h(c: dict[str, Any]) -> Layers:
    """Returns layers of one block: Mamba-2, attention, an MLP or experts."""
    make: dict[str, Callable[[], Block]] = {
        "M": lambda: _mamba(c),
        "*": lambda: _attention(c, qk_norm=False, rotated=0.0),
        "-": lambda: _mlp(c, int(c["intermediate_size"]), gated=False),
        "E": lambda: _experts(
            c, shared=int(c["moe_shared_expert_intermediate_size"]), gated=False, overlapped=True
        ),
    }
    pattern = str(c["hybrid_override_pattern"])
    unknown = sorted(set(pattern) - set(make))
    if unknown:
        raise ValueError(
            f"hybrid_override_pattern has '{unknown[0]}': expected only {', '.join(make)}."
        )
    made = {symbol: make[symbol]() for symbol in set(pattern)}
    return [(made[symbol],) for symbol in pattern]


READERS: dict[str, Callable[[dict[str, Any]], Layers]] = {
    "llama": _transformer,
    "ministral3": _transformer,
    "qwen3": _transformer,
    "qwen3_moe": _transformer,
    "qwen3_next": _qwen3_5,
    "qwen3_5": _qwen3_5,
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe": _qwen3_5,
    "qwen3_5_moe_text": _qwen3_5,
    "nemotron_h": _nemotron_h,
}


def saved_by_attention(
    *,
    heads: int,
    groups: int,
    head: int,
    norm: str = "",
    gated: bool = False,
    rotary: bool = True,
    fused: bool = True,
) -> dict[str, int]:
    """Returns the values per token that attention saves for backward, from its projection on.

    The projection stays whole, as the values are a view of it. Of the queries' width there are the
    output; the rotated queries; a copy, where those of several groups must lie side by side, for
    the norm, or for the core if nothing is rotated; and the gate, copied likewise, and its product.

    Args:
        heads: number of query heads.
        groups: number of key and value heads.
        head: width of a head.
        norm: of queries and keys: "", none; "head", of each; "all", of all heads at once, for which
            keys are copied as well; "plain", likewise in plain torch, which keeps both in fp32, and
            normalised.
        gated: whether the output has a gate, which the matrix of the queries yields.
        rotary: whether queries and keys are rotated.
        fused: whether one kernel is the core. Otherwise the scores are kept, and keys and values
            are repeated for all heads: the projection is not, unless a norm reads it.

    Returns:
        Fields of the `Block`.
    """
    copies = heads * (gated + (norm == "head" or not rotary)) if groups < heads else 0
    if norm == "all":
        copies += heads + groups
    split = heads * (1 + gated + rotary)
    repeated = not fused and groups < heads
    split += 2 * heads if repeated else groups * rotary
    if norm or not repeated:
        split += heads * (1 + gated) + 2 * groups
    if norm == "plain":
        split += 3 * (heads + groups)
    return {
        **{"groups": groups, "saved_split": head * split, "saved_copied": head * copies},
        "saved_scores": 0 if fused else heads,
    }


def _attention(
    c: dict[str, Any],
    *,
    qk_norm: bool,
    gated: bool = False,
    rotated: float = 1.0,
    fused: bool = False,
) -> Block:
    """Returns a block of attention; fused, one kernel turns the `rotated` share of a head."""
    hidden, heads = int(c["hidden_size"]), int(c["num_attention_heads"])
    groups = int(c.get("num_key_value_heads") or heads)
    head = int(c.get("head_dim") or hidden // heads)
    query, key = heads * head, groups * head
    queries = 2 * query if gated else query  # the same matrix yields the gate
    return Block(
        kind="attention",
        split=hidden * (queries + 2 * key) + query * hidden,
        whole=hidden + (2 * head if qk_norm else 0),
        attending=4.0 * query,  # scores, and their product with the values
        saved_hidden=2 * hidden,  # input and output of the norm
        # sines and cosines, for queries and for keys; several blocks of a micro-batch share them
        saved_tables=0 if fused else int(4 * rotated * head),
        tensor_divides=(("num_attention_heads", heads), ("num_key_value_heads", groups)),
        **saved_by_attention(
            heads=heads,
            groups=groups,
            head=head,
            norm="head" if qk_norm else "",
            gated=gated,
            rotary=rotated > 0,
        ),
    )


def saved_by_mlp(*, gated: bool, fused: bool, weighted: bool = False) -> int:
    """Returns the values per token that an MLP saves for backward, by its width.

    Fused, the activation keeps its input (two widths if gated) and the last matrix its own. Without
    fusion, a gated one also keeps both factors: Megatron adds an offset of 0 to the second.

    Args:
        gated: whether the activation has a gate.
        fused: whether Megatron-Bridge sets `bias_activation_fusion` for the model.
        weighted: whether the output is multiplied with an expert's probability.
    """
    if not gated:
        return 3 if weighted else 2
    return 3 if fused else 5 + weighted


def _mlp(c: dict[str, Any], width: int, *, gated: bool = True, fused: bool = False) -> Block:
    hidden, matrices = int(c["hidden_size"]), 3 if gated else 2
    return Block(
        kind="mlp",
        split=matrices * hidden * width,
        whole=hidden,
        saved_hidden=2 * hidden,
        saved_split=saved_by_mlp(gated=gated, fused=fused) * width,
        tensor_divides=(("intermediate_size", width),),
    )


def saved_by_router(num_experts: int) -> int:
    """Returns the bf16 values per token that routing saves: scores, twice, and a map of rows.

    The scores are in fp32, for the choice and for the loss that balances experts. The map is that
    of TransformerEngine's permutation, two int32 an expert.
    """
    return 8 * num_experts


def _experts(
    c: dict[str, Any],
    *,
    shared: int,
    gated: bool = True,
    shared_gate: bool = False,
    fused: bool = False,
    overlapped: bool = False,
) -> Block:
    hidden, width = int(c["hidden_size"]), int(c["moe_intermediate_size"])
    names = ("num_experts", "num_local_experts", "n_routed_experts")  # the second saves the first
    count = int(c[next((name for name in names if name in c), names[-1])])
    top_k, matrices = int(c["num_experts_per_tok"]), 3 if gated else 2
    router = hidden * count + (hidden if shared_gate else 0)
    return Block(
        kind="experts",
        split=matrices * hidden * shared,
        whole=hidden + router,
        router=router,
        expert=matrices * hidden * width,
        num_experts=count,
        top_k=top_k,
        saved_hidden=2 * hidden + saved_by_router(count) + (hidden if shared_gate else 0),
        # Bridge lets shared experts run while tokens are dispatched, on gathered ones
        saved_gathered=hidden if overlapped else 0,
        saved_split=saved_by_mlp(gated=gated, fused=fused) * shared,
        saved_dispatched=top_k * hidden,
        # the output is kept nowhere: probabilities are multiplied before the last matrix
        saved_routed=top_k * saved_by_mlp(gated=gated, fused=fused, weighted=True) * width,
        tensor_divides=(("moe_shared_expert_intermediate_size", shared),) if shared else (),
    )


def _mamba(c: dict[str, Any]) -> Block:
    """Returns a Mamba-2 block: input matrix, short convolution, state space, output matrix."""
    hidden, heads = int(c["hidden_size"]), int(c["mamba_num_heads"])
    inner = heads * int(c["mamba_head_dim"])
    groups, state = int(c["n_groups"]), int(c["ssm_state_size"])
    kernel = int(c["conv_kernel"])
    convolved = inner + 2 * groups * state
    projected = inner + convolved + heads
    return Block(
        kind="mamba",
        split=hidden * projected + inner * hidden,
        whole=hidden + inner + 3 * heads + convolved * (kernel + 1),
        # Megatron's count: decay, update and read-out of every channel and state
        mixing=7.0 * inner * state + 2.0 * kernel * convolved,
        saved_hidden=2 * hidden,
        # mamba_ssm keeps its input and its output before the gate, and computes the rest again;
        # input and output of the norm
        saved_split=projected + 3 * inner,
        tensor_divides=(("mamba_num_heads", heads), ("n_groups", groups)),
    )


def _delta(c: dict[str, Any]) -> Block:
    """Returns a Gated DeltaNet block."""
    hidden = int(c["hidden_size"])
    key_heads, value_heads = int(c["linear_num_key_heads"]), int(c["linear_num_value_heads"])
    key_dim, value_dim = int(c["linear_key_head_dim"]), int(c["linear_value_head_dim"])
    kernel, chunk = int(c.get("linear_conv_kernel_dim", 4)), 64
    key, value = key_heads * key_dim, value_heads * value_dim
    convolved = 2 * key + value
    projected = convolved + value + 2 * value_heads
    return Block(
        kind="delta",
        split=hidden * projected + value * hidden,
        whole=hidden + value_dim + 2 * value_heads + convolved * kernel,
        # Megatron-Bridge's count: four products with the state of every head
        mixing=8.0 * value_heads * key_dim * value_dim + 2.0 * kernel * convolved,
        saved_hidden=2 * hidden,
        # The projection, whole: the convolution reads a view of it. Unit vectors of queries and
        # keys, and those repeated for every value head; values; flash-linear-attention's matrix of
        # a chunk. Output of the rule, normed, its gate, and their product.
        saved_split=projected + 2 * key + value_heads * (2 * key_dim + chunk) + 5 * value,
        tensor_divides=(("linear_num_key_heads", key_heads),),
    )
