"""Shared helpers of the commands: text in columns, and JSON files."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from nemo_rod.files import read_json


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Formats rows as columns under a header; ">" before a name right-aligns its column.

    Args:
        header: names of the columns; all empty for no header.
        rows: cells; None is left blank.
    """
    cells = [["" if cell is None else printable(str(cell)) for cell in row] for row in rows]
    names = [name.removeprefix(">") for name in header]
    lines = [names, *cells] if any(names) else cells
    widths = [max((len(line[i]) for line in lines), default=0) for i in range(len(header))]
    right = [name.startswith(">") for name in header]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


def printable(text: str) -> str:
    """Returns text with escapes for the characters that change a terminal's state or lines."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """Returns text as `printable` does, but keeps its line breaks and tabs."""
    lines = text.split("\n")
    return "\n".join("\t".join(map(printable, line.split("\t"))) for line in lines)


def facts(pairs: Iterable[tuple[str, object]]) -> str:
    """Formats names and values, one pair per line, without pairs that have no value."""
    return table(("", ""), [pair for pair in pairs if pair[1] not in (None, "")])


def say(text: str) -> None:
    """Prints a line to standard error at once."""
    print(text, file=sys.stderr, flush=True)


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
