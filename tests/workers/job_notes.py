"""What programs of swapped-in jobs share: notes of their steps, changed keys, and their answers."""

import json
import os
import signal
from pathlib import Path
from typing import Any


def note_step(
    out: str | Path, row: dict[str, Any] | None, *, step: int, die_at: int | None
) -> None:
    """Adds a row, on the rank that has one, to `OUT/steps.jsonl`; kills the process at a step."""
    if row is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
        with open(Path(out) / "steps.jsonl", "a") as file:
            file.write(json.dumps({"step": step, **row}) + "\n")
    if step == die_at:
        os.kill(os.getpid(), signal.SIGKILL)


def change(target: Any, key: str, value: Any, *, known: bool = False) -> None:
    """Sets an attribute by its dotted name; a `known` one must be there."""
    *path, last = key.split(".")
    for part in path:
        target = getattr(target, part)
    assert not known or hasattr(target, last), key
    setattr(target, last, value)


def answer(function: Any, *args: Any, **kwargs: Any) -> str:
    """The message of a refused call; of one that is not, an empty one."""
    try:
        function(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return ""


def say(answers: dict[str, Any]) -> None:
    """Prints answers for `swap_in_oracle.answers`."""
    print("SAID " + json.dumps(answers), flush=True)
