"""The filter language of `SourceSpec.filter`: comparisons of a record's fields joined by ``and``.

    language == "de" and quality >= 0.8 and text != null

The left side is a field (dotted if nested: ``meta.language``; with a space or the like, in double
quotes), the right side a JSON value; a bare word is a text, and a date or time one in ISO 8601. The
operators are == != < <= > >=. Nothing is evaluated as code. A missing field is an error, and so is
a comparison of different types: otherwise a misspelt name, or a value in another notation, would
drop or keep a whole corpus unnoticed. Null equals only itself. Only `field != null` drops a record
without the field, before the comparisons after it are made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from numbers import Number
from operator import eq, ge, gt, le, lt, ne
from typing import Any

import numpy as np

_OPERATORS = {"==": eq, "!=": ne, "<": lt, "<=": le, ">": gt, ">=": ge}
# of Python, SQL and JavaScript; json.loads reads some of them
_OTHER_LITERALS = {"true", "false", "null", "none", "nil", "nan", "infinity", "-infinity"}
_KINDS = ((str, "a text"), (bool, "a boolean"), (Number, "a number"), (type(None), "null"))
_NAME = r"[\w.\-/]+"  # of a field that needs no quotes
_COMPARISON = re.compile(
    rf"\s*(?P<field>{_NAME}|\"[^\"]+\")\s*(?P<operator>==|!=|<=|>=|<|>)\s*"
    r"(?P<value>\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^\s\"'=<>!“”„‘’`;,&|()\[\]{}]+)"
    r"\s*(?P<more>\band\b|$)"
)


@dataclass(frozen=True)
class Comparison:
    """One ``field operator value``."""

    field: str
    operator: str
    value: str | float | bool | None

    def __str__(self) -> str:
        field = self.field if re.fullmatch(_NAME, self.field) else f'"{self.field}"'
        return f"{field} {self.operator} {json.dumps(self.value)}"

    def holds(self, value: Any) -> bool:
        """Returns whether a record whose field has this value passes; refuses another type."""
        expected: Any = self.value
        if isinstance(value, date):  # a time, too; without a zone it is one of UTC
            with suppress(ValueError, TypeError):
                times = [datetime.fromisoformat(text) for text in (value.isoformat(), expected)]
                value, expected = (time.replace(tzinfo=time.tzinfo or UTC) for time in times)
        kinds = {_type_name(value), _type_name(expected)}
        if (self.operator not in ("==", "!=")) if "null" in kinds else len(kinds) > 1:
            there = f"begin filter with {Comparison(self.field, '!=', None)} and"
            raise ValueError(
                f"filter compares {self}, but that field is {_type_name(value)}, {value!r:.60}: "
                f"{there if value is None else 'compare it with such a value'}"
            )
        if isinstance(expected, float):  # columns hold other numbers: decimals, or 32 bits
            if isinstance(value, Decimal):
                expected = Decimal(repr(expected))
            elif isinstance(value, float) and value == float(np.float32(expected)):
                expected = value
        return bool(_OPERATORS[self.operator](value, expected))


def parse_filter(text: str | None) -> tuple[Comparison, ...]:
    """Parses a filter, None for no filter, into comparisons that must all hold."""
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
        value: Any = match["value"]
        if value.lower() in _OTHER_LITERALS and value not in ("true", "false", "null"):
            raise ValueError(
                f"filter {text!r} has the value {value}: write true, false, null or a number, or "
                f'"{value}" for a text'
            )
        if value.startswith("'"):
            value = value[1:-1]
        else:
            try:
                value = json.loads(value, strict=False)
            except ValueError as error:
                if value.startswith('"'):
                    raise ValueError(
                        f"filter {text!r} has the value {value}, which is no JSON text ({error}): "
                        r"write \\ for a backslash, or single quotes around the text"
                    ) from None
        comparisons.append(Comparison(match["field"].strip('"'), match["operator"], value))
        position, more = match.end(), match["more"] == "and"
    return tuple(comparisons)


def lookup(record: Mapping[str, Any], field: str) -> Any:
    """Returns a field of a record, by its full name or else by following the dots.

    A field below null is null: tables store a missing struct like that.

    Raises:
        KeyError: the record has no such field.
        ValueError: it leads into a list, whose items have no names.
    """
    if field in record:
        return record[field]
    value: Any = record
    for part in field.split("."):
        if value is None:
            return None
        if isinstance(value, list):  # a map, too
            raise ValueError(f"field {field!r} is in a list, {value!r:.60}: name another field")
        if not isinstance(value, Mapping) or part not in value:
            raise KeyError(field)
        value = value[part]
    return value


def _type_name(value: object) -> str:
    for kind, name in _KINDS:
        if isinstance(value, kind):
            return name
    return f"a {type(value).__name__}"
