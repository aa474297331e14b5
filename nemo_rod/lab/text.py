"""Helpers of the lab's readers: facts and tables about the files of a run."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

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
