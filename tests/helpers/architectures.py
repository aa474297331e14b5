"""Small checkpoints of the paper's architectures, of transformers' own classes.

Norms, biases and decays are moved off their start values, where a mistake in their mapping would
not show. The published checkpoints of Qwen3.5 are of the classes for images and text. Some have a
head for further tokens, which neither transformers nor training uses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_rod.corpus import load_tokenizer
from nemo_rod.published import save_published

COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
}
MLP = {"intermediate_size": 48}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
QWEN3_5: dict[str, Any] = {
    **COMMON,
    "num_hidden_layers": 4,
    "mtp_num_hidden_layers": 1,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
QWEN3_5_EXPERTS = {
    **QWEN3_5,
    **EXPERTS,
    "shared_expert_intermediate_size": 16,
    # the loss that balances experts depends on which blocks share a micro-batch: on the layout
    "router_aux_loss_coef": 0.0,
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
IMAGE_TOKENS = {
    "image_token_id": 250,
    "video_token_id": 251,
    "vision_start_token_id": 252,
    "vision_end_token_id": 253,
}
NEMOTRON: dict[str, Any] = {
    **COMMON,
    **MLP,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 8,
    "conv_kernel": 4,
    # Megatron-Bridge copies the specification for any but 128; no test has longer samples, for
    # transformers' torch code adds up the states of chunks along the wrong axis
    "chunk_size": 256,
    "use_mamba_kernels": False,
    # its torch code cuts smaller steps off, and the kernels that train do not
    "time_step_min": 1e-6,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
NEMOTRON_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": "*E",
}
PREDICTORS = "mtp."  # where tensors of the head for further tokens begin
# name -> class, its config's class, and what the config says
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5Config",
        {"text_config": {**QWEN3_5, **MLP}, "vision_config": IMAGES, **IMAGE_TOKENS},
    ),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", {**QWEN3_5, **MLP}),
    "qwen3_5_moe": (
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3_5MoeConfig",
        {"text_config": QWEN3_5_EXPERTS, "vision_config": IMAGES, **IMAGE_TOKENS},
    ),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", QWEN3_5_EXPERTS),
    "nemotron_h": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {**NEMOTRON, "hybrid_override_pattern": "M-M*-M*-"},
    ),
    "nemotron_3_nano": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {**NEMOTRON, **NEMOTRON_EXPERTS, "hybrid_override_pattern": "MEM*EME*"},
    ),
}


def make(name: str) -> Any:
    """A random model, the same at every call."""
    import transformers

    class_name, config_class, described = ARCHITECTURES[name]
    config = getattr(transformers, config_class)(**{**described, "tie_word_embeddings": False})
    torch.manual_seed(0)
    model = getattr(transformers, class_name)(config).to(torch.float32).eval()
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(0.1 * torch.randn(weight.shape, generator=noise))
            else:
                weight.mul_(3)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.add_(0.1 * torch.randn(buffer.shape, generator=noise))
    return model


def write(name: str, folder: Path) -> Path:
    """Writes the checkpoint of an architecture."""
    from safetensors.torch import load_file, save_file

    save_published(make(name), folder)
    load_tokenizer("byte").save_pretrained(folder)
    if name != "nemotron_h":
        file = folder / "model.safetensors"
        head = {f"{PREDICTORS}fc.weight": torch.ones(32, 64)}
        save_file({**load_file(file), **head}, file, {"format": "pt"})
    return folder


def load(folder: Path) -> Any:
    """The model of a checkpoint, of the class that its config names."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    model: Any = getattr(transformers, config.architectures[0])
    return model.from_pretrained(folder, dtype=torch.float32).eval()


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
