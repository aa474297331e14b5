"""Checkpoints with the published tensor names, where transformers writes different ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nemo_rod.files import read_json, share

# Transformers 5 reads both names but writes the one unknown to Megatron-Bridge and transformers 4.
_NAMES = {"nemotron_h": {"backbone.embedding.weight": "backbone.embeddings.weight"}}
# It also saves experts one by one, though their published form is one tensor per layer.
_EXPERTS_TOGETHER = ("qwen3_5_moe", "qwen3_5_moe_text")


def published_names(folder: Path) -> dict[str, str]:
    """Returns the renames that a Hugging Face checkpoint needs: tensor name -> published name."""
    file = folder / "config.json"
    config = read_json(file) if file.is_file() else {}
    return _NAMES.get(str(config.get("model_type")), {})


def load_quietly(folder: str | Path, **options: Any) -> Any:
    """Returns a checkpoint's model, as AutoModelForCausalLM loads it, without a bar of its own."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # it would stand among the lines of progress
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def save_published(model: Any, folder: Path) -> None:
    """Saves a transformers model as a checkpoint with the published names."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # its bar would stand among the lines of progress
    as_in_memory = model.config.model_type in _EXPERTS_TOGETHER
    model.save_pretrained(folder, **({"save_original_format": False} if as_in_memory else {}))
    if names := published_names(folder):
        from safetensors.torch import load_file, save_file

        for file in folder.glob("*.safetensors"):
            tensors = load_file(file)
            if not names.keys().isdisjoint(tensors):
                tensors = {names.get(name, name): tensor for name, tensor in tensors.items()}
                save_file(tensors, file, {"format": "pt"})
        if (index := folder / "model.safetensors.index.json").is_file():
            contents = read_json(index, "weight_map")
            files = contents["weight_map"].items()
            contents["weight_map"] = {names.get(name, name): file for name, file in files}
            index.write_text(json.dumps(contents, indent=2) + "\n")
    share(folder.glob("*.safetensors"))
