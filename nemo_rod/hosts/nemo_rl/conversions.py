"""Where NeMo-RL keeps the checkpoints that it converts from Hugging Face's form.

It converts a model once, keeps the result under the model's name or path, and takes whatever it
finds there. A local checkpoint that was made anew would then be trained in its old state, without a
word; and on several nodes the default, a folder of one node's home, is not seen by the others.
"""

from __future__ import annotations

import json
import os
from collections.abc import MutableMapping
from pathlib import Path

from nemo_rod.files import digest

FOLDER = "NRL_MEGATRON_CHECKPOINT_DIR"  # NeMo-RL's; its workers get the driver's environment
_PLACE = "NEMO_ROD_CONVERSIONS"  # what FOLDER was before the first run of this process


def keep_apart(model: str, out: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Names the folder of conversions, one for every state of a local checkpoint.

    `out`, the folder of the run, which every node sees, is used if neither the variable nor HF_HOME
    says where conversions belong.
    """
    place = environment.get(_PLACE) or environment.get(FOLDER, "").strip()
    if not place:
        home = environment.get("HF_HOME", "").strip()
        place = str(Path(home) / "nemo_rl") if home else str(Path(out).absolute() / "converted")
    # the next run of this process would else take this run's folder for the place of all
    environment[_PLACE] = place
    folder = Path(model)
    if folder.is_dir():
        place = str(Path(place) / _state(folder))
    environment[FOLDER] = place


def identity(model: str) -> str:
    """Returns what a model is whatever its path: its name, or its weights' files and their sizes.

    Their content is not read: references, which the curriculum's header has, are of that.
    """
    folder = Path(model)
    if not folder.is_dir():
        return model
    files = sorted(folder.glob("*.safetensors"))
    return digest(json.dumps([(file.name, file.stat().st_size) for file in files]).encode())


def _state(folder: Path) -> str:
    """Digest of the names, sizes and times of a checkpoint's files."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    known = [
        (str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns)
        for path in files
    ]
    return digest(json.dumps(known).encode())[:12]
