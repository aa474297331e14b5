"""The two roles of a source, and a source's place among the blocks."""

from __future__ import annotations

from typing import NamedTuple

ROLES = ("adaptation", "replay")  # the new domain, and what must not be forgotten


class SourceRow(NamedTuple):
    """One source: its blocks are the ids [start, start + count)."""

    name: str
    role: str
    start: int
    count: int  # type: ignore[assignment]  # shadows tuple.count
