"""The table in which a rehearsal ends: what ran, what did not and why, and what the run costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rod.lab.plan.costs import PlanResult
from nemo_rod.lab.plan.memory import GIB
from nemo_rod.lab.plan.plan_text import hours, size, wall

DONE, FAILED, LEFT_OUT, UNSEEN = "done", "FAILED", "not run", "not seen"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One part of a rehearsal.

    Attributes:
        name: name of the stage, or of what was looked at.
        state: DONE, FAILED, LEFT_OUT (needs what failed) or UNSEEN (needs what is not here).
        note: what was found, or the reason, one sentence.
        seconds: how long it took; None if it did not run.
    """

    name: str
    state: str
    note: str = ""
    seconds: float | None = None


def format_table(recipe: str, rows: Sequence[Row], plan: PlanResult | None) -> str:
    """Returns the table as text, for a terminal."""
    costs = {stage.name: stage for stage in plan.stages} if plan else {}
    unit = "GPU-hours" if plan is None or plan.layout["gpu"] else "process-hours"
    lines = [["", "rehearsed", "seconds", "the run: wall", unit, "disk"]]
    for row in rows:
        took = "" if row.seconds is None else f"{row.seconds:.0f}"
        cost = costs.pop(row.name, None)
        real = ["", "", ""]
        if cost is not None:
            spent = hours(cost.gpu_hours) if cost.gpu_hours else ""
            real = [wall(cost.hours), spent, size(cost.disk)]
        lines.append([row.name, row.state, took, *real])
    if plan is not None:
        total = [wall(sum(s.hours for s in plan.stages)), hours(plan.gpu_hours)]
        took = f"{sum(row.seconds or 0 for row in rows):.0f}"
        lines.append(["all", "", took, *total, size(sum(s.disk for s in plan.stages))])
    shown = _aligned(lines)
    notes = [f"  {row.name}: {row.note}" for row in rows if row.note]
    return "\n".join([f"Rehearsal of {recipe}", "", *shown, "", *notes, *_needs(plan)])


def as_dict(recipe: str, rows: Sequence[Row], plan: PlanResult | None) -> dict[str, Any]:
    """Returns the table as plain values."""
    return {
        "recipe": recipe,
        "rows": [dataclasses.asdict(row) for row in rows],
        "plan": plan and plan.as_dict(),
    }


def _needs(plan: PlanResult | None) -> list[str]:
    """Returns what the real run needs besides time: processors and memory."""
    if plan is None:
        return []
    memory = plan.memory
    limit = "" if memory.limit is None else f" of {memory.limit / GIB:.0f} GiB"
    return [
        "",
        f"  The run needs {plan.layout['text']};",
        f"  {memory.total / GIB:.1f} GiB{limit} on the fullest of them.",
    ]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(
            cell.ljust(width) if place < 2 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]  # fmt: skip
