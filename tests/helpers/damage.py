"""Damage to files as disks, crashes, foreign programs and other versions do it.

A `Damage` is a few numbers, drawn from a seed; `damaged` applies it to a file's bytes. Half of the
kinds know nothing of the file, the others change values inside of JSON, YAML and the checksummed
headers of record logs.
"""

import json
import os
import random
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# what a foreign program may have put in the place of a value
JUNK = (
    *(None, True, -1, 0, 1, 3, 10**13, 2**63, 2**70, 1e308, -0.5, float("nan"), float("inf")),
    *(
        "", "x", "../../x", "\x1b[31mred", "evil:part", "${oc.env:HOME}",
        "/etc/passwd", "a\nb", "%s{}", [], {}, [[]], [1, None], {"x": {}},
        "é" * 300,
    ),
)  # fmt: skip
MAGIC_BYTES = 8
LENGTH_BYTES = CRC_BYTES = 4


@dataclass(frozen=True)
class Damage:
    """One damage: to which file, of which kind, at which place, with which value."""

    file: int
    kind: str
    place: int
    value: int


def drawn(seed: str) -> Damage:
    """Draws a damage of any kind to any file."""
    dice = random.Random(seed)
    return Damage(
        dice.randrange(2**16), dice.choice(KINDS), dice.randrange(2**32), dice.randrange(2**32)
    )


def damaged(damage: Damage, content: bytes, others: Sequence[bytes]) -> bytes | None:
    """Returns what is left of a file; None if it is gone. One of the others may take its place."""
    return _KINDS[damage.kind](content, damage.place, damage.value, others)


def _other_version(content: bytes, place: int, value: int, others: Sequence[bytes]) -> bytes:
    """Raises a number in the first bytes, where formats keep their versions."""
    digits = list(re.finditer(rb"\d", content[:400]))
    if not digits:
        return _written(content, place % 16, b"\x07")
    at = digits[place % len(digits)].start()
    return _written(content, at, b"%d" % ((int(content[at : at + 1]) + 1 + value % 9) % 10))


def _change_value(content: bytes, place: int, value: int, others: Sequence[bytes]) -> bytes:
    """Puts another value into a JSON object, JSON lines, a log's header, or a line of YAML."""
    if (head := _log_header(content)) is not None:
        return _with_header(content, head, _changed(head, place, value))
    try:
        return json.dumps(_changed(json.loads(content), place, value)).encode()
    except ValueError:
        pass
    lines = content.split(b"\n")
    at = place % len(lines)
    try:
        lines[at] = json.dumps(_changed(json.loads(lines[at]), place >> 8, value)).encode()
    except ValueError:
        junk = json.dumps(JUNK[value % len(JUNK)]).encode()
        lines[at] = re.sub(rb"([:\t-] *)[^:\t]*$", lambda match: match[1] + junk, lines[at])
    return b"\n".join(lines)


def _changed(value: Any, place: int, other: int) -> Any:
    """Returns JSON with one value replaced, or one key missing."""
    places = list(_places(value))
    path = places[place % len(places)]
    if not path:
        return JUNK[other % len(JUNK)]
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    if other % (len(JUNK) + 5) >= len(JUNK):
        del inner[path[-1]]
    else:
        inner[path[-1]] = JUNK[other % (len(JUNK) + 5)]
    return value


def _places(value: Any, path: tuple[Any, ...] = ()) -> Any:
    yield path
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in keys:
        yield from _places(value[key], (*path, key))


def _log_header(content: bytes) -> Any:
    """Returns the header of a curriculum; None if it is none."""
    if not content.startswith(b"RODCUR"):
        return None
    start = MAGIC_BYTES + LENGTH_BYTES
    length = int.from_bytes(content[MAGIC_BYTES:start], "little")
    try:
        return json.loads(content[start : start + length])
    except ValueError:
        return None


def _with_header(content: bytes, old: Any, new: Any) -> bytes:
    """Returns a curriculum with another header and its right checksum."""
    start = MAGIC_BYTES + LENGTH_BYTES
    end = start + int.from_bytes(content[MAGIC_BYTES:start], "little") + CRC_BYTES
    text = json.dumps(new).encode()
    head = content[:MAGIC_BYTES] + len(text).to_bytes(LENGTH_BYTES, "little") + text
    return head + zlib.crc32(head).to_bytes(CRC_BYTES, "little") + content[end:]


def _written(content: bytes, place: int, data: bytes) -> bytes:
    at = place % len(content)
    return content[:at] + data[: len(content) - at] + content[at + len(data) :]


PICKLED = b"cposix\nsystem\n(S'touch PWNED'\ntR."
# what somebody may put in the place of a file, besides other bytes
HOSTILE: dict[str, Callable[[Path, Path], object]] = {
    "sparse": lambda path, _: os.truncate(path, 8 << 40),
    "pipe": lambda path, _: (path.unlink(), os.mkfifo(path)),
    "link": lambda path, other: (path.unlink(), path.symlink_to(other)),
    "link to itself": lambda path, _: (path.unlink(), path.symlink_to(path)),
    "folder": lambda path, _: (path.unlink(), path.mkdir()),
}
_KINDS: dict[str, Callable[[bytes, int, int, Sequence[bytes]], bytes | None]] = {
    "missing": lambda *_: None,
    "empty": lambda *_: b"",
    "cut": lambda content, place, *_: content[: place % (len(content) + 1)],
    "bit": lambda content, place, value, _: _written(
        content, place, bytes([content[place % len(content)] ^ (1 << value % 8)])
    ),
    "page": lambda content, place, value, _: _written(content, place, bytes(1 << value % 13)),
    "overwrite": lambda content, place, value, _: _written(
        content, place, value.to_bytes(4, "little")
    ),
    "grow": lambda content, place, *_: content + content[-1 - place % len(content) :],
    "swap": lambda content, place, _, others: others[place % len(others)],
    "version": _other_version,
    "value": _change_value,
    "another value": _change_value,  # twice: most of what is found is found by it
    "pickle": lambda content, place, *_: content[: place % len(content)] + PICKLED,
}
KINDS = (*_KINDS, *HOSTILE)
