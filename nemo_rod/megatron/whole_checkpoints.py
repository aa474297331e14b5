"""Checkpoints that a kill cannot corrupt.

When a checkpoint's tensors are on the disk, Megatron-Bridge writes `latest_train_state.pt` and
`latest_checkpointed_iteration.txt`, which name the checkpoint to resume from, and its
`run_config.yaml`, one after the other and in place: after a kill they may name one that cannot be
loaded. It also keeps the checkpoints with the highest numbers, loadable or not: the remains of a
later one would make it delete the one that it has just saved.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml  # type: ignore[import-untyped]

from nemo_rod.files import write_whole
from nemo_rod.progress import PREFIX

TRACKER = "latest_checkpointed_iteration.txt"
_LATEST_STATE, _STATE, _CONFIG = "latest_train_state.pt", "train_state.pt", "run_config.yaml"
# sections kept from run_config.yaml, in its order
_SECTIONS = {"checkpoint", "dataset", "model", "train"}


def write_config_whole(config: Any) -> None:
    """Makes Megatron-Bridge's configuration write its YAML, a checkpoint's last file, at once."""
    to_yaml = config.to_yaml

    def write(path: str) -> None:
        with TemporaryDirectory() as folder:
            to_yaml(made := f"{folder}/{_CONFIG}")
            write_whole(Path(path), Path(made).read_bytes())

    config.to_yaml = write


def name_the_last_whole(checkpoints: Path) -> None:
    """Makes the trackers name the last whole checkpoint, or none. For one process.

    Incomplete checkpoints are removed. If the tracker names an earlier checkpoint, later ones
    become `abandoned_<iteration>`, which no trainer deletes. The folder need not exist.

    Raises:
        OSError: the trackers cannot be written, or a folder cannot be removed.
    """
    tracker, latest_state = checkpoints / TRACKER, checkpoints / _LATEST_STATE
    said = tracker.read_bytes() if tracker.exists() else b""  # a person's may end in a line break
    named = said.strip(b" \r\n\0").removeprefix(b"iter_").lstrip(b"0").decode("ascii", "replace")
    whole = {}
    for path in sorted(checkpoints.glob("iter_*")):
        number = path.name.removeprefix("iter_")
        if not number.isdecimal():
            continue
        try:
            is_whole = yaml.safe_load((path / _CONFIG).read_bytes()).keys() >= _SECTIONS
            is_whole &= (path / _STATE).is_file()
        except (OSError, AttributeError, yaml.YAMLError):  # absent, or cut by an earlier version
            is_whole = False
        if is_whole:
            whole[str(int(number))] = path
        else:
            shutil.rmtree(path)
    if not whole:
        for file in (latest_state, tracker):
            file.unlink(missing_ok=True)
        return
    iteration = named if named in whole else max(whole, key=int)
    for later in [path for number, path in whole.items() if int(number) > int(iteration)]:
        abandoned = checkpoints / later.name.replace("iter_", "abandoned_")
        if abandoned.exists():
            shutil.rmtree(abandoned)
        later.rename(abandoned)
    state = (whole[iteration] / _STATE).read_bytes()
    if said == iteration.encode() and latest_state.exists() and latest_state.read_bytes() == state:
        return
    print(f"{PREFIX}{checkpoints}: resuming from step {iteration}, the last whole one", flush=True)
    write_whole(latest_state, state)
    write_whole(tracker, iteration.encode())
