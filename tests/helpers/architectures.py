"""Small checkpoints of the paper's architectures and of others, with the sizes of rehearsals.

The published checkpoints of Qwen3.5 are of the classes for images and text. Some have a head for
further tokens, which neither transformers nor training uses.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_rod.checkpoints.published import save_published
from nemo_rod.corpus import load_tokenizer
from nemo_rod.lab.rehearsal import forms
from nemo_rod.lab.rehearsal.small_checkpoint import random_model

COMMON: dict[str, Any] = {
    **{key: forms.SIZES[key] for key in ("hidden_size", "head_dim")},
    **{key: forms.SIZES[key] for key in ("num_attention_heads", "num_key_value_heads")},
    "vocab_size": 256, "max_position_embeddings": 128, "bos_token_id": None,
    "tie_word_embeddings": False, "eos_token_id": 0,
}  # fmt: skip
MLP = {"intermediate_size": forms.SIZES["intermediate_size"]}


def sizes(*prefixes: str) -> dict[str, Any]:
    return {key: size for key, size in forms.SIZES.items() if key.startswith(prefixes)}


QWEN3_5 = {
    **COMMON, **sizes("linear_"), **forms.QWEN3_5, "num_hidden_layers": 4,
    "mtp_num_hidden_layers": 1, "linear_conv_kernel_dim": 4,
}  # fmt: skip
DENSE = {**QWEN3_5, **MLP}
EXPERTS = {**QWEN3_5, **sizes("num_experts", "moe_intermediate", "shared_expert")}
NEMOTRON = {
    **COMMON,
    **MLP,
    **sizes("mamba_num_", "mamba_head_", "n_groups", "ssm_", "time_step", "use_mamba"),
    "chunk_size": 128,  # as long as the longest blocks here, for the reason that forms.py gives
    "conv_kernel": 4,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
IMAGE_TOKENS = {
    "image_token_id": 250,
    "video_token_id": 251,
    "vision_start_token_id": 252,
    "vision_end_token_id": 253,
}


GEMMA4 = {  # which has no small form
    "vision_config": {**forms.TOWER, "num_key_value_heads": 2, "head_dim": 8},
    "audio_config": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
                     "output_proj_dims": 16, "subsampling_conv_channels": (8, 4)},
    "image_token_id": 268, "video_token_id": 269, "audio_token_id": 270,
}  # fmt: skip


def with_images(family: str, kind: str, **text: Any) -> tuple[str, str, dict[str, Any]]:
    name, tied = f"{family}ForConditionalGeneration", {"tie_word_embeddings": "gemma" in kind}
    config_class, images = forms.WITH_IMAGES.get(name, ("Gemma4Config", GEMMA4))
    text = {**COMMON, **MLP, "model_type": kind, **text, **tied}
    return name, config_class, {"text_config": text, **images, **tied}


PREDICTORS = "mtp."  # where tensors of the head for further tokens begin
# name -> class, its config's class, and what the config says
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", "Qwen3_5Config",
                {"text_config": DENSE, "vision_config": forms.IMAGES, **IMAGE_TOKENS}),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", DENSE),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeConfig",
                    {"text_config": EXPERTS, "vision_config": forms.IMAGES, **IMAGE_TOKENS}),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", EXPERTS),
    "ministral3": with_images("Mistral3", "ministral3", num_hidden_layers=4),
    "gemma3": with_images("Gemma3", "gemma3_text", num_hidden_layers=6, sliding_window=32),
    "gemma4": with_images(
        "Gemma4", "gemma4_text", num_hidden_layers=12, num_kv_shared_layers=6, sliding_window=32,
        layer_types=2 * [*5 * ["sliding_attention"], "full_attention"], pad_token_id=0,
        **sizes("hidden_size_per", "global_head"), vocab_size_per_layer_input=256,
        final_logit_softcapping=30.0,
    ),
    "nemotron_h": ("NemotronHForCausalLM", "NemotronHConfig",
                   {**NEMOTRON, "hybrid_override_pattern": "M-M*-M*-"}),
    "nemotron_3_nano": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            **NEMOTRON, **sizes("n_routed_experts", "num_experts_per_tok", "moe_"),
            "n_shared_experts": 1, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1,
            "mtp_hybrid_override_pattern": "*E", "hybrid_override_pattern": "MEM*EME*",
        },
    ),
}  # fmt: skip
# Other model types that Megatron-Bridge converts, each with the published keys that transformers'
# defaults lack; a rehearsal's rule shrinks them.
TYPES: dict[str, dict[str, Any]] = {
    "llama": {  # SmolLM2-135M
        **{"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3},
        **{"head_dim": 64, "num_hidden_layers": 30, "tie_word_embeddings": True},
    },
    "qwen2": {"tie_word_embeddings": True},
    "mistral": {},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {"num_key_value_heads": 1},
    "gemma4_text": {},
    "qwen3": {},
    "qwen3_moe": {},
    "qwen3_next": {},
    "gpt_oss": {},
    "olmoe": {},
    "deepseek_v2": {"first_k_dense_replace": 1, "num_experts_per_tok": 6, "topk_method": "greedy"},
    "deepseek_v3": {},
    "glm4_moe": {},
    "glm4_moe_lite": {},
    "ernie4_5_moe": {},
    "exaone4": {  # 1.2B
        **{"tie_word_embeddings": True, "sliding_window": None, "sliding_window_pattern": None},
        **{"num_hidden_layers": 30, "layer_types": ["full_attention"] * 30},
    },
    "exaone_moe": {},
    "minimax_m2": {},
    "hy_v3": {"first_k_dense_replace": 1},
    "falcon_h1": {"mamba_norm_before_gate": False, "mamba_rms_norm": False},
}


def make(name: str) -> Any:
    """A random model, the same at every call."""
    if name in TYPES:
        return random_model(forms.small_form({"model_type": name, **TYPES[name]}, where=name))
    class_name, config_class, described = ARCHITECTURES[name]
    return random_model(
        forms.SmallModel(
            class_name=class_name,
            config_class=config_class,
            values={"tie_word_embeddings": False, **described},
        )
    )


def write(name: str, folder: Path) -> Path:
    """Writes the checkpoint of an architecture."""
    save_published(make(name), folder)
    shared = r"(.*language_model.*\.)(\d)(\.self_attn\.(k_proj|v_proj|k_norm).*)"
    for at in (re.match(shared, key) for key in tensors(folder) if name == "gemma4"):
        if at:  # of layers that take keys and values of earlier ones: published, and not used
            add_tensor(folder, f"{at[1]}{int(at[2]) + 6}{at[3]}", 2 * tensors(folder)[at[0]])
    load_tokenizer("byte").save_pretrained(folder)
    if name in ARCHITECTURES and name not in ("nemotron_h", "ministral3", "gemma3", "gemma4"):
        add_tensor(folder, f"{PREDICTORS}fc.weight", torch.ones(32, 64))
    return folder


def add_tensor(folder: Path, name: str, values: torch.Tensor) -> Path:
    """Adds a tensor to a checkpoint of one file."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    save_file({**load_file(file), name: values}, file, {"format": "pt"})
    return folder


def token_losses(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Hugging Face's losses of the next-token targets within each row, nats, `[C, S - 1]`."""
    ids = torch.from_numpy(tokens.astype(np.int64))
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, :-1].double()
    loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    return loss.numpy()


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint under the name that its files give it, but those of MTP."""
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    every = {name: value for file in files for name, value in load_file(file).items()}
    return {name: value for name, value in every.items() if not name.startswith(PREDICTORS)}
