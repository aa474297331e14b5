"""Checkpoints of Hugging Face as others read them: published names, and the files of their base."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from nemo_rod.files import read_json, share

# Transformers 5 reads both names but writes the one unknown to Megatron-Bridge and transformers 4.
_NAMES = {"nemotron_h": {"backbone.embedding.weight": "backbone.embeddings.weight"}}
# It also saves experts one by one, though their published form is one tensor per layer.
_EXPERTS_TOGETHER = ("qwen3_5_moe", "qwen3_5_moe_text")
# Keys of config.json that do not affect a forward pass, beside those that all models have and those
# of generation: names, kernels, and settings of training.
NOT_COMPUTED = re.compile(
    r"_?name_or_path|_commit_hash|architectures|auto_map|(torch_)?dtype|use_\w+_kernels|ep_size"
    r"|_?attn_implementation\w*|use_cache|\w+_token_ids?|num_logits_to_keep|max_position_embeddings"
    r"|(transformers|unsloth)_\w+|tokenizer_class|model_max_length|prefix|task_specific_params"
    r"|\w*(dropout|pdrop|layerdrop|jitter_noise|loss_coef|loss_alpha)\w*|seq_aux|pretraining_tp"
    r"|output_router_logits|initializer_\w+|num_nextn_predict_layers|mtp_num_hidden_layers"
)
# Of a checkpoint, besides its weights: what other programs read with them, and its terms.
_BESIDE = re.compile(
    r"(generation_|preprocessor_|processor_|tokenizer_|video_preprocessor_)?config\.json|tokenizer\.json"
    r"|(special_tokens_map|added_tokens|vocab|chat_template|tekken)\.json|(merges|vocab)\.(txt|bpe)"
    r"|[\w.-]+\.(model(\.v\d+)?|jinja|tiktoken)"
    r"|[\w. -]*(?i:licen[cs]e|notice|copy(ing|right)|patents|terms|us(e|age)_policy|eula)[\w. -]*"
)
WEIGHTS = "[!.]*.safetensors"  # without those that macOS writes beside its files
_TEMPLATES = "additional_chat_templates"
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # safetensors' name -> torch's
_DTYPE = re.compile(rb'("(?:torch_)?dtype"\s*:\s*")(?:torch\.)?(?:b?float\d*|half)(")')


def published_names(folder: Path) -> dict[str, str]:
    """Returns the renames that a Hugging Face checkpoint needs: tensor name -> published name."""
    file = folder / "config.json"
    config = read_json(file) if file.is_file() else {}
    return _NAMES.get(str(config.get("model_type")), {})


def copy_beside(base: Path, made: Path, *, code: bool = False) -> None:
    """Makes the files beside a checkpoint's weights those of its base, byte for byte.

    Configuration, tokenizer, chat templates, licence and, with `code`, modules of Python stay what
    other programs have read. Only where the weights have another type does the configuration name
    it.
    """
    weights = [file.resolve() for file in base.glob(WEIGHTS) if file.is_file()]
    blobs = {file.parent for file in weights if file.parent.name == "blobs"}  # the hub's cache
    homes = {file.parent for file in weights if file.suffix == ".safetensors"}
    for inner in ("", _TEMPLATES):
        into, root = made / inner, base.resolve() / inner
        for file in sorted(filter(Path.is_file, (base / inner).glob("*"))):
            # a link may lead to a file of the owner's; those of a folder of links lead to one place
            goal, linked = file.resolve(), {home / inner / file.name for home in homes}
            if not (_BESIDE.fullmatch(file.name) or (code and file.suffix == ".py")):
                continue
            if goal.parent in {root, *blobs} or goal in linked:
                into.mkdir(exist_ok=True)
                shutil.copyfile(file, into / file.name)
            else:
                warning = f"{file} is a link to elsewhere than the weights, not copied"
                print(f"  Warning: {warning}: copy the base by cp -rL.", file=sys.stderr)
    sizes: Counter[str] = Counter()
    for kind, shape in tensor_kinds(made):
        sizes[kind] += math.prod(shape)
    dtype = _DTYPES.get(max(sizes, key=sizes.__getitem__))
    config = made / "config.json"
    if dtype is not None and config.is_file():
        text = config.read_bytes()
        if (changed := _DTYPE.sub(rb"\g<1>%s\g<2>" % dtype.encode(), text)) != text:
            config.write_bytes(changed)


def tensor_kinds(folder: Path) -> list[tuple[str, list[int]]]:
    """Returns the types, as safetensors names them, and shapes of a checkpoint's tensors."""
    from safetensors import safe_open

    kinds: list[tuple[str, list[int]]] = []
    for file in folder.glob(WEIGHTS):
        with safe_open(file, "pt") as tensors:
            slices = [tensors.get_slice(name) for name in tensors.offset_keys()]
            kinds += [(piece.get_dtype(), piece.get_shape()) for piece in slices]
    return kinds


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
