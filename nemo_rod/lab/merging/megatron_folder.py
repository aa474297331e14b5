"""Folders of Megatron's distributed checkpoints: the weights' folder and the files beside it.

    checkpoints/
      latest_checkpointed_iteration.txt, latest_train_state.pt      the latest iteration
      iter_0000100/ (or release/)
        .metadata, *.distcp                                         tensors and objects
        metadata.json                                               the format
        common.pt                                                   unsharded state; since
                                                                    core 0.19 an object among them
        run_config.yaml, train_state.pt, tokenizer/                 Megatron-Bridge's own

`latest_train_state.pt` and the last line are only Megatron-Bridge's; Megatron-LM instead keeps its
arguments in `common.pt`.
"""

from __future__ import annotations

import io
import re
import shutil
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from nemo_rod.files import interpreting, read_json

_TRACKER = "latest_checkpointed_iteration.txt"
_TRAIN_STATE = "train_state.pt"
_RUN_CONFIG = "run_config.yaml"
# Keys on the layout of the weights; the rest of common.pt is state of the training run.
COMMON_OBJECT = "common_state/"
_KEPT_OF_COMMON = ("args", "checkpoint_version", "content_metadata")


def is_one(folder: Path) -> bool:
    """Returns whether the folder is a Megatron checkpoint, or holds Megatron checkpoints."""
    if (folder / _TRACKER).is_file() or (folder / ".metadata").is_file():
        return True
    return any(folder.glob("iter_*/.metadata"))


def weights_folder(folder: Path) -> Path:
    """Returns the folder of the weights: `folder` itself, or its latest iteration.

    Raises:
        ValueError: if it holds no checkpoint in the format torch_dist.
    """
    if (folder / ".metadata").is_file():
        found = folder
    elif (folder / _TRACKER).is_file():
        found = folder / _latest(folder / _TRACKER)
    else:
        found = max(folder.glob("iter_*/.metadata")).parent
    form = found / "metadata.json"
    backend = read_json(form).get("sharded_backend") if form.is_file() else None
    if backend != "torch_dist" or not (found / ".metadata").is_file():
        raise ValueError(
            f"{found} is no Megatron checkpoint of the format torch_dist (sharded_backend in its "
            f"metadata.json is {backend}); save it with ckpt_format=torch_dist"
        )
    if (found / "modelopt_state").exists():
        raise ValueError(f"{found} was compressed by ModelOpt; merge the unquantised checkpoints")
    return found


def _latest(tracker: Path) -> str:
    """Returns the name of the folder that a tracker names."""
    cure = "restore it from a copy, or write the number of an iter_ folder beside it into it"
    with interpreting(tracker, cure=cure):
        latest = tracker.read_text().strip()
    if latest == "release":
        return latest
    if not re.fullmatch("[0-9]{1,18}", latest):
        raise ValueError(
            f"{tracker} is damaged: expected the number of an iteration, or release, and found "
            f"{latest[:40]!r}; {cure}"
        )
    return f"iter_{int(latest):07d}"


def vocabulary_size(weights: Path) -> int | None:
    """Returns the size of the unpadded vocabulary; None if the checkpoint does not state it."""
    file = weights / _RUN_CONFIG
    return OmegaConf.load(file).model.get("vocab_size") if file.is_file() else None


def begin(base: Path, out_dir: Path) -> Path:
    """Prepares `out_dir` for a model without training state, as Megatron converters do.

    Args:
        base: folder of the base's weights.
        out_dir: empty folder for the checkpoint.

    Returns:
        Folder for the weights, with all other files in it.

    Raises:
        ValueError: if the base is neither Megatron-Bridge's nor Megatron-LM's.
    """
    import torch

    common = _common(base)
    of_bridge = (base / _RUN_CONFIG).is_file()
    if not of_bridge and "args" not in common:
        raise ValueError(
            f"{base} holds neither {_RUN_CONFIG} nor Megatron-LM's arguments (args in its common "
            f"state), expected a checkpoint of Megatron-Bridge or Megatron-LM"
        )
    # Megatron-LM loads iteration 0 only from a "release" folder; Bridge imports to iteration 0.
    weights = out_dir / ("iter_0000000" if of_bridge else "release")
    weights.mkdir()
    (out_dir / _TRACKER).write_text("0" if of_bridge else "release")
    shutil.copyfile(base / "metadata.json", weights / "metadata.json")
    kept = {key: common[key] for key in _KEPT_OF_COMMON if key in common}
    torch.save({**kept, "iteration": 0}, weights / "common.pt")
    if of_bridge:
        _write_bridge_files(base, weights)
        shutil.copyfile(weights / _TRAIN_STATE, out_dir / f"latest_{_TRAIN_STATE}")
    if (base / "tokenizer").is_dir():
        shutil.copytree(base / "tokenizer", weights / "tokenizer")
    return weights


def _common(weights: Path) -> dict[str, Any]:
    """Returns a checkpoint's unsharded state."""
    from nemo_rod.lab.merging.pickles import load_state

    if (common := weights / "common.pt").is_file():
        return load_state(common, common)
    from nemo_rod.lab.merging.torch_dist import Checkpoint

    checkpoint = Checkpoint(weights, lambda name: name.startswith(COMMON_OBJECT))
    if not checkpoint.objects:
        raise ValueError(f"{weights} lacks common.pt; restore it from a copy")
    stored = io.BytesIO(checkpoint.object(checkpoint.objects[0]))
    return load_state(stored, weights)[0]


def _write_bridge_files(base: Path, weights: Path) -> None:
    import torch

    config = OmegaConf.load(base / _RUN_CONFIG)
    config.checkpoint.save_optim = config.checkpoint.save_rng = False  # or a load requests them
    OmegaConf.save(config, weights / _RUN_CONFIG)
    counters: dict[str, torch.Tensor] = torch.load(base / _TRAIN_STATE, weights_only=True)
    nothing = {key: torch.zeros_like(value) for key, value in counters.items()}
    torch.save(nothing, weights / _TRAIN_STATE)
