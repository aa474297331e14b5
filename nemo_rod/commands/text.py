"""Shared helpers of the commands: text in columns, and lines on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from nemo_rod.progress import PREFIX


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


def say(text: str) -> None:
    """Prints a line to standard error at once."""
    print(printable(text), file=sys.stderr, flush=True)


@dataclass
class Lines:
    """A stream that indents progress lines; on a terminal, each replaces the one before."""

    stream: TextIO
    _replaces: bool = False

    def write(self, text: str) -> int:
        """Writes text; `print` passes a line and its end separately."""
        before, marked = self._replaces, text.startswith(PREFIX)
        shown = "  " + text.removeprefix(PREFIX) if marked else text
        if text != "\n":  # a job's remarks are marked, too, but have no parts
            self._replaces = marked and "  " in text and self.stream.isatty()
            if self._replaces:
                shown = "\033[A\033[2K" * before + f"\033[?7l{shown}\033[?7h"  # it never wraps
        return self.stream.write(shown)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
