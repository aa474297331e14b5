"""Measures what Megatron's layers keep for a backward pass, in bytes of one process.

torchrun ... tests/workers/activations_worker.py MODELS LAYOUT: JSON of name -> {"config", "class"
and, if it is not "none", "recompute"}, and of the fields of `Parallel`. The first rank prints JSON
of name -> bytes of the "weights", and of the "activations" that one block keeps, less its logits;
both are means of the ranks, whose experts get different numbers of tokens; and of "logits" -> the
peaks in the output layer and the loss, by `LOSSES`.

Megatron-Bridge builds the models of TransformerEngine's specifications, in bf16, with the fusions
that it sets for them. Everything between kernels is their own code: splits, copies, positions,
gates, activations, routing, the loss. Kernels that need a GPU are stand-ins that return something
of the right shape, and save what the autograd function of the original saves:

    TransformerEngine d0067d0        layernorm_linear.py _LayerNormLinear, rmsnorm.py RMSNorm,
                                     backends.py FusedAttnFunc, rope.py FusedRoPEFunc; _Linear saves
                                     its input, as Megatron's own layer does
    mamba_ssm e9594ce                ssd_combined.py MambaSplitConv1dScanCombinedFn,
                                     layernorm_gated.py LayerNormFn
                                     softmax.py, whose kernels save their output
    torch 2.9 and later              flex_attention.py FlexAttentionAutogradOp
    flash-linear-attention bc3b101   conv/triton/ops.py CausalConv1dFunction, l2norm.py
                                     L2NormFunction, chunk.py ChunkGatedDeltaRuleFunction

Functions that Megatron compiles are compiled here as well, up to the generation of code: what they
save is the choice of torch.compile's partitioner. Tokens are permuted by Megatron's plain code,
whose index is as large as the map of TransformerEngine's; experts are separate MLPs, which keep
what grouped ones keep.
"""

import functools
import json
import os
import sys
import weakref
from typing import Any

import torch
import torch.distributed as dist

import nemo_rod.megatron  # noqa: F401  makes Megatron importable without CUDA

# isort: split
import transformers
from megatron.bridge import AutoBridge
from megatron.bridge.models.exaone.exaone_moe import exaone_moe_provider
from megatron.bridge.models.gemma import gemma2_provider
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl import attention as qwen_attention
from megatron.core import activations, parallel_state
from megatron.core.extensions import transformer_engine as te
from megatron.core.extensions import transformer_engine_spec_provider as provider_of_layers
from megatron.core.fusions import fused_softmax
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.gated_delta_net import common as delta_net
from megatron.core.ssm.gated_delta_net import gdn
from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
from megatron.core.transformer import attention, multi_latent_attention, transformer_block
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nemo_rod import cpu
from nemo_rod.cpu.plain import kernels, layers
from nemo_rod.megatron.bridge_config import recompute
from nemo_rod.megatron.models import number_text

TOKENS = 32  # a block
# widths of an output layer, whether its logits are capped
LOSSES = ((64, False), (512, False), (64, True))
FUSIONS = ("bias_activation_fusion", "bias_dropout_fusion", "apply_rope_fusion")


class Kernel(torch.autograd.Function):
    """Returns an output that depends on inputs, and saves tensors for a backward pass."""

    @staticmethod
    def forward(
        ctx: Any, output: torch.Tensor, saved: tuple, saves_output: bool, *inputs: torch.Tensor
    ) -> torch.Tensor:
        output = output.detach().clone()
        ctx.save_for_backward(*saved, *([output] if saves_output else []))
        return output


def kernel(
    output: torch.Tensor, inputs: tuple, *saved: torch.Tensor, saves_output: bool = False
) -> torch.Tensor:
    return Kernel.apply(output, saved, saves_output, *inputs)


def fp32(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32)


@torch.compiler.disable  # as TransformerEngine's modules are
def normalised(x: torch.Tensor, weight: torch.Tensor, bias: Any, **_: Any) -> torch.Tensor:
    x = x.to(weight.dtype)  # from a residual stream in fp32
    statistics = [fp32(*x.shape[:-1]) for _ in range(1 if bias is None else 2)]
    return kernel(x, (x, weight), x, weight, *statistics)


def core_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> torch.Tensor:
    size, samples, heads = q.shape[:3]
    output = q.new_zeros(size, samples, heads * v.shape[-1])
    return kernel(output, (q, k, v), q, k, v, fp32(samples, heads, size), saves_output=True)


def attended(self: Any, *qkv: torch.Tensor, **_: Any) -> torch.Tensor:
    if self.config.attention_backend is AttnBackend.unfused:  # in plain torch but for the softmax
        return DotProductAttention.forward(self, *qkv)
    return core_attention(*qkv)


def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
    return kernel(q, (q, k, v), q, k, v, fp32(*q.shape[:3]), saves_output=True)


def scanned(zxbcdt: torch.Tensor, *weights: torch.Tensor, D: torch.Tensor, **options: Any) -> Any:
    output = zxbcdt[..., : len(D) * (options["headdim"] or D.shape[-1])]
    # its own copy of the output, before the gate
    return kernel(output, (zxbcdt, *weights, D), zxbcdt, output.contiguous())


def group_norm(self: Any, y: torch.Tensor, z: Any = None) -> torch.Tensor:
    return kernel(y, (y, self.weight), y, fp32(*y.shape[:-1], y.shape[-1] // self.group_size))


def convolved(x: torch.Tensor, weight: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
    return kernel(x, (x, weight), x), None


def unit(x: torch.Tensor) -> torch.Tensor:
    return kernel(x, (x,), fp32(*x.shape[:-1]), saves_output=True)


def delta_rule(q: Any, k: Any, v: Any, *, g: Any, beta: Any, **_: Any) -> tuple[Any, None]:
    chunk = q.new_empty(*v.shape[:3], 64)  # a matrix of products of keys
    return kernel(v, (q, k, v, g, beta), q, k, v, torch.empty_like(g), beta, chunk), None


class Latent(torch.nn.Module):
    """TransformerEngine's linear layer without tensor parallelism, which saves its input."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(output_size, input_size, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.nn.functional.linear(x, self.weight), None


def stand_in() -> None:
    """Puts the stand-ins in the places of kernels."""
    os.environ.pop("TORCHDYNAMO_DISABLE", None)
    torch._dynamo.config.disable = False
    layers._provide_specifications()
    layers._normalise = normalised
    transformer_block.LayerNormImpl = te.TENorm
    te.TEDotProductAttention.forward = attended
    fused_softmax.FusedScaleMaskSoftmax.forward = lambda self, scores, *_: kernel(
        scores, (scores,), saves_output=True
    )
    gemma2_provider._flex_attn_func = flex
    gemma2_provider._create_flex_block_mask = lambda *_, **__: None
    exaone_moe_provider.HAVE_TE = True
    qwen_attention.Qwen3VLSelfAttention._local_causal_attention = staticmethod(core_attention)
    te.TELinear = multi_latent_attention.TELinear = provider_of_layers.TELinear = Latent
    rope_utils.fused_apply_rotary_pos_emb = lambda t, freqs, **_: kernel(t, (t,), freqs)
    mamba_mixer.mamba_split_conv1d_scan_combined = scanned
    kernels.GatedRMSNorm.forward = group_norm
    gdn.causal_conv1d, delta_net.l2norm, gdn.chunk_gated_delta_rule = convolved, unit, delta_rule
    for place, name in (
        (attention.Attention, "_apply_output_gate"),
        (delta_net._GDNBase, "_apply_gated_norm"),
        (activations, "fast_gelu"),
    ):
        setattr(place, name, compiled(getattr(place, name)))


def compiled(function: Any) -> Any:
    made = torch.compile(function, backend="aot_eager_decomp_partition")
    return lambda *arguments: made(*arguments)


def build(
    config: dict[str, Any], name: str, layout: dict[str, Any], kind: str = "none"
) -> torch.nn.Module:
    """The model of a Hugging Face config, of transformers' class `name`, on this rank."""
    given = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **config}
    if name.endswith("ForConditionalGeneration"):
        vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
        described = getattr(transformers, name.replace("ForConditionalGeneration", "Config"))(
            text_config=given, vision_config={**vision, "out_hidden_size": given["hidden_size"]}
        )
    else:
        described = transformers.AutoConfig.for_model(given.pop("model_type"), **given)
    described.architectures = [name]
    provider = AutoBridge.from_hf_config(described).to_megatron_provider(load_weights=False)
    number_text(provider)
    kept = {fusion: getattr(provider, fusion) for fusion in FUSIONS}
    specification = getattr(provider, "transformer_layer_spec", None)
    if isinstance(specification, functools.partial):  # with the layers that were importable
        specification = functools.partial(specification.func, use_transformer_engine=True)
    cpu.adapt(provider)
    gemma2_provider._HAVE_FLEX_ATTN = True
    if specification is not None:
        provider.transformer_layer_spec = specification
    if provider.activation_func.__name__ == "fast_gelu":
        provider.activation_func = activations.fast_gelu
    kept |= {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "native"}
    kept |= {"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16, "bf16": True}
    kept |= {"tensor_model_parallel_size": layout.get("tensor", 1), "seq_length": TOKENS}
    kept |= {"sequence_parallel": layout.get("sequence", False)}
    if layout.get("expert", 1) > 1:  # as in nemo_rod.megatron.models
        kept |= {"expert_model_parallel_size": layout["expert"], "expert_tensor_parallel_size": 1}
    for key, value in kept.items():
        setattr(provider, key, value)
    recompute(provider, kind)
    for variable in [name for name in os.environ if name.startswith("NVTE_")]:
        del os.environ[variable]  # of the model before
    provider.finalize()
    if not parallel_state.is_initialized():
        provider.initialize_model_parallel(seed=0)
    return provider.provide_distributed_model(wrap_with_ddp=False)[0].train()


def kept_bytes(model: torch.nn.Module, vocabulary: int) -> int:
    """The bytes that a forward pass over a block keeps, each storage once, without logits."""
    skipped = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # alive, so that no address has two

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.shape[-1:] != (vocabulary,) and storage.data_ptr() not in skipped:
            kept[storage.data_ptr()] = storage
        return tensor

    tokens = torch.arange(TOKENS)[None]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=tokens, position_ids=tokens, attention_mask=None, labels=tokens.clone())
    return sum(storage.nbytes() for storage in kept.values())


class Live(TorchDispatchMode):
    """Follows the bytes of all tensors made within, which may be views of others."""

    def __init__(self, *others: torch.Tensor) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: dict[int, Any] = {x.untyped_storage()._cdata: None for x in others}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in filter(torch.is_tensor, tree_leaves(result)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.known:
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                gone = functools.partial(self.gone, storage._cdata, storage.nbytes())
                self.known[storage._cdata] = weakref.ref(storage, gone)
        return result

    def gone(self, key: int, size: int, _: Any) -> None:
        del self.known[key]
        self.now -= size


def loss_peak(width: int, capped: bool) -> int:
    """Bytes at the peak of an output layer, its loss and their backward pass: 64 tokens, 4096 rows.

    A weight's gradient is added to the others' afterwards, as without Apex's fusion.
    """
    x = torch.ones(64, 1, width, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(4096, width, dtype=torch.bfloat16, requires_grad=True)
    group = parallel_state.get_tensor_model_parallel_group()

    def loss() -> torch.Tensor:
        logits = linear_with_grad_accumulation_and_async_allreduce(
            x, weight, None, False, False, False, tp_group=group
        )
        logits = gemma2_provider.logit_softcapping(logits, 30.0 if capped else None)
        labels = torch.zeros(64, 1, dtype=torch.long)
        return fused_vocab_parallel_cross_entropy(logits, labels, group)

    with Live(x, weight) as live:
        loss().sum().backward()
    return live.peak


def main() -> None:
    models, layout = (json.loads(argument) for argument in sys.argv[1:])
    dist.init_process_group("gloo")
    stand_in()
    result: dict[str, Any] = {}
    for name, model in models.items():
        built = build(model["config"], model["class"], layout, model.get("recompute", "none"))
        kept = kept_bytes(built, model["config"]["vocab_size"] // layout.get("tensor", 1))
        weights = sum(parameter.nbytes for parameter in built.parameters())
        means = torch.tensor([kept, weights], dtype=torch.float64) / dist.get_world_size()
        dist.all_reduce(means)
        result[name] = dict(zip(("activations", "weights"), means.tolist(), strict=True))
    result["logits"] = [loss_peak(*loss) for loss in LOSSES]
    if dist.get_rank() == 0:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
