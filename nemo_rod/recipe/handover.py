"""How a stage hands its folder over to the next.

A stage fills `<folder>.partial` and moves it into place whole, with a `manifest.json` of what it
was made from. A folder whose manifest matches is not made again. A folder made from something else
is never overwritten: the stage refuses and says what differs. An interrupted stage goes on in its
partial folder.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_rod.files import write_json

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Stage:
    """One step of a run.

    Attributes:
        name: as users type it in `rebuild=[...]`.
        command: what runs it alone, such as "train arm=rod".
        folder: what it makes.
        inputs: what it is made from: plain values by name. Called when all stages before are done.
        make: fills the partial folder and returns what is worth keeping in the manifest.
        title: one line for people.
        needs: names of the stages whose results it uses.
        runs_model: whether it starts processes that run a model, on GPUs where there are some.
        note: recorded in the manifest but never compared, such as the parallel layout.
        checks_itself: whether `make` knows by itself what an interrupted run left behind.
    """

    name: str
    command: str
    folder: Path
    inputs: Callable[[], Inputs]
    make: Callable[[Path], dict[str, Any]]
    title: str
    needs: tuple[str, ...] = ()
    runs_model: bool = True
    note: dict[str, Any] = field(default_factory=dict)
    checks_itself: bool = False

    @property
    def partial(self) -> Path:
        """Where the stage works until it is done."""
        return self.folder.with_name(self.folder.name + ".partial")


def is_done(stage: Stage) -> bool:
    """Whether the stage's folder is there, made from the same inputs.

    Args:
        stage: the stage; its inputs must be known.

    Raises:
        ValueError: if the folder, finished or interrupted, was made from other inputs.
    """
    for folder, name in ((stage.folder, "manifest.json"), (stage.partial, "inputs.json")):
        if (folder / name).exists() and not (folder == stage.partial and stage.checks_itself):
            made_from = json.loads((folder / name).read_text())["inputs"]
            _refuse_changes(stage, folder, made_from, _plain(stage.inputs()))
    return (stage.folder / "manifest.json").exists()


def move_aside(path: Path) -> None:
    """Makes room for a file or folder that is to be made again; nothing is deleted."""
    if path.exists():
        number = 1
        while (aside := path.with_name(f"{path.name}.replaced-{number}")).exists():
            number += 1
        os.replace(path, aside)


def make(stage: Stage) -> None:
    """Runs the stage and moves its folder into place."""
    inputs = _plain(stage.inputs())
    stage.partial.mkdir(parents=True, exist_ok=True)
    write_json(stage.partial / "inputs.json", {"inputs": inputs})
    try:
        outputs = stage.make(stage.partial)
    except ValueError:  # refused: leave nothing of a stage that never began
        if {file.name for file in stage.partial.iterdir()} <= {"inputs.json", "job.json"}:
            shutil.rmtree(stage.partial)
        raise
    path = stage.partial / "manifest.json"
    own = json.loads(path.read_text()) if path.exists() else {}  # what the maker says of its files
    handed = {"stage": stage.name, "inputs": inputs, "outputs": outputs, "note": stage.note}
    write_json(path, {**own, **handed})
    (stage.partial / "inputs.json").unlink()
    os.replace(stage.partial, stage.folder)


def outputs(folder: Path, *, made_by: str) -> dict[str, Any]:
    """What a finished stage kept in its manifest.

    Args:
        folder: the stage's folder.
        made_by: the command that makes it, for the error.

    Raises:
        ValueError: if the stage has not been run.
    """
    path = folder / "manifest.json"
    if not path.exists():
        raise ValueError(f"{folder} is not there yet: run `nemo-rod {made_by}` first.")
    return json.loads(path.read_text())["outputs"]


def flatten(prefix: str, value: Any) -> Inputs:
    """Nested mappings -> dotted keys, so that a refusal can name the one key that changed."""
    if isinstance(value, dict) and value:
        return {
            k: v for key, item in value.items() for k, v in flatten(f"{prefix}.{key}", item).items()
        }
    return {prefix: value}


def _refuse_changes(stage: Stage, folder: Path, made_from: Inputs, now: Inputs) -> None:
    for key in sorted({*made_from, *now}):
        old, new = made_from.get(key), now.get(key)
        if old != new:
            raise ValueError(
                f"{folder} was made with {key}={_show(old)}, but now it is {_show(new)}: add "
                f"rebuild=[{stage.name}] to make it again, or choose another run_dir."
            )


def _show(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _plain(inputs: Inputs) -> Inputs:
    return json.loads(json.dumps(inputs))
