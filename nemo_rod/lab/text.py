"""Helpers of the lab's readers: facts and tables about the files of a run."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from nemo_rod.commands.arguments import Key
from nemo_rod.commands.text import printable, table
from nemo_rod.files import read_json


def printable_lines(text: str) -> str:
    """Returns text as `printable` does, but keeps its line breaks and tabs."""
    lines = text.split("\n")
    return "\n".join("\t".join(map(printable, line.split("\t"))) for line in lines)


def facts(pairs: Iterable[tuple[str, object]]) -> str:
    """Formats names and values, one pair per line, without pairs that have no value."""
    return table(("", ""), [pair for pair in pairs if pair[1] not in (None, "")])


def tenths(count: int) -> list[slice]:
    """Splits `count` rows into at most ten parts of about equal length, in order."""
    parts = min(10, count)
    ends = [count * i // parts for i in range(parts + 1)] if parts else []
    return [slice(first, end) for first, end in pairwise(ends)]


def read_object(path: Path) -> dict[str, Any]:
    """Returns a JSON object; empty if there is no such file.

    Raises:
        ValueError: if the file holds something else.
    """
    return read_json(path) if path.is_file() else {}


def whole_number(text: str, *, least: int = 0, most: float = math.inf) -> int:
    """Converts a number of digits only.

    Raises:
        ValueError: if there is another character, or the number lies outside [least, most].
    """
    if not (text.isdecimal() and least <= int(text) <= most):
        raise ValueError(text)
    return int(text)


def every_key(explanation: str) -> Key:
    """Returns the key for the time between two updates of a command, with its `explanation`."""
    return Key(
        name="every",
        value="SECONDS",
        help=explanation,
        expected="a whole number of seconds, 1 or more",
        read=partial(whole_number, least=1),
    )


def say_briefly(text: str) -> None:
    """Shows on a terminal what takes its time, until the next line."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
