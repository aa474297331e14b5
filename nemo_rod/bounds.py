"""The values that configuration keys accept: declared with the defaults, checked in one walk."""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from nemo_rod import parts

_OPEN = {">": "(", ">=": "["}
_PLAIN = None | bool | int | float | str | list[Any] | dict[str, Any]
TYPE_NAMES = {
    str: "a text",
    bool: "a boolean (true or false)",
    int: "a whole number",
    float: "a number",
    NoneType: "null",
    Sequence: "a list of texts",
    Mapping: "a mapping of plain values",
}


@dataclass(frozen=True)
class Bound:
    """The accepted values of a key, in words and as a test; a default of null is also accepted."""

    expected: str
    accepts: Callable[[Any], bool]
    names: Sequence[str] = ()  # suggestions for a mistyped one


def key(default: Any, bound: str | Bound, **about: Any) -> Any:
    """Returns a field of a dataclass that accepts only some values; a text is for `numbers`."""
    bound = numbers(bound) if isinstance(bound, str) else bound
    return dataclasses.field(default=default, metadata={"bound": bound, **about})


def same(section: Any, name: str, **about: Any) -> Any:
    """Returns a field of a dataclass with the default and the bound of another one's."""
    known = section.__dataclass_fields__[name]
    return dataclasses.field(default=known.default, metadata={**known.metadata, **about})


def numbers(text: str) -> Bound:
    """Returns the bound of finite numbers that are ">= 1", "> 0" or, say, "in [0, 2**31)"."""
    sign, rest = text.split(" ", 1)
    interval = rest if sign == "in" else f"{_OPEN[sign]}{rest}, inf)"
    ends = [end.partition("**") for end in interval[1:-1].split(", ")]
    low, high = (float(base) ** float(power or 1) for base, _, power in ends)
    above = operator.ge if interval[0] == "[" else operator.gt
    below = operator.le if interval[-1] == "]" else operator.lt
    return Bound(text, lambda value: above(value, low) and below(value, high))  # NaN is neither


def one_of(default: str | None, *others: str, **about: Any) -> Any:
    """Returns a field of a dataclass with a few possible values, of which the first is default."""
    names = [name for name in (default, *others) if name is not None]
    *others_names, last = names
    expected = f"{', '.join(others_names)} or {last}" if others_names else last
    words = [name for name in names if name[:1].isalpha()]  # numbers are never suggested
    return key(default, Bound(expected, names.__contains__, words), **about)


def name_bound(kind: str) -> Bound:
    """Returns the bound of names that are registered for a kind of part (`parts.py`)."""
    names = parts.names(kind)
    from_file = ["FILE.py:NAME"] if kind in parts.FROM_FILES else []
    expected = f"{', '.join(names + from_file)}, or a name that a package registers"

    def accepts(value: str) -> bool:
        return value in parts.names(kind) or bool(from_file and parts.file_of(value))

    return Bound(expected, accepts, names)


def check_bounds(section: Any, prefix: str = "") -> None:
    """Refuses the first value out of bounds in a section, or in a section of it.

    `prefix` precedes its keys as users type them, such as "selection.".

    Raises:
        ValueError: a value is out of bounds; the message names its key and the expected values.
    """
    for field in dataclasses.fields(section):
        name, value = prefix + field.name, getattr(section, field.name)
        bound, optional = field.metadata.get("bound"), field.default is None
        if dataclasses.is_dataclass(value):
            check_bounds(value, f"{name}.")
        kind = str(field.type)  # a reference may stand for a value of another
        is_section = not prefix and kind != "Any" and (kind[0].isupper() or kind[0] == "<")
        has_keys = is_section or kind.startswith("dict")
        if isinstance(value, str | int | float | list) and has_keys:
            raise ValueError(f"{name}={value!r} is not valid: expected keys and values, in braces.")
        if kind.startswith("list") and not isinstance(value, list | None):
            raise ValueError(f"{name}={value!r} is not valid: expected a list, in brackets.")
        if isinstance(value, list) and any(isinstance(item, list | dict) for item in value):
            raise ValueError(
                f"{name}={as_yaml(value)} is not valid: expected a list without lists or mappings "
                "in it."
            )
        if bound and not (bound.accepts(value) if value is not None else optional):
            expected = f"finite and {bound.expected}" if value == math.inf else bound.expected
            expected += ", or null" if optional else ""
            near = parts.did_you_mean(value, bound.names) if type(value) is str else ""
            raise ValueError(f"{name}={value!r} is not valid{near}: expected {expected}.")


def check_types(section: Any, types: Mapping[str, Any], prefix: str = "") -> None:
    """Refuses the first value of a section of another type than its key has in `types`.

    Raises:
        ValueError: a value has another type; the message says how YAML may have read it.
    """
    for name, kind in types.items():
        if has_type(value := getattr(section, name), kind):
            continue
        options = get_args(kind) if get_origin(kind) is UnionType else (kind,)
        advice = "expected " + " or ".join(TYPE_NAMES[get_origin(one) or one] for one in options)
        texts = value if get_origin(kind) is Sequence and isinstance(value, list) else [value]
        number = next((text for text in texts if isinstance(text, int | float)), None)
        default = type(section).__dataclass_fields__[name].default
        if value is None and default is not dataclasses.MISSING:
            advice += f"; remove the key for its default, {as_yaml(default)}"
        elif number is not None and (texts is value or str in options):
            advice += f"; YAML reads {as_yaml(number)} as {TYPE_NAMES[type(number)]}: quote it"
        elif isinstance(value, str) and {bool, int, float} & {*options}:
            advice += ", without quotes"
        raise ValueError(f"{prefix}{name}={as_yaml(value)} is not valid: {advice}.")


def has_type(value: object, kind: Any) -> bool:
    """Returns whether a value that YAML or JSON can hold has the type that a field declares."""
    kind = _PLAIN if kind is Any else kind
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(has_type(value, one) for one in inner)
    if origin is Literal:
        return value in inner
    if origin in (list, Sequence):
        return isinstance(value, list | tuple) and all(has_type(item, *inner) for item in value)
    if origin in (dict, Mapping):
        return isinstance(value, Mapping) and all(
            has_type(name, inner[0]) and has_type(item, inner[1]) for name, item in value.items()
        )
    kinds = int | float if kind is float else kind
    return isinstance(value, kinds) and isinstance(value, bool) == (kind is bool)


def as_yaml(value: object) -> str:
    """Returns a value as YAML has it, cut to a readable length."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 80 else f"{text[:80]}..."
