"""A plan as text, for a terminal."""

from __future__ import annotations

from textwrap import indent, wrap
from typing import Any

from nemo_rod.commands.text import table
from nemo_rod.lab.plan.costs import PlanResult
from nemo_rod.lab.plan.memory import GIB


def format_plan(plan: PlanResult) -> str:
    """Returns the plan in some forty lines."""
    model, layout, assumed, memory = plan.model, plan.layout, plan.assumptions, plan.memory
    unit = "GPU" if layout["gpu"] else "process"
    experts = ""
    if model["active_parameters"] != model["parameters"]:
        experts = f", {count(model['active_parameters'])} of them active"
    rows = [
        [
            stage.name,
            count(stage.trained_tokens),
            count(stage.scored_tokens),
            count(stage.flops),
            f"{stage.scoring_share:.0%}" if stage.scoring_seconds else "",
            wall(stage.hours) if stage.hours else "",  # not counted, such as a download
            hours(stage.gpu_hours) if stage.gpu_hours else "",
            size(stage.disk),
        ]
        for stage in plan.stages
    ]
    total = [wall(plan.total("hours")), hours(plan.gpu_hours), size(plan.total("disk"))]
    rows.append(["all", "", "", count(plan.total("flops")), "", *total])
    header = ("trained", "scored", "FLOPs", "of a step", "wall", f"{unit}-hours", "disk")
    unit_bytes, name = (GIB, "GiB") if memory.total >= GIB else (2.0**20, "MiB")
    limit = fits = ""
    if memory.limit is not None:
        limit = f" of {memory.limit / GIB:.0f} GiB"
        fits = ", fits" if memory.fits else ", DOES NOT FIT"
    host = f"; {memory.host / GIB:.1f} GiB on its host" if memory.host else ""
    parts = [f"{part} {amount / unit_bytes:.1f}" for part, amount in memory.parts.items() if amount]
    lines = [
        f"Plan of {plan.recipe}",
        "",
        f"  model    {model['name']}: {count(model['parameters'])} parameters{experts}; "
        f"{count(model['forward_flops'])}FLOP forward per token",
        f"  corpus   {count(plan.corpus['adaptation_tokens'])} tokens adaptation, "
        f"{count(plan.corpus['replay_tokens'])} replay ({plan.corpus['source']})",
        f"  epochs   {plan.corpus['epochs']:.2f} of the new text in train.steps without replay",
        f"  layout   {layout['text']}",
        f"  speed    {assumed['peak_tflops']:g} TFLOP/s x {assumed['utilisation']:.2g} on each "
        f"{unit}, backward {assumed['backward']:g} x forward",
        *_certainty(assumed),
        "",
        indent(table(("stage", *(f">{column}" for column in header)), rows), "  "),
        "",
        f"  Memory of the fullest {unit}: {memory.total / unit_bytes:.1f} {name}{limit}{fits}",
        f"    {', '.join(parts)}{host}",
    ]
    for note in plan.notes:
        lines += wrap(f"  Note: {note}", 140, subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join(lines)


def _certainty(assumed: dict[str, Any]) -> list[str]:
    """Returns lines on how far the speed may be off; none where the user has stated it."""
    if not assumed["confidence"]:
        return []
    least, most = assumed["range"]
    own = assumed["utilisation"]
    others = "the only run of its family that was published"
    if least < most:
        others = (
            f"by other runs of its family, {own / most:.2g} to {own / least:.2g} times the hours"
        )
    text = f"  sure     by {assumed['confidence']}; {others}"
    return wrap(text, 120, subsequent_indent=" " * 11)


def count(value: float) -> str:
    """Formats a number with three digits and a prefix: 12.4 G."""
    if not value:
        return ""
    value = float(f"{value:.3g}")  # before the prefix is chosen: 999,999 is 1 M
    for power, prefix in ((21, "Z"), (18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 10**power:
            return f"{value / 10**power:.3g} {prefix}"
    return f"{value:.3g} "


def size(value: float) -> str:
    """Formats bytes: 24.6 GB."""
    return f"{count(value)}B" if value else ""


def hours(value: float) -> str:
    """Formats process-hours: 2,469.8, or 0.012."""
    return f"{value:,.1f}" if value >= 1 else f"{value:.2g}"


def wall(value: float) -> str:
    """Formats hours as a duration: 3 d 4 h, 2.5 h, 12 min, 40 s."""
    if value >= 48:
        days, rest = divmod(round(value), 24)
        return f"{days} d {rest} h"
    if value >= 1:
        return f"{value:.1f} h"
    if value >= 1 / 60:
        return f"{value * 60:.0f} min"
    return f"{value * 3600:.0f} s"
