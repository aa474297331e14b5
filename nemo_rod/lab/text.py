"""Helpers of the lab's readers: facts and tables about the files of a run."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from nemo_rod.commands.arguments import Arguments, Key
from nemo_rod.commands.text import printable, table
from nemo_rod.files import read_json

TRUST = Key(
    "trust_remote_code",
    "true",
    "runs the code that lies beside a checkpoint of the folder; a folder cannot allow it itself",
    choices=("true", "false"),
    read=lambda word: word == "true",
)


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
    """Returns the JSON object that a file holds; empty if there is no file."""
    return read_json(path) if path.is_file() else {}


def add_verb(
    parser: Arguments, verbs: Any, main: Callable[[Namespace], None], name: str, usage: str,
    text: str,
) -> Arguments:  # fmt: skip
    """Returns the parser of one of a command's `verbs`, whose usage is added to the command's."""
    usage = f"{parser.prog} {name} {usage}"
    parser.usage = f"{parser.usage}\n       {usage}" if parser.usage else usage
    verb: Arguments = verbs.add_parser(name, usage=usage, help=text, description=text)
    verb.set_defaults(main=main)
    return verb


def user_cache() -> Path:
    """Returns ``$XDG_CACHE_HOME/nemo_rod``, with ``~/.cache`` as the default base."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nemo_rod"


def say_briefly(text: str) -> None:
    """Shows a slow step on a terminal until the next line is printed."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
