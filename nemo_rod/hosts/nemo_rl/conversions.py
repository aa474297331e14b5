"""The folder of the checkpoints that NeMo-RL converts from Hugging Face's form.

NeMo-RL converts a model once, stores the result under the model's name or path, and reuses any
checkpoint that it finds there. Without a folder for every state, a local checkpoint that was made
anew would be trained in its old state, without a warning; and on several nodes the default, a
folder in one node's home, is not visible to the others.
"""

from __future__ import annotations

import json
import os
from collections.abc import MutableMapping
from pathlib import Path

from nemo_rod.files import digest

FOLDER = "NRL_MEGATRON_CHECKPOINT_DIR"  # NeMo-RL's; its workers get the driver's environment
_PLACE = "NEMO_ROD_CONVERSIONS"  # value of FOLDER before the first run of this process


def keep_apart(model: str, out: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets the folder of conversions, one for every state of a local checkpoint.

    Args:
        model: name or folder of the model.
        out: folder of the run, which every node sees; used if neither NeMo-RL's variable nor
            HF_HOME names a place.
        environment: variables of the environment.
    """
    place = environment.get(_PLACE) or environment.get(FOLDER, "").strip()
    if not place:
        home = environment.get("HF_HOME", "").strip()
        place = str(Path(home) / "nemo_rl") if home else str(Path(out).absolute() / "converted")
    # otherwise the next run of this process would take this run's folder for the common place
    environment[_PLACE] = place
    folder = Path(model)
    if folder.is_dir():
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        stats = [(str(file.relative_to(folder)), file.stat()) for file in files]
        state = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        place = str(Path(place) / digest(json.dumps(state).encode())[:12])
    environment[FOLDER] = place


def identity(model: str) -> str:
    """Returns a model's name, or a digest of the names and sizes of its weights' files.

    It does not depend on the path. The content is not read here, because the references, whose
    digest is in the curriculum's header, depend on it.
    """
    folder = Path(model)
    if not folder.is_dir():
        return model
    files = sorted(folder.glob("*.safetensors"))
    return digest(json.dumps([(file.name, file.stat().st_size) for file in files]).encode())
