"""Random checkpoints of the shrunken architectures, of transformers' own classes.

Norms, biases and decays differ from their initial values, which would hide a wrong mapping.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nemo_rod.checkpoints.published import save_published
from nemo_rod.lab.rehearsal.forms import SmallModel

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def random_model(small: SmallModel) -> Any:
    """Returns a random model, the same at every call, fp32."""
    import transformers

    config = getattr(transformers, small.config_class)(**small.values)
    torch.manual_seed(0)
    model = getattr(transformers, small.class_name)(config).to(torch.float32).eval()
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(0.1 * torch.randn(weight.shape, generator=noise))
            else:
                weight.mul_(3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.1 * torch.randn(buffer.shape, generator=noise))
    return model


def write_checkpoint(small: SmallModel, folder: Path, *, precision: str) -> None:
    """Writes a random checkpoint, including the tensors that transformers itself does not write."""
    save_published(random_model(small).to(_DTYPES[precision]), folder)
    if not small.predictors:
        return
    # The multi-token-prediction head of published checkpoints, which transformers leaves out. Its
    # layer has full attention; its experts, if there are any, are stored one by one.
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file)
    texts = [name for name in tensors if ".layers." in name and "visual" not in name]
    last = max(int(name.split(".layers.")[1].split(".")[0]) for name in texts)
    head: dict[str, torch.Tensor] = {}
    for name in texts:
        if f".layers.{last}." in name:
            key, tensor = name.split(f".layers.{last}.")[1], tensors[name]
            head |= {f"mtp.layers.0.{k}": value for k, value in _single(key, tensor).items()}
    size = head["mtp.layers.0.input_layernorm.weight"].shape[0]
    norm = head["mtp.layers.0.input_layernorm.weight"]
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        head[f"mtp.{name}.weight"] = norm.clone()
    generator = torch.Generator().manual_seed(2)
    head["mtp.fc.weight"] = (0.05 * torch.randn(size, 2 * size, generator=generator)).to(norm.dtype)
    head = {name: tensor.contiguous().clone() for name, tensor in head.items()}
    save_file({**tensors, **head}, file, {"format": "pt"})


def _single(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns a layer's tensor in the published form of the head: experts one by one."""
    if name == "mlp.experts.gate_up_proj":
        parts = {}
        for number, expert in enumerate(tensor):
            gate, up = expert.chunk(2)
            parts[f"mlp.experts.{number}.gate_proj.weight"] = gate
            parts[f"mlp.experts.{number}.up_proj.weight"] = up
        return parts
    if name == "mlp.experts.down_proj":
        return {f"mlp.experts.{n}.down_proj.weight": expert for n, expert in enumerate(tensor)}
    return {name: tensor}
