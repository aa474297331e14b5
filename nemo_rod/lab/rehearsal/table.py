"""The table at the end of a rehearsal: the state of every part, and the cost of the real run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import indent
from typing import Any

from nemo_rod.commands.text import table
from nemo_rod.lab.plan.costs import PlanResult
from nemo_rod.lab.plan.memory import GIB
from nemo_rod.lab.plan.plan_text import hours, size, wall

DONE, FAILED, LEFT_OUT, UNSEEN = "done", "FAILED", "not run", "not seen"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One part of a rehearsal."""

    name: str  # name of the stage or check
    state: str  # DONE, FAILED, LEFT_OUT (needs a failed part) or UNSEEN (cannot be checked here)
    note: str = ""  # the result or the reason, one sentence
    seconds: float | None = None  # duration; None if it did not run


def format_table(recipe: str, rows: Sequence[Row], plan: PlanResult | None) -> str:
    """Returns the table as text, for a terminal."""
    costs = {stage.name: stage for stage in plan.stages} if plan else {}
    unit = "GPU-hours" if plan is None or plan.layout["gpu"] else "process-hours"
    lines = []
    for row in rows:
        seconds = "" if row.seconds is None else f"{row.seconds:.0f}"
        real = ["", "", ""]
        if (cost := costs.pop(row.name, None)) is not None:
            spent = hours(cost.gpu_hours) if cost.gpu_hours else ""
            real = [wall(cost.hours), spent, size(cost.disk)]
        lines.append([row.name, row.state, seconds, *real])
    needs = []
    if plan is not None:
        total = [wall(plan.total("hours")), hours(plan.gpu_hours), size(plan.total("disk"))]
        lines.append(["all", "", f"{sum(row.seconds or 0 for row in rows):.0f}", *total])
        memory = plan.memory
        limit = "" if memory.limit is None else f" of {memory.limit / GIB:.0f} GiB"
        needs = [
            "",
            f"  The run needs {plan.layout['text']};",
            f"  {memory.total / GIB:.1f} GiB{limit} on the fullest of them.",
        ]
    header = ("", "rehearsed", ">seconds", ">the run: wall", f">{unit}", ">disk")
    notes = [f"  {row.name}: {row.note}" for row in rows if row.note]
    shown = indent(table(header, lines), "  ")
    return "\n".join([f"Rehearsal of {recipe}", "", shown, "", *notes, *needs])


def as_dict(recipe: str, rows: Sequence[Row], plan: PlanResult | None) -> dict[str, Any]:
    """Returns the table as plain values."""
    return {
        "recipe": recipe,
        "rows": [dataclasses.asdict(row) for row in rows],
        "plan": plan and plan.as_dict(),
    }
