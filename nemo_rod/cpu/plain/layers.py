"""Plain torch layers under TransformerEngine's names, and the models built of them.

Megatron has its own layers for ordinary transformers (`local_layer_spec`), but its specifications
of hybrid models (Qwen3.5, Nemotron-H) require TransformerEngine's layers, which these replace. They
carry TransformerEngine's names because Megatron-Bridge infers from a layer's class how its weight
is split.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from typing import Any

import torch
import torch.nn.functional as F

_FUSIONS = (
    "gradient_accumulation_fusion",
    "apply_rope_fusion",
    "persist_layer_norm",
    "masked_softmax_fusion",
    "bias_dropout_fusion",
    "bias_activation_fusion",
    "cross_entropy_loss_fusion",
    "moe_grouped_gemm",
    "moe_permute_fusion",
)


def use(provider: Any) -> None:
    """Makes a Megatron-Bridge provider build its model without TransformerEngine."""
    from megatron.bridge.models.gpt_provider import default_layer_spec, local_layer_spec

    mamba = hasattr(provider, "hybrid_stack_spec") or hasattr(provider, "mamba_stack_spec")
    layer = getattr(provider, "transformer_layer_spec", None)
    # Megatron's own layers have nothing that one model alone has, and train no experts with biases
    if mamba or layer is not default_layer_spec or provider.add_bias_linear:
        _provide_specifications()
    else:
        provider.transformer_layer_spec = local_layer_spec
    for fusion in _FUSIONS:
        setattr(provider, fusion, False)


def replace(extension: Any) -> None:
    """Puts plain torch layers into `megatron.core.extensions.transformer_engine`."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class TENorm:
        def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
            return Norm(config, hidden_size, eps)

    # Never instantiated. It replaces megatron-core's mock, which would make a specification that
    # names it uncopyable; Megatron-Bridge copies it for another chunk size or local attention.
    class TELinear(torch.nn.Module):
        def __init__(self, *_: Any, **__: Any) -> None:
            raise ImportError("Latent projections need TransformerEngine: install it.")

    class TEColumnParallelLinear(ColumnParallelLinear):
        pass

    class TERowParallelLinear(RowParallelLinear):
        def forward(self, x: torch.Tensor) -> Any:
            output, bias = super().forward(x)
            # Megatron adds the bias of an expert in place, which torch refuses for this view
            return (output.clone() if self.is_expert and bias is not None else output), bias

    class TELayerNormColumnParallelLinear(ColumnParallelLinear):
        def __init__(self, input_size: int, output_size: int, **options: Any) -> None:
            super().__init__(input_size, output_size, **options)
            config = options["config"]
            norm = Norm(config, input_size, config.layernorm_epsilon)
            self.layer_norm_weight = norm.weight
            if norm.bias is not None:
                self.layer_norm_bias = norm.bias
            # not a submodule: this layer owns the parameters
            self._normalise = functools.partial(_normalise, eps=norm.eps, centered=norm.centered)

        def forward(self, x: torch.Tensor, *args: Any, **options: Any) -> Any:
            bias = getattr(self, "layer_norm_bias", None)
            x = self._normalise(x, self.layer_norm_weight, bias)
            return super().forward(x, *args, **options)

    class TEDotProductAttention(DotProductAttention):
        def __init__(self, *args: Any, v_channels: int | None = None, **options: Any) -> None:
            for name in ("k_channels", "num_splits", "name"):
                options.pop(name, None)
            super().__init__(*args, **options)
            if v_channels is not None:  # latent attention has its own value width
                width = v_channels * self.num_attention_heads_per_partition
                self.hidden_size_per_partition = width

        def forward(
            self, *qkv: torch.Tensor, attention_bias: torch.Tensor | None = None, **options: Any
        ) -> torch.Tensor:
            if attention_bias is not None:  # that of Gemma 3 with images only says what is hidden
                options["attention_mask"] = attention_bias < 0
                qkv = qkv[:3]
            return super().forward(*qkv, **options)

    for layer in (
        TENorm,
        TELinear,
        TEColumnParallelLinear,
        TERowParallelLinear,
        TELayerNormColumnParallelLinear,
        TEDotProductAttention,
    ):
        layer.__module__, layer.__qualname__ = extension.__name__, layer.__name__
        setattr(extension, layer.__name__, layer)


class Norm(torch.nn.Module):
    """RMS or layer norm in fp32, like TransformerEngine's; "centered" weights are stored less 1."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__()
        rms = config.normalization == "RMSNorm"
        centered = config.layernorm_zero_centered_gamma
        start = torch.zeros if centered else torch.ones
        self.weight = torch.nn.Parameter(start(hidden_size, dtype=config.params_dtype))
        self.bias = None if rms else torch.nn.Parameter(torch.zeros_like(self.weight))
        for parameter in self.parameters():
            # makes the trainer sum their gradients over the tensor-parallel processes
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps, self.centered = eps, centered

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the normalised x, in its dtype."""
        return _normalise(x, self.weight, self.bias, eps=self.eps, centered=self.centered)


def _normalise(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, eps: float, centered: bool
) -> torch.Tensor:
    scale, y = weight.float() + centered, x.float()
    if bias is None:
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * scale
    else:
        y = F.layer_norm(y, scale.shape, scale, bias.float(), eps)
    return y.to(x.dtype)


@functools.cache
def _provide_specifications() -> None:
    """Gives the stand-ins to specifications that request TransformerEngine's layers."""
    from megatron.core.extensions import transformer_engine as te
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer import attention
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP

    class PlainSpecProvider(TESpecProvider):
        def layer_norm(self, *_: Any, **__: Any) -> Any:
            return te.TENorm

        def grouped_mlp_modules(self, *_: Any, **__: Any) -> Any:
            linears = MLPSubmodules(
                linear_fc1=te.TEColumnParallelLinear, linear_fc2=te.TERowParallelLinear
            )
            return functools.partial(SequentialMLP, submodules=linears)

        def activation_func(self) -> Any:
            return None

    class WithLatentAttention(LocalSpecProvider):
        def core_attention(self) -> Any:
            return te.TEDotProductAttention

    if importlib.util.find_spec("megatron.core.transformer.mla_qk_norm_config"):  # core 0.19
        from megatron.core.transformer import multi_latent_attention

        class Resolver(multi_latent_attention.QKNormConfigResolver):
            # it refuses a norm that Megatron's own specification names, of queries without a rank
            def __init__(self, config: Any, submodules: Any) -> None:
                if config.q_lora_rank is None:
                    submodules = dataclasses.replace(submodules, q_layernorm=None)
                super().__init__(config, submodules)

        multi_latent_attention.QKNormConfigResolver = Resolver

    for module in (attention, variants, gpt_layer_specs):  # some import none of them
        module.TESpecProvider = PlainSpecProvider
        module.LocalSpecProvider = WithLatentAttention
        module.TENorm = te.TENorm
