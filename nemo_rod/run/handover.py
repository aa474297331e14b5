"""A stage, and the hand-over of its folder to the next one.

Most stages fill `<folder>.partial` and rename it into place, with a `manifest.json` of their
inputs. A folder whose manifest matches is done. A folder with other inputs is never overwritten:
the stage refuses it and names the difference. An interrupted stage resumes in its partial folder.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_rod.files import read_json, refuse_links, share, write_json
from nemo_rod.selection.arms import TYPED

Inputs = dict[str, Any]
_NONE: Mapping[str, type] = {}
# input name of a stage -> config key that users set
_USER_KEYS = {f"arm.{name}": typed for name, typed in TYPED.items() if typed}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One step of a run, with its own command, so that it can run alone and elsewhere."""

    name: str  # name as typed in `rebuild=[...]`
    command: str  # command that runs it alone, such as "train arm=rod"
    title: str  # one line for users
    folder: Path  # folder of its results
    proof: tuple[Path, ...]  # files that exist once it is done, for any inputs
    # whether its results exist for the current inputs; called once its needs are done. Raises
    # ValueError if the results have other inputs
    is_done: Callable[[], bool]
    run: Callable[[], None]  # runs it in this process
    # paths moved aside before it is done again; empty if it always runs
    results: tuple[Path, ...] = ()
    needs: tuple[str, ...] = ()  # names of the stages whose results it uses
    feeds: str = ""  # name of a stage that needs it, though that one does not know
    is_alone: bool = False  # whether the command that it shares with that stage runs it alone
    runs_model: bool = True  # whether it starts processes that run a model, on GPUs if available
    extra: str = "bridge"  # extra of nemo-rod whose packages it needs; "" for none
    # returns the inputs of the results; None for stages that hand over no folder
    inputs: Callable[[], Inputs] | None = None
    # runs the checks that are possible beforehand and returns a line about the planned work
    preview: Callable[[], str] | None = None

    def is_there(self) -> bool:
        """Returns whether its results exist, for any inputs."""
        return all(file.exists() for file in self.proof)

    def move_aside(self) -> None:
        """Moves its results aside, so that they can be made again; nothing is deleted."""
        for path in self.results:
            if path.exists():
                number = 1
                while (aside := path.with_name(f"{path.name}.replaced-{number}")).exists():
                    number += 1
                os.replace(path, aside)


@dataclass(frozen=True)
class HandOver:
    """A folder that a stage hands over as a whole."""

    name: str  # name of the stage
    folder: Path  # folder that the stage makes
    # returns its inputs, plain values by name. Called when all earlier stages are done
    inputs: Callable[[], Inputs]
    # fills the partial folder and returns the manifest's outputs
    make: Callable[[Path], dict[str, Any]]
    # recorded in the manifest but never compared, such as the parallel layout
    note: dict[str, Any] = field(default_factory=dict)
    # whether `make` itself validates the files of an interrupted run
    checks_itself: bool = False
    proof: tuple[str, ...] = ("manifest.json",)  # files without which the folder is not finished

    def stage(
        self,
        command: str,
        title: str,
        *,
        needs: tuple[str, ...] = (),
        runs_model: bool = True,
        extra: str = "bridge",
        void: tuple[Path, ...] = (),
    ) -> Stage:
        """Returns the `Stage` that makes the folder; making it again moves `void` files aside."""
        return Stage(
            name=self.name,
            command=command,
            title=title,
            folder=self.folder,
            proof=tuple(self.folder / name for name in self.proof),
            is_done=self.is_done,
            run=self.run,
            results=(self.folder, partial(self.folder), *void),
            needs=needs,
            runs_model=runs_model,
            extra=extra,
            inputs=self.inputs,
        )

    def is_done(self) -> bool:
        """Returns whether the folder exists for the current inputs, which must be known.

        Raises:
            ValueError: the folder, finished or interrupted, has other inputs, or is foreign.
        """
        unfinished = partial(self.folder)
        for folder, name in ((self.folder, "manifest.json"), (unfinished, "inputs.json")):
            if (folder / name).exists() and not (folder == unfinished and self.checks_itself):
                recorded, current = read_record(folder / name, "inputs"), _plain(self.inputs())
                advice = f"add rebuild=[{self.name}] to make it again"
                refuse_changes(folder, recorded, current, advice)
        missing = [name for name in self.proof if not (self.folder / name).exists()]
        if missing and self.folder.exists() and any(self.folder.iterdir()):
            raise ValueError(
                f"{self.folder} holds files but no {missing[0]}, so {self.name} has not finished "
                f"it: add rebuild=[{self.name}] to move it aside and make it again, or choose "
                "another run_dir."
            )
        return not missing

    def run(self) -> None:
        """Makes the folder and renames it into place."""
        inputs, unfinished = _plain(self.inputs()), partial(self.folder)
        if self.name != "base":  # a link of ours may lead to its checkpoint
            refuse_links(unfinished)
        write_json(unfinished / "inputs.json", {"inputs": inputs}, below=unfinished.parent)
        try:
            outputs = self.make(unfinished)
        except ValueError:  # refused before any work: remove the folder
            if {file.name for file in unfinished.iterdir()} <= {"inputs.json", "job.json"}:
                shutil.rmtree(unfinished)
            raise
        path = unfinished / "manifest.json"
        own = read_json(path) if path.exists() else {}  # recorded by `make`
        record = {"stage": self.name, "inputs": inputs, "outputs": outputs, "note": self.note}
        write_json(path, own | record)
        (unfinished / "inputs.json").unlink()
        share(unfinished.rglob("*.safetensors"))
        os.replace(unfinished, self.folder)


def in_order(stages: Iterable[Stage]) -> list[Stage]:
    """Returns stages in an order in which they can run, otherwise as given.

    Raises:
        ValueError: stages wait for each other.
    """
    pending = {stage.name: stage for stage in stages}
    ordered: list[Stage] = []
    while pending:
        ready = next((s for s in pending.values() if not pending.keys() & {*s.needs}), None)
        if ready is None:
            names = ", ".join(pending)
            raise ValueError(f"The stages {names} wait for each other: correct `needs`.")
        ordered.append(pending.pop(ready.name))
    return ordered


def partial(folder: Path) -> Path:
    """Returns the folder in which a stage works until it is complete."""
    return folder.with_name(folder.name + ".partial")


def outputs(folder: Path, *, made_by: str, keys: Mapping[str, type] = _NONE) -> dict[str, Any]:
    """Returns the outputs in the manifest of a stage's folder.

    Raises:
        ValueError: the command `made_by` has not been run, or the manifest is damaged, or lacks
            one of the keys and types.
    """
    path = folder / "manifest.json"
    if not path.exists():
        raise ValueError(f"{folder} is not there yet: run `nemo-rod {made_by}` first.")
    values = read_record(path, "outputs")
    for key, kind in keys.items():
        if not isinstance(values.get(key), kind):
            raise ValueError(
                f"{path} has {key}={values.get(key)!r} among its outputs, expected "
                f"{kind.__name__}: restore it from a copy, or run its stage again"
            )
    return values


def read_record(path: Path, key: str) -> Inputs:
    """Returns an object inside of the object that a file holds."""
    value = read_json(path, key)[key]
    if not isinstance(value, dict):
        raise ValueError(
            f"{path} has {key}={value!r}, expected an object: restore it from a copy, or run its "
            "stage again"
        )
    return value


class OtherInputs(ValueError):
    """Results were made with other inputs than the current ones.

    Attributes:
        difference: a clause on the results and the input that differs, without a remedy.
    """

    def __init__(self, difference: str, advice: str) -> None:
        super().__init__(f"{difference}: {advice}, or choose another run_dir.")
        self.difference = difference


def refuse_changes(path: Path, recorded: Inputs, current: Inputs, advice: str) -> None:
    """Refuses results of other inputs than the current ones.

    Args:
        path: the results.
        recorded: their inputs.
        current: inputs of this command.
        advice: how to replace the results.

    Raises:
        OtherInputs: an input differs; the message names all that do, as users type them.
    """

    def short(value: Any) -> str:
        text = "nothing" if value is None else str(value)
        return text if len(text) <= 60 else text[:57] + "..."

    changed: dict[str, str] = {}
    named = {key: _USER_KEYS.get(key, key) for key in {*recorded, *current}}
    for key in sorted(named, key=named.__getitem__):
        old, new = recorded.get(key), current.get(key)
        if old != new:
            changed.setdefault(named[key], f"={short(old)}, but now it is {short(new)}")
    if changed:
        (first, values), *others = changed.items()
        also = f" ({', '.join(name for name, _ in others)} changed, too)" if others else ""
        raise OtherInputs(f"{path} was made with {first}{values}{also}", advice)


def _plain(inputs: Inputs) -> Inputs:
    return json.loads(json.dumps(inputs))
