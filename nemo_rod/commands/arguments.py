"""Command lines of commands that take paths: argparse, and `key=value` words."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from nemo_rod.bounds import numbers
from nemo_rod.commands.text import table

_HELP_WIDTH = 76  # characters per line of help, beside the explained word


@dataclass(frozen=True)
class Key:
    """A `name=value` word of a command."""

    name: str  # part of the word before the "="
    value: str  # name of the value in the help
    help: str  # effect of the key, in a few words
    choices: tuple[str, ...] = ()  # accepted values; empty for any
    read: Callable[[str], Any] = str  # converts the value; raises ValueError for an invalid one
    bound: str = ""  # of a number, as `bounds.numbers` has it
    required: bool = False  # whether the word is mandatory
    default: Any = None  # value without the word

    def convert(self, text: str) -> Any:
        """Returns the value of a word.

        Raises:
            ValueError: the value is invalid.
        """
        try:
            value = self.read(text)
            is_out = self.bound and not numbers(self.bound).accepts(value)
            if is_out or (self.choices and text not in self.choices):
                raise ValueError(text)
            return value
        except ValueError:
            expected = f"a{' whole' * (self.read is int)} number {self.bound}"
            if self.choices:
                expected = f"{', '.join(self.choices[:-1])} or {self.choices[-1]}"
            raise ValueError(f"{self.name}={text} is not valid: expected {expected}.") from None


class Arguments(argparse.ArgumentParser):
    """The parser of a command: argparse's, with `key=value` words anywhere among the paths.

    A word belongs to a key only if the command has that key: a path may contain a "=". An invalid
    command line raises a ValueError of one sentence, which ends with the usage, instead of leaving
    the process.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options
        )
        self.keys: dict[str, Key] = {}
        self._words: list[str] = []

    def add_keys(self, *keys: Key) -> None:
        """Adds the `key=value` words of the command, all at once."""
        self.keys = {key.name: key for key in keys}
        self.add_table("keys", [(f"{key.name}={key.value}", key.help) for key in keys])

    def add_table(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Adds a section of words and their meaning to the help."""
        lines = [
            (word if number == 0 else "", line)
            for word, text in rows
            for number, line in enumerate(textwrap.wrap(text, _HELP_WIDTH))
        ]
        self.add_argument_group(title, table(("", ""), lines))

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parses the words that belong to no key like argparse.

        Raises:
            ValueError: a word is unknown, missing, repeated, or has an invalid value.
        """
        self._words = list(sys.argv[1:] if args is None else args)
        others: list[str] = []
        values: dict[str, str] = {}
        for word in self._words:
            name, equals, value = word.partition("=")
            if not equals or name not in self.keys:
                others.append(word)
            elif name in values:
                self.error(f"{name}= is given twice")
            else:
                values[name] = value
        options, extra = super().parse_known_args(others, namespace)
        if extra:
            self.error(f"unrecognised or extra argument: {' '.join(extra)}")
        for name, key in self.keys.items():
            if key.required and name not in values:
                self.error(f"{name}= is missing")
            setattr(options, name, key.convert(values[name]) if name in values else key.default)
        return options, []

    def error(self, message: str) -> NoReturn:
        """Refuses the command line.

        Raises:
            ValueError: always.
        """
        usage = " or ".join(line.strip() for line in (self.usage or self.prog).splitlines())
        line = " ".join([self.prog, *self._words])
        raise ValueError(f"'{line}' is not understood: expected {usage} ({message}).")
