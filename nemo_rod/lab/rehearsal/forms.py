"""The small form of any published model that transformers builds.

One rule makes it: transformers' own class reads the published config; sizes shrink by the names of
their keys; and of the layers, the shortest beginning stays that has one of each kind. Everything
else that decides which code runs stays: class, norms, gates, positions, tied embeddings, shared
experts, the multi-token-prediction head and the vision tower.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rod.lab.plan.built_shapes import layer_kinds, special_floats

BLOCK_SIZE = 64  # tokens
# of a small model with the tokenizer of bytes; as in published models, some rows belong to no token
VOCABULARY = 384
# The sizes of every small model, by key. A published value that is smaller stays, and so does
# a key that the published model lacks.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "sliding_window": BLOCK_SIZE // 2,
    # latent attention
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    # Gated DeltaNet; Triton multiplies no smaller matrices
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    # Mamba, by the names of Nemotron-H and of Falcon-H1
    "mamba_num_heads": 8, "mamba_n_heads": 8, "mamba_head_dim": 16, "mamba_d_head": 16,
    "mamba_d_ssm": 128, "n_groups": 2, "mamba_n_groups": 2, "ssm_state_size": 16,
    "mamba_d_state": 16,
    # transformers' torch code pads every text to a multiple of it, and adds up the states of
    # several chunks along the wrong axis: as long as a block, and longer than any question
    "chunk_size": BLOCK_SIZE, "mamba_chunk_size": BLOCK_SIZE,
    # transformers' torch code cuts smaller steps off, and the kernels that train do not
    "time_step_min": 1e-6, "use_mamba_kernels": False,
    # embeddings of each layer, and heads of full attention, in Gemma 4
    "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16,
    "global_head_dim": 32,
    # experts, by the names of several families
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_k": 2, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
# Of Qwen3.5, whose positions have three directions that share half of a small head.
QWEN3_5: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
}
IMAGES = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32,
    "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [],
}  # fmt: skip
TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
         "num_attention_heads": 2, "image_size": 16, "patch_size": 4}  # fmt: skip
_QWEN3_5_IMAGES = {  # ids are some that the tokenizer of bytes does not have
    "vision_config": IMAGES, "vision_start_token_id": 265, "vision_end_token_id": 266,
    "image_token_id": 268, "video_token_id": 269,
}  # fmt: skip
# Models with images: their class -> that of their config, and what it has beside the text.
WITH_IMAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3_5ForConditionalGeneration": ("Qwen3_5Config", _QWEN3_5_IMAGES),
    "Qwen3_5MoeForConditionalGeneration": ("Qwen3_5MoeConfig", _QWEN3_5_IMAGES),
    "Mistral3ForConditionalGeneration": (
        "Mistral3Config",
        {"vision_config": {"model_type": "pixtral", **TOWER}, "image_token_index": 268},
    ),
    "Gemma3ForConditionalGeneration": (
        "Gemma3Config",
        {"vision_config": {**TOWER, "vision_use_head": False}, "mm_tokens_per_image": 4,
         "image_token_index": 268},
    ),
}  # fmt: skip
# Published ids, of which the small vocabulary has none, and keys that only say how a checkpoint
# was saved.
_NO_IDS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
_SAVING = (
    *("model_type", "architectures", "auto_map", "torch_dtype", "dtype", "transformers_version"),
)


@dataclass(frozen=True, kw_only=True)
class SmallModel:
    """The description of a small checkpoint."""

    class_name: str  # class of the model in transformers
    config_class: str  # class of its config
    values: dict[str, Any]  # arguments of the config
    predictors: int = 0  # layers of its multi-token-prediction head


def small_form(
    described: Mapping[str, Any], *, where: str, stages: int = 1, keeps_vocabulary: bool = False
) -> SmallModel:
    """Returns the small form of a published model.

    `described` is its config.json, or its text part (a recipe's `model.shape`); `stages` are model
    chunks that share the layers: each gets every kind of layer. The vocabulary is kept for the
    model's own tokenizer, and otherwise that of bytes.

    Raises:
        ValueError: transformers does not build it, or it has images and is not of `WITH_IMAGES`.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    text = special_floats(described.get("text_config") or described)
    kind = str(text.get("model_type", described.get("model_type")))
    kind = f"{kind}_text" if f"{kind}_text" in CONFIG_MAPPING else kind
    text_class = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    class_name = (described.get("architectures") or [text_class])[0]
    if text_class is None or class_name not in (text_class, *WITH_IMAGES):
        raise ValueError(
            f"{where} is of the class {class_name}, model type {kind}, which has no shrunken form: "
            "a rehearsal takes the language models that the installed transformers builds, and "
            "with images Qwen3.5, Gemma 3 and Ministral 3; train a few steps of the recipe itself "
            "instead, with train.steps and another run_dir."
        )
    keys = {key: value for key, value in text.items() if key not in _SAVING}
    defaults = inspect.signature(CONFIG_MAPPING[kind].__init__).parameters
    published = {key: p.default for key, p in defaults.items() if p.default is not p.empty} | keys
    small = {
        k: min(published[k], n)
        for k, n in SIZES.items()
        if isinstance(published.get(k), (int, float))
        and not (keeps_vocabulary and k.startswith("vocab_size"))
    }
    if published.get("num_key_value_heads") == published.get("num_attention_heads"):
        small["num_key_value_heads"] = small["num_attention_heads"]
    if {"mamba_d_ssm", "mamba_d_head"} <= small.keys():  # the same size under two names
        small["mamba_d_ssm"] = small["mamba_n_heads"] * small["mamba_d_head"]
    if "qk_rope_head_dim" in small:  # transformers makes up the heads from it
        made = ("head_dim", "qk_head_dim")
        small, keys = ({k: v for k, v in d.items() if k not in made} for d in (small, keys))
    values = {**keys, **small, **_NO_IDS, **(QWEN3_5 if kind.startswith("qwen3_5") else {})}
    tied = bool(described.get("tie_word_embeddings", published.get("tie_word_embeddings", False)))
    values["tie_word_embeddings"] = tied

    kinds = layer_kinds({"model_type": kind, **values})
    first = max(2, *(kinds.index(one) + 1 for one in kinds))
    values["num_hidden_layers"] = count = first * stages
    for key, value in keys.items():
        if key.endswith(("layer_types", "block_type", "pattern")) and isinstance(value, list | str):
            # dense layers may be given a second time, by their number
            values[key] = value[:count] if key.startswith("mlp_") else value[:first] * stages
    config_class = CONFIG_MAPPING[kind].__name__
    if class_name != text_class:
        config_class, images = WITH_IMAGES[class_name]
        ids = {k: v for k, v in described.items() if k in images and "token_i" in k}
        values = {"text_config": {**values, "model_type": kind}, "tie_word_embeddings": tied}
        values |= images | (ids if keeps_vocabulary else {})
    return SmallModel(
        class_name=class_name,
        config_class=config_class,
        values=values,
        predictors=int(text.get("mtp_num_hidden_layers", 0)),
    )
