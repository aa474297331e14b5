"""The architectures that can be rehearsed, and the small form of a published model's config.

A small config has the published keys and replaces only sizes. Everything that decides which code
runs stays: class, kinds of layers and their order, norms, gates, tied embeddings, shared experts,
the multi-token-prediction head and the vision tower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

BLOCK_SIZE = 64  # tokens
# 256 bytes and special tokens; as in published models, some rows belong to no token
VOCABULARY = 384
# Sizes that replace those of a published config.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_key_head_dim": 16,  # Triton multiplies no smaller matrices
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
}
# Keys that follow from the sizes, by architecture.
_COMMON: dict[str, Any] = {"max_position_embeddings": 128, "bos_token_id": None}
QWEN3_5: dict[str, Any] = {
    **_COMMON,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
NEMOTRON: dict[str, Any] = {
    **_COMMON,
    # transformers' torch code pads every text to a multiple of it, and adds up the states of
    # several chunks along the wrong axis: as long as a block, and longer than any question
    "chunk_size": BLOCK_SIZE,
    "use_mamba_kernels": False,
    # transformers' torch code cuts smaller steps off, and the kernels that train do not
    "time_step_min": 1e-6,
}
IMAGES = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [],
}
# Places of these tokens among the special ones, which the small tokenizer has after 256 bytes.
_IMAGE_TOKENS = {
    "vision_start_token_id": 9,
    "vision_end_token_id": 10,
    "image_token_id": 12,
    "video_token_id": 13,
}


@dataclass(frozen=True, kw_only=True)
class Form:
    """An architecture with a shrunken form."""

    class_name: str  # class that published configs name
    config_class: str  # class of its config in transformers
    fixed: Mapping[str, Any]  # keys of the text config that follow from the small sizes
    has_images: bool = False  # whether the text config is a part of one for images and text
    predictors: int = 0  # layers of the multi-token-prediction head of published checkpoints
    # keys that published configs with experts have beside those of a recipe's `model.shape`
    published: Mapping[str, Any] = field(default_factory=dict)


FORMS: dict[str, Form] = {
    "qwen3": Form(
        class_name="Qwen3ForCausalLM",
        config_class="Qwen3Config",
        fixed={**_COMMON, "rope_theta": 10_000.0},
    ),
    "qwen3_5_text": Form(
        class_name="Qwen3_5ForConditionalGeneration",
        config_class="Qwen3_5Config",
        fixed=QWEN3_5,
        has_images=True,
        predictors=1,
    ),
    "qwen3_5_moe_text": Form(
        class_name="Qwen3_5MoeForConditionalGeneration",
        config_class="Qwen3_5MoeConfig",
        fixed=QWEN3_5,
        has_images=True,
        predictors=1,
    ),
    "nemotron_h": Form(
        class_name="NemotronHForCausalLM",
        config_class="NemotronHConfig",
        fixed=NEMOTRON,
        published={"n_shared_experts": 1, "routed_scaling_factor": 2.5},
    ),
}
# Keys of every published checkpoint's config that only say how it was saved.
_SAVING = (
    *("model_type", "architectures", "auto_map", "torch_dtype", "dtype", "transformers_version"),
)


@dataclass(frozen=True, kw_only=True)
class SmallModel:
    """The description of a small checkpoint."""

    class_name: str  # class of the model in transformers
    config_class: str  # class of its config
    values: dict[str, Any]  # arguments of the config
    predictors: int  # layers of its multi-token-prediction head
    summary: str  # properties shared with the published model, for users


def shrunken(described: Mapping[str, Any], *, where: str, stages: int = 1) -> SmallModel:
    """Returns the small form of a published model.

    Args:
        described: content of its config.json, or of its text part (a recipe's `model.shape`).
        where: name of the model, for errors.
        stages: model chunks that share the layers; each gets every kind of layer.

    Raises:
        ValueError: if the architecture has no shrunken form.
    """
    text = dict(described.get("text_config") or described)
    kind = str(text.get("model_type", described.get("model_type")))
    kind = kind if kind in FORMS else f"{kind}_text"
    published = (described.get("architectures") or [None])[0]
    known = [form.class_name for form in FORMS.values()]
    as_text = [name.replace("ForConditionalGeneration", "ForCausalLM") for name in known]
    if kind not in FORMS or published not in (None, *known, *as_text):
        raise ValueError(
            f"{where} is of the architecture {published or text.get('model_type')}, which has no "
            f"shrunken form: a rehearsal has those of {', '.join(known)}; train a few steps of the "
            "recipe itself instead, with train.steps and another run_dir."
        )
    form = FORMS[kind]
    keys = {**(form.published if "n_routed_experts" in text else {}), **text}
    keys = {key: value for key, value in keys.items() if key not in _SAVING}
    layers, pattern = _layers(keys, stages)
    values = {**keys, **{k: n for k, n in SIZES.items() if k in keys}, **form.fixed, **layers}
    tied = bool(described.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    values["tie_word_embeddings"] = tied
    predictors = int(text.get("mtp_num_hidden_layers", form.predictors))
    if predictors:
        values["mtp_num_hidden_layers"] = predictors
    class_name, config_class = published or form.class_name, form.config_class
    with_images = form.has_images and class_name == form.class_name
    if with_images:
        values = {"text_config": values, "vision_config": IMAGES, "tie_word_embeddings": tied}
        values |= {key: 256 + place for key, place in _IMAGE_TOKENS.items()}
    elif form.has_images:
        config_class = config_class.replace("Config", "TextConfig")
    parts = [f"layers {pattern}", "tied embeddings" if tied else "untied embeddings"]
    parts += [f"{predictors} layer for further tokens"] if predictors else []
    parts += ["vision tower"] if with_images else []
    return SmallModel(
        class_name=class_name,
        config_class=config_class,
        values=values,
        predictors=predictors,
        summary=f"{class_name}, {', '.join(parts)}",
    )


def _layers(text: Mapping[str, Any], stages: int) -> tuple[dict[str, Any], str]:
    """Returns the keys of the small layers, each kind for every stage, and their pattern."""
    if pattern := text.get("hybrid_override_pattern"):
        pattern = "".join(_with_every_kind(pattern) * stages)
        return {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}, pattern
    if kinds := text.get("layer_types"):
        small = _with_every_kind(kinds) * stages
        shown = "-".join(kind.split("_")[0] for kind in small)
        return {"layer_types": small, "num_hidden_layers": len(small)}, shown
    if interval := text.get("full_attention_interval"):
        count = int(interval) * stages
        return {"num_hidden_layers": count}, "-".join(["linear"] * (interval - 1) + ["full"])
    return {"num_hidden_layers": 2 * stages}, "full-full"


def _with_every_kind(kinds: Sequence[str]) -> list[str]:
    """Returns the shortest beginning that has every kind of layer."""
    length = max(list(kinds).index(kind) for kind in set(kinds)) + 1
    return list(kinds[:length])
