"""The shape of any model: by the reader of its type, or else from transformers' class on no device.

Parameters are then those of the class, exactly. Its layers are identified by the names that
transformers gives to their modules, which are alike in all of its language models.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nemo_rod.installation import pip_install
from nemo_rod.lab.plan.shapes import (
    READERS,
    Block,
    Shape,
    saved_by_attention,
    saved_by_mlp,
    saved_by_router,
)

if TYPE_CHECKING:
    import torch

_MLP = ("mlp", "feed_forward", "moe", "ffn")  # words in the names of modules beside the token mixer
_FUSED = ("deepseek_v", "glm4_moe", "gpt_oss")  # types whose activation Megatron-Bridge fuses
_FUSED_ROTATION = ("nemotron",)
_UNFUSED = ("exaone4", "falcon_h1")  # types whose attention Megatron-Bridge does not fuse
_PLAIN_NORM = ("minimax_m2",)  # types whose norm of queries and keys is Megatron-Bridge's own
# types of which Megatron-Bridge lets shared experts run while tokens are dispatched
_OVERLAPPED = ("deepseek_v", "exaone_moe", "glm4_moe")
_LATENT = ("q_a_proj", "kv_a_proj")  # matrices that Megatron does not split
_RECURRENT = ("linear_attn", "mamba", "ssm", "recurrent", "rglru")


def read_shape(config: Mapping[str, Any]) -> Shape:
    """Reads the shape from a Hugging Face config; of a multimodal model, its language model's.

    Raises:
        ValueError: for a missing key, or a model type that transformers does not know either.
    """
    text = {**config.get("text_config", {})} or dict(config)
    kind = str(text.get("model_type", config.get("model_type")))
    tied = bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))
    capped = False
    try:
        if kind in READERS:
            layers = READERS[kind](text)
        else:
            layers, tied, capped = built_layers({"model_type": kind, **text})
        hidden, vocab = int(text["hidden_size"]), int(text["vocab_size"])
    except KeyError as error:
        raise ValueError(
            f"The shape of a {kind} model lacks the key {error}: copy it from the config.json of "
            "the checkpoint into model.shape."
        ) from None
    if len(layers) != int(text["num_hidden_layers"]):
        raise ValueError(
            f"The shape names {len(layers)} layers, but num_hidden_layers="
            f"{text['num_hidden_layers']}: copy both from the checkpoint's config.json."
        )
    ends = {"hidden_size": hidden, "vocab_size": vocab}
    return Shape(layers=tuple(layers), tied=tied, capped=capped, kind=kind, **ends)


def layer_kinds(config: Mapping[str, Any]) -> list[Hashable]:
    """Returns the kind of every layer: equal for layers that have the same attention and weights.

    Raises:
        ValueError: as `built_layers`.
    """
    described, _, layers = _build_model(config)
    named = [getattr(described, key, None) or () for key in ("layer_types", "layers_block_type")]
    weights = [tuple((k, tuple(p.shape)) for k, p in layer.named_parameters()) for layer in layers]
    return [(*(str(names[i : i + 1]) for names in named), w) for i, w in enumerate(weights)]


def built_layers(config: Mapping[str, Any]) -> tuple[list[tuple[Block, ...]], bool, bool]:
    """Builds a language model without memory for its weights, and reads its layers.

    Args:
        config: the Hugging Face config of a language model, with its `model_type`.

    Returns:
        A token mixer and an MLP for each layer; whether the output layer is the embedding; and
        whether logits are capped. Modules outside the layers that are neither the embedding, nor
        the output layer, nor a norm as wide as the residual stream, count with the last block.

    Raises:
        ValueError: transformers is missing, has no such model, or builds none of this config; or
            if the token mixer is neither attention nor one of those whose FLOPs are known.
    """
    described, model, layers = _build_model(config)
    # newer ones refuse to name one width of heads, say, for layers of several
    by_layer = getattr(described, "per_layer_config", None) or [described] * len(layers)
    made = [tuple(_blocks(*pair, at)) for at, pair in enumerate(zip(layers, by_layer, strict=True))]
    tied = bool(described.tie_word_embeddings)
    ends = described.vocab_size * described.hidden_size * (1 if tied else 2) + described.hidden_size
    inside = sum(block.parameters for layer in made for block in layer)
    others = sum(p.numel() for p in model.parameters()) - ends - inside
    *first, last = made[-1]
    made[-1] = (*first, replace(last, whole=last.whole + others))
    return made, tied, bool(getattr(described, "final_logit_softcapping", None))


def special_floats(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config with its infinite numbers, each of which transformers saves as an object."""
    decode: Any = lambda made: float(made["__float__"]) if "__float__" in made else made  # noqa: E731
    decoded: dict[str, Any] = json.loads(json.dumps(dict(config)), object_hook=decode)
    return decoded


def _build_model(config: Mapping[str, Any]) -> tuple[Any, torch.nn.Module, torch.nn.ModuleList]:
    """Returns transformers' config, model and layers."""
    kind = str(config["model_type"])
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise ValueError(
            f"The layers of a '{kind}' model are read from transformers, which is not installed: "
            f"{pip_install('megatron')}, or install torch and transformers."
        ) from None
    keys = {key: value for key, value in special_floats(config).items() if key != "model_type"}
    try:
        described = AutoConfig.for_model(kind, **{"pad_token_id": None, **keys})
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(described)
    except Exception as error:  # its configurations raise any kind
        reason = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
        raise ValueError(
            f"The model type '{kind}' has no shape here, and transformers cannot build it "
            f"({reason}): compare model.shape with the checkpoint's config.json, and the "
            "installed version with its transformers_version."
        ) from None
    count = int(described.num_hidden_layers)
    lists = (m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count)
    return described, model, next(lists)


def _blocks(layer: torch.nn.Module, config: Any, index: int) -> list[Block]:
    """Returns the token mixer and the MLP of a layer; norms are the mixer's, beside it."""
    hidden = int(config.hidden_size)
    mixer: dict[str, int] = dict.fromkeys(("split", "whole", "router"), 0)
    mlp: dict[str, int] = dict.fromkeys(("split", "whole", "router", "expert", "num_experts"), 0)
    experts: set[str] = set()
    routed = 0
    widths: dict[bool, list[int]] = {False: [], True: []}  # widths of an MLP's, and an expert's
    for name, parameter in layer.named_parameters():
        top, *path = name.split(".")
        shape, size = tuple(parameter.shape), parameter.numel()
        part = mlp if any(word in top for word in _MLP) and "norm" not in top else mixer
        if part is mlp and "experts" in path and "shared_experts" not in path:
            one = path[path.index("experts") + 1]
            experts.add(one if one.isdigit() else "")
            stacked = 0 if one.isdigit() else shape[0]  # one tensor for all of them, or one each
            mlp["num_experts"] = stacked or len(experts)
            routed += size
            if len(shape) - bool(stacked) > 1 and one in ("0", path[-1]):
                widths[True].append(size // (stacked or 1) // hidden)
        elif part is mlp and path[0] in ("gate", "router", "shared_expert_gate"):
            mlp["whole"] += size
            mlp["router"] += size if len(shape) > 1 else 0
        elif len(shape) == 2 and any(word in name for word in _LATENT):
            mixer["whole"] += size
            mixer["router"] += size
        elif len(shape) == 2:
            part["split"] += size
            if part is mlp:
                widths[False].append(size // hidden)
        else:  # norms, biases, convolutions
            part["whole"] += size
    if mlp["num_experts"]:
        mlp["expert"] = routed // mlp["num_experts"]
    blocks = [_mixer(layer, config, index, mixer)]
    if mlp["split"] or mlp["expert"]:
        blocks.append(_mlp(layer, config, mlp, widths))
    return blocks


def _mixer(layer: torch.nn.Module, config: Any, index: int, parameters: dict[str, int]) -> Block:
    """Returns the token mixer of a layer, and the activations that its norms save.

    A norm before the MLP is counted with the MLP; one after a block keeps its input alone.
    """
    hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
    groups = int(getattr(config, "num_key_value_heads", None) or heads)
    head = int(getattr(config, "head_dim", None) or hidden // heads)
    value = int(getattr(config, "v_head_dim", None) or head)
    shapes = {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}
    names = [name for name, s in shapes.items() if s == (hidden,) and name.count(".") == 1]
    after = sum("norm.weight" in name for name in names) - 2
    saved_hidden = 2 * hidden + max(0, after) * hidden
    saved = {"saved_split": 0}
    saved_tables = 0
    is_latent = value != head or hasattr(config, "qk_nope_head_dim")
    if is_latent:  # queries, keys, values, output
        rotated = int(config.qk_rope_head_dim)
        head = int(config.qk_nope_head_dim) + rotated
        latent = int(config.kv_lora_rank) + int(getattr(config, "q_lora_rank", None) or 0)
        saved_hidden += 2 * latent + rotated  # each is kept before and after its norm
        saved_tables = 4 * rotated
        saved["saved_split"] = 2 * heads * (head + int(config.v_head_dim))
    elif any("attn" in name and "linear" not in name for name in shapes):
        if config.model_type not in _FUSED_ROTATION:
            rotation = getattr(config, "rope_parameters", None) or {}
            share = float(rotation.get("partial_rotary_factor") or 1.0)
            saved_tables = int(4 * share * head)  # sines and cosines, for queries and for keys
        width = next((s[0] for name, s in shapes.items() if "q_norm" in name), 0)
        norm = "head" if width == head else "all" if width else ""
        norm = "plain" if config.model_type in _PLAIN_NORM else norm
        fused = config.model_type not in _UNFUSED
        saved = saved_by_attention(heads=heads, groups=groups, head=head, norm=norm, fused=fused)
    state = {name: s for name, s in shapes.items() if any(word in name for word in _RECURRENT)}
    for name, shape in state.items():  # as in Mamba-2
        if not is_latent and len(shape) == 2:
            outputs = 3 if any("norm" in each for each in state) else 2
            saved["saved_split"] += outputs * shape[1] if "out_proj" in name else shape[0]
    children = {name.partition(".")[0] for name in shapes}
    recurrent = any(word in child for child in children for word in _RECURRENT)
    attends = not recurrent or any("attn" in child and "linear" not in child for child in children)
    if recurrent and attends:  # side by side, each on its own multiple of the norm's output
        saved_hidden += hidden
    kinds = getattr(config, "layer_types", None)
    sliding = (not kinds or kinds[index] == "sliding_attention") and getattr(
        config, "use_sliding_window", True
    )
    return Block(
        kind="attention" if attends else "delta",
        attending=2.0 * heads * (head + value) if attends else 0.0,
        window=int((getattr(config, "sliding_window", None) or 0) if sliding else 0),
        mixing=_state_flops(config) if recurrent else 0.0,
        saved_hidden=saved_hidden,
        saved_tables=saved_tables,
        tensor_divides=(("num_attention_heads", heads), ("num_key_value_heads", groups)),
        **saved,
        **parameters,
    )


def _mlp(
    layer: torch.nn.Module, config: Any, parameters: dict[str, int], widths: dict[bool, list[int]]
) -> Block:
    """Returns the MLP of a layer, with `widths` of its matrices, and of one routed expert's."""
    hidden, has_experts = int(config.hidden_size), bool(parameters["expert"])
    top_k = int(getattr(config, "num_experts_per_tok", None) or 1)
    fused = config.model_type.startswith(_FUSED)
    # both factors, clamped, before the activation; a multiple of one factor in place of both
    special = {"gpt_oss": 2, "falcon_h1": -1}.get(config.model_type, 0)
    saved = {
        weighted: w[-1]
        * (saved_by_mlp(gated=sum(w) > 2 * w[-1], fused=fused, weighted=weighted) + special)
        for weighted, w in widths.items()
        if w
    }
    gate = hidden * any("shared_expert_gate" in name for name, _ in layer.named_modules())
    width = int(getattr(config, "intermediate_size", 0) or 0)
    routing = {"top_k": top_k} if has_experts else {}
    return Block(
        kind="experts" if has_experts else "mlp",
        saved_hidden=2 * hidden + saved_by_router(parameters["num_experts"]) + gate,
        saved_gathered=hidden * (has_experts and config.model_type.startswith(_OVERLAPPED)),
        saved_split=saved.get(False, 0),
        saved_dispatched=top_k * hidden if has_experts else 0,
        saved_routed=top_k * saved.get(True, 0),
        tensor_divides=() if has_experts else (("intermediate_size", width),),
        **parameters,
        **routing,
    )


def _state_flops(config: Any) -> float:
    """Returns the forward FLOPs of a token outside the matrices of a block with a state."""
    if hasattr(config, "mamba_n_heads") and hasattr(config, "mamba_d_state"):  # Mamba-2
        inner = int(config.mamba_n_heads) * int(config.mamba_d_head)
        return 7.0 * inner * int(config.mamba_d_state)
    raise ValueError(
        f"The plan does not know the FLOPs of a '{config.model_type}' model, whose layers keep a "
        "state: add it to nemo_rod/lab/plan/built_shapes.py."
    )
