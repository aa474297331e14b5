"""What a config.json says of a run: what Megatron-Bridge ignores, and how long blocks may be."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from nemo_rod.config import Config
from nemo_rod.corpus.adapters.hub_files import file_of
from nemo_rod.files import read_json
from nemo_rod.run.handover import Stage
from nemo_rod.run.processes.pythons import can_be_found, python_with_megatron

# Keys that choose another way to compute, if they are set; without any, Bridge is not asked, as its
# import takes seconds.
_CHOOSES = re.compile(r".*(bias|softcap\w*|multiplier|clip_\w+|use_sliding_window|mlp_only_layers)")


def ignored_keys(model: str) -> list[str]:
    """Returns keys of a model's config.json of which Megatron-Bridge takes no account.

    There are none where the file or Bridge is not at hand, or the file has no unusual setting.
    """
    file = file_of(model, "config.json")
    if file is None or not can_be_found("megatron.bridge") or not any(_unusual(read_json(file))):
        return []
    module = "nemo_rod.megatron.config_keys"
    command = [python_with_megatron(), "-P", "-m", module, str(file.parent)]
    done = subprocess.run(command, capture_output=True, text=True)
    found: list[str] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else []
    return found


def sentence(keys: list[str], file: str) -> str:
    """Returns what the keys mean for a run."""
    return (
        f"Megatron-Bridge takes no account of {', '.join(keys)} of config.json of {file}: the base "
        "is compared with transformers before its first use, and refused if its losses differ"
    )


def check_positions(config: Config, stages: Sequence[Stage]) -> str:
    """Refuses blocks longer than the positions that the configuration of a base states.

    transformers and Megatron compute rotated ones beyond, where its losses mean nothing.
    """
    model, size = config.model, config.domain.block_size
    described = model.architecture or model.shape or {}
    if model.hf is not None and (file := file_of(model.hf, "config.json")) is not None:
        described = read_json(file)
    if all(stage.name != "base" for stage in stages):
        return ""
    inner = described.get("text_config")  # a multimodal model has one
    text = inner if inner and isinstance(inner, dict) else described
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    rope = rope if isinstance(rope, dict) else {}
    try:
        known = int(text.get("max_position_embeddings") or text.get("n_positions") or sys.maxsize)
        if rope.get("rope_type", rope.get("type")) in ("dynamic", "linear", "yarn"):
            first = float(rope.get("original_max_position_embeddings") or known)
            known = max(known, int(first * float(rope.get("factor") or 1)))
    except (TypeError, ValueError, OverflowError):  # transformers says what is wrong with them
        return ""
    if size > known:
        raise ValueError(
            f"domain.block_size={size} is longer than the {known} positions of the model: set it "
            f"to {known} or less, or raise max_position_embeddings in a copy of a base with rope."
        )
    return ""


def _unusual(config: dict[str, Any]) -> Iterator[str]:
    for key, value in config.items():
        if key in ("rope_scaling", "rope_parameters") and isinstance(value, dict):
            if value.get("rope_type", value.get("type", "default")) != "default":
                yield key
        elif isinstance(value, dict):
            yield from _unusual(value)
        elif value and _CHOOSES.fullmatch(key):
            yield key
