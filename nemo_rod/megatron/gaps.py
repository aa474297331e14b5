"""Refuses incomplete loads and exports of a checkpoint, on which Megatron-Bridge only warns."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from megatron.bridge import AutoBridge
from megatron.core.utils import get_model_config
from safetensors import safe_open

from nemo_rod.checkpoints.published import copy_beside
from nemo_rod.files import read_json, write_json
from nemo_rod.megatron.scoring.forward_only import patching
from nemo_rod.ranks import all_or_none, from_all_ranks, on_all_ranks

# A value that no weight has and that fp32 and bf16 both represent exactly. (A diverged weight
# could be NaN.)
_UNSET = -(2.0**100)
# Tensors that Megatron-Bridge skips if the model class has no place for them: multi-token
# predictors, which are turned off, vision towers, and tables that models recompute.
_LEFT_OUT = re.compile(r"^mtp\.|(^|\.)visual\.|rotary_emb\.|\.masked_bias$")


def refuse_gaps(provider: Any, state: Any, hf: str) -> None:
    """Makes a provider raise unless every parameter is set and every relevant tensor is read.

    Args:
        provider: Megatron-Bridge's provider, which loads the weights before it wraps the model.
        state: the checkpoint's tensors, as Megatron-Bridge reads them.
        hf: name of the checkpoint for messages.
    """
    read: set[str] = set()
    source = state.source
    load_tensors = source.load_tensors

    def note(names: list[str]) -> Any:
        read.update(names)
        return load_tensors(names)

    def mark(model: list) -> list:
        source.load_tensors = note
        with torch.no_grad():
            for _, parameter in _parameters(model):
                parameter.fill_(_UNSET)
        return model

    def check(model: list) -> list:
        source.load_tensors = load_tensors
        unset = [name for name, parameter in _parameters(model) if (parameter == _UNSET).any()]
        relevant = sorted(name for name in source.get_all_keys() if _counts(name, provider))
        unread = on_all_ranks([name not in read for name in relevant])
        without_place = [n for n, is_unread in zip(relevant, unread, strict=True) if is_unread]
        gaps = [
            f"{len(names)} {kind} ({_first_three(names)})"
            for names, kind in (
                (sorted({*from_all_ranks(unset)}), "parameter(s) of the model without a tensor"),
                (without_place, "tensor(s) without a place in the model"),
            )
            if names
        ]
        if gaps:
            wanted = "whose tensors have the published names and fit its config.json"
            cure = f"give a checkpoint {wanted}"
            if len(gaps) == 1 and without_place:  # biases, for which its config.json may well ask
                cure = "choose another base, as Megatron-Bridge builds this model type without them"
            raise ValueError(f"{hf} leaves {' and '.join(gaps)}: {cure}.")
        return model

    provider.register_pre_wrap_hook(mark, prepend=True)
    provider.register_pre_wrap_hook(check)


def save_hf(bridge: AutoBridge, model: list, folder: Path) -> None:
    """Writes a model as a Hugging Face checkpoint, by the bridge that loaded it. Collective.

    It is the checkpoint that the bridge has loaded, with other weights: see `copy_beside`.

    Raises:
        ValueError: the checkpoint lacks a tensor of the model; raised on every rank.
    """
    save = safetensors.torch.save_file

    def with_format(tensors: Any, file: Any, metadata: Any = None) -> None:
        save(tensors, file, metadata or {"format": "pt"})  # some readers refuse files without it

    # By default, some versions leave out every file of the checkpoint that has a tensor unknown to
    # the model, such as those of multi-token predictors.
    with patching(safetensors.torch, "save_file", with_format):
        bridge.save_hf_weights(model, folder, show_progress=False, strict=False)
    source = bridge.hf_pretrained.state.source
    config = get_model_config(model[0])

    def check() -> None:
        written: dict[str, str] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                written |= dict.fromkeys(tensors.keys(), file.name)
        lost = sorted(n for n in source.get_all_keys() if _counts(n, config) and n not in written)
        if lost:
            raise ValueError(
                f"The export to {folder} lacks {len(lost)} tensor(s) of the model "
                f"({_first_three(lost)}), which Megatron-Bridge left out: export its checkpoint "
                "again with another version."
            )
        index = folder / "model.safetensors.index.json"  # may list other tensors than its files
        if index.exists() and (listed := read_json(index, "weight_map"))["weight_map"] != written:
            write_json(index, {**listed, "weight_map": written})
        code = bool(bridge.hf_pretrained.trust_remote_code)  # its code is copied by consent alone
        base = str(bridge.hf_pretrained.model_name_or_path)
        base = base if Path(base).is_dir() else snapshot_download(base, local_files_only=True)
        copy_beside(Path(base), folder, code=code)

    all_or_none(lambda: check() if dist.get_rank() == 0 else None)


def _parameters(model: list) -> list[tuple[str, torch.nn.Parameter]]:
    """Returns the parameters that a checkpoint must set: all but multi-token predictors."""
    named = [pair for chunk in model for pair in chunk.named_parameters()]
    return [(name, parameter) for name, parameter in named if "mtp" not in name.split(".")]


def _counts(name: str, config: Any) -> bool:
    """Returns whether the model would be incomplete without this tensor of the checkpoint."""
    if name == "lm_head.weight" and config.share_embeddings_and_output_weights:
        return False
    layer = re.search(r"\.layers\.(\d+)\.", name)  # multi-token predictors may follow the last
    return not _LEFT_OUT.search(name) and not (layer and int(layer[1]) >= config.num_layers)


def _first_three(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
