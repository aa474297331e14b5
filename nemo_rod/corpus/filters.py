"""The filter language of `SourceSpec.filter`: comparisons of a record's fields joined by ``and``.

    language == "de" and quality >= 0.8 and text != null

The left side is a field (dotted if nested: ``meta.language``), the right side a JSON value; a bare
word is a string. The operators are == != < <= > >=. Nothing is evaluated as code. A missing field
is an error, so that a misspelt name cannot silently drop a corpus.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_COMPARISON = re.compile(
    r"\s*(?P<field>[\w.\-/]+)\s*(?P<operator>==|!=|<=|>=|<|>)\s*"
    r"(?P<value>\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^\s\"'=<>!]+)\s*(?P<more>\band\b|$)"
)


@dataclass(frozen=True)
class Comparison:
    """One ``field operator value``."""

    field: str
    operator: str
    value: str | float | bool | None

    def holds(self, found: Any) -> bool:
        """Whether a record passes whose field has the value `found`.

        Raises:
            ValueError: The two values cannot be ordered (a string and a number).
        """
        try:
            return bool(_OPERATORS[self.operator](found, self.value))
        except TypeError:
            raise ValueError(
                f"filter compares {self.field} {self.operator} {self.value!r}, "
                f"but that field is {found!r}"
            ) from None


def parse_filter(text: str | None) -> tuple[Comparison, ...]:
    """Parses a filter, None for no filter, into comparisons that must all hold.

    Raises:
        ValueError: The text is not a valid filter.
    """
    if text is None:
        return ()
    comparisons: list[Comparison] = []
    position, more = 0, True
    while more:
        match = _COMPARISON.match(text, position)
        if match is None:
            raise ValueError(
                f"filter {text!r} cannot be read at {text[position:]!r}: "
                'write comparisons such as  language == "de" and quality >= 0.8'
            )
        comparisons.append(Comparison(match["field"], match["operator"], _value(match["value"])))
        position, more = match.end(), match["more"] == "and"
    return tuple(comparisons)


def lookup(record: Mapping[str, Any], field: str) -> Any:
    """Returns a field of a record, by its full name or else by following the dots.

    Raises:
        KeyError: The record has no such field.
    """
    if field in record:
        return record[field]
    found: Any = record
    for part in field.split("."):
        if not isinstance(found, Mapping) or part not in found:
            raise KeyError(field)
        found = found[part]
    return found


def _value(text: str) -> str | float | bool | None:
    if text.startswith("'"):
        return text[1:-1]
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, (str, int, float, bool)) or value is None else text
