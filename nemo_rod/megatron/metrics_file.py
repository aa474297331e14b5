"""A file of metrics: one JSON object per step and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def append_line(path: Path, row: dict[str, Any]) -> None:
    """Adds the metrics of a step."""
    with open(path, "a") as file:
        file.write(json.dumps(row) + "\n")


def keep_steps(path: Path, end: int) -> None:
    """Drops the metrics of step `end` and later, which will be done again, and a torn last line."""
    if not path.exists():
        return
    lines = path.read_text().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] < end]
    path.write_text("".join(whole))
