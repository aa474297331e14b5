"""Arms on the plane of adaptation loss and forgetting, with the chord of fixed replay.

The arms of an ablation's figure are selected by their designs (`arm.json`), not by their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from nemo_rod.lab.report.designs import (
    continued_arms,
    filter_kinds,
    frontier_arms,
    helped_arms,
    varying,
    with_fixed_share,
)
from nemo_rod.lab.report.figures import drawing
from nemo_rod.lab.report.figures.drawing import Rows, Spec, as_is, layer, number, view
from nemo_rod.lab.report.figures.labels import label_layers
from nemo_rod.lab.report.figures.over_steps import shares_of
from nemo_rod.lab.report.figures.picture import Picture
from nemo_rod.lab.report.paper import paper_arms, title_of
from nemo_rod.lab.report.results import Results, RunResults, chord_of
from nemo_rod.lab.report.style import arm_colour, light
from nemo_rod.lab.report.table import with_sign
from nemo_rod.selection.arm_names import parse_arm
from nemo_rod.selection.arms import SWEPT, Arm

Point = tuple[float, float]  # adaptation loss, forgetting
Measure = Literal["val_forgetting", "task_forgetting"]
_X, _Y = "adaptation loss", "forgetting"
_TITLES: dict[Measure, str] = {
    "val_forgetting": "forgetting F_val (nats per token, log scale)",
    "task_forgetting": "forgetting of tasks (share of answers)",
}
_TIMES = "\N{MULTIPLICATION SIGN}"
# kind of arm -> shape and its area, other than a circle
_SHAPES = {
    "rod": (drawing.STAR, 420), "rod_variant": (drawing.STAR, 170), "merge": ("diamond", 90),
    "max_replay": ("square", 90), "control": ("triangle-down", 90),
    "ablation": ("triangle-up", 90), "other": ("triangle-up", 90),
}  # fmt: skip
_OPEN = ("rod_variant", "ablation", "control")


@dataclass(frozen=True)
class Plane:
    """The arms of a run to draw, and how."""

    results: Results
    names: Sequence[str]
    measure: Measure = "val_forgetting"  # the vertical axis
    heading: str = ""  # distinguishes this view from others
    # labels of arms other than their own name; "" for none
    texts: Mapping[str, str] = field(default_factory=dict)
    paths: Sequence[Sequence[str]] = ()  # arms to join by a line, in order
    shows_gain: bool = False  # whether to show RoD's distance from the chord


def frontier(shown: Sequence[RunResults]) -> Picture | None:
    """Draws adaptation loss against F_val for every arm, with the chord of fixed replay.

    If arms lie far from the chord, such as merges, another view shows the region of the chord; if
    there are task results, another one shows their forgetting.
    """
    several = len(shown) > 1
    planes = [p for _, one in shown for p in _frontier(one, title_of(one["recipe"]) * several)]
    results = shown[0][1]
    text = (
        "Lower left is better. The blue line is the chord: fixed replay at the shares that were "
        "run and, straight in ln F_val as on this axis, between them. The dashed line is RoD's "
        "distance from it at equal forgetting. "
    )
    base = results["arms"].get("base") or {"adapt_loss": None}
    if (loss := base["adapt_loss"]) is not None:
        text += f"The base model ({loss:.3f} nats, no forgetting) is off the picture. "
    if results["intervals"]:
        text += (
            "Thin crosses are 90 % intervals over draws of the held-out blocks; other seeds vary "
        )
        text += "besides. "
    return _picture(planes, "Adaptation against forgetting", text + _beside(results), 10)


def early_stops(shown: Sequence[RunResults]) -> Picture | None:
    """Draws what arms had learned and forgotten after parts of their steps, beside whole runs."""
    results = shown[0][1]
    whole = [name for name in results["chord"] if name in results["arms"]]
    arms = {n: results["arms"][n] for n in (*whole, "rod") if n in results["arms"]}
    texts: dict[str, str] = {}
    fixed = sorted(whole, key=lambda name: parse_arm(name).value)[:2]
    paths = []
    for name in fixed:
        stops = [s for s in results["early_stops"].get(name, []) if s["val_forgetting"] > 0]
        design = {"design": {"of": name}}  # gives it the colour of its arm
        path = {f"{name}_after_{stop['step']:.0f}": stop | design for stop in stops}
        arms |= path
        texts |= {stop: "" for stop in path}
        paths.append([*path])
    return _picture(
        [Plane({**results, "arms": arms}, [*arms], texts=texts, paths=paths)] if texts else [],
        "Early stops",
        "Lines lead through the models that no replay, and the smallest fixed share, were on their "
        "way: what stopping early would have given without a run. These are measured on the first "
        "held-out blocks of each source, and before the learning rate has fallen.",
        20,
    )


def components(shown: Sequence[RunResults]) -> Picture | None:
    """Draws ablations, controls and RoD's joint selection."""
    results = shown[0][1]
    names = with_fixed_share(results["arms"])
    return _picture(
        [Plane(results, [*names, "rod"])] if names and "rod" in results["arms"] else [],
        "Ablations",
        "Triangles have RoD's mean share of replay in every batch and choose new blocks and replay "
        "at random or by score. Those that point down repeat RoD's recorded share at every step, "
        "overall or by source, with random blocks: the same amounts at the same steps, without the "
        "choice of blocks.",
        240,
    )


def pool_size(shown: Sequence[RunResults]) -> Picture | None:
    """Draws arms with other numbers of candidates."""
    return _sweep(
        shown[0],
        SWEPT["pool_size"],
        "Number of candidates",
        "With m candidates per trained block, half of them adaptation. Below m = 2 adaptation "
        "candidates alone cannot fill a batch, which sets a minimum of replay.",
        250,
    )


def weighting(shown: Sequence[RunResults]) -> Picture | None:
    """Draws arms with other weights of replay."""
    return _sweep(
        shown[0],
        SWEPT["weighting"],
        "Weight of replay",
        "Replay scores are weighted by κ, which trades learning against retention; κ is 1 in the "
        "paper.",
        260,
    )


def budgets(shown: Sequence[RunResults]) -> Picture | None:
    """Draws fixed replay and RoD at the common budget and at others."""
    results = shown[0][1]
    arms, texts = results["arms"], {}
    paths = continued_arms(arms)
    for path in paths:
        of = next(name for name in path if arms[name]["design"]["of"] in (None, name))
        for name in path:
            budget = arms[name]["design"]["budget"]
            texts[name] = parse_arm(of).label if name == of else f"{budget:.2f}{_TIMES}"
    names = [*texts]
    names += [n for n in filter_kinds(arms, "fixed", "max_replay", "rod") if n not in names]
    return _picture(
        [Plane(results, names, paths=paths, texts=texts)] if paths else [],
        "Longer or shorter training",
        "Lines lead from an arm at the common budget to the same arm trained longer or shorter; "
        "the numbers are budgets relative to the common one.",
        270,
    )


def transfer(shown: Sequence[RunResults]) -> Picture | None:
    """Draws arms with another model's curriculum or reference losses, beside RoD's own."""
    results = shown[0][1]
    names = helped_arms(results["arms"])
    beside = filter_kinds(results["arms"], "fixed", "rod")
    return _picture(
        [Plane(results, [*beside, *names])] if names else [],
        "Transfer from a smaller model",
        "Arms on a smaller model's recorded curriculum, or with its reference losses, beside RoD "
        "itself. " + _beside(results),
        280,
    )


def _picture(planes: Sequence[Plane], title: str, caption: str, order: int) -> Picture | None:
    """Returns a figure of the planes that have points; None without any."""
    views = [drawn for plane in planes if (drawn := draw_plane(plane)) is not None]
    return Picture(views, title, caption, order) if views else None


def _beside(results: Results) -> str:
    return "Crosses are the paper's own numbers." if paper_arms(results["recipe"]) else ""


def _frontier(results: Results, title: str = "") -> list[Plane]:
    arms = results["arms"]
    points = points_of(arms, frontier_arms(arms), "val_forgetting")
    kinds = ("rod", "rod_variant", "max_replay")
    near = {n: p for n, p in points.items() if n in results["chord"] or parse_arm(n).kind in kinds}
    zooms = len(near) >= 2 and _span(points) > 1.6 * _span(near)
    merges: dict[str, list[str]] = {}
    for name in sorted(filter_kinds(points, "merge"), key=lambda name: parse_arm(name).value):
        merges.setdefault(name.rpartition("_")[0], []).append(name)
    # arms labelled in the second view have no label here, except two that connect the views
    texts = {n: "" for n in near if n not in ("no_replay", "rod")} if zooms else {}
    if len(points) > 24:  # labels would hide marks: of others than the paper's, tooltips tell
        texts |= {n: "" for n in points if parse_arm(n).kind in ("other", "rod_variant")}

    def heading(text: str) -> str:
        return ": ".join(filter(None, (title, text)))

    everything = Plane(
        results, list(points), heading=heading("all arms" if zooms else ""), texts=texts,
        paths=[*merges.values()], shows_gain=not zooms,
    )  # fmt: skip
    around = heading("around the fixed-replay chord")
    zoomed = Plane(results, list(near), heading=around, shows_gain=True)
    tasks = Plane(results, list(near), "task_forgetting", heading("tasks"))
    return [*([zoomed] if zooms else []), everything, tasks]


def _span(points: Mapping[str, Point]) -> float:
    losses = [loss for loss, _ in points.values()]
    return max(losses) - min(losses)


def _sweep(shown: RunResults, key: str, title: str, caption: str, order: int) -> Picture | None:
    """Returns a plane of the arms that differ in one key, and the replay share over their steps.

    Ticks on a share mark where its candidates have passed once, twice etc. over the adaptation
    blocks.
    """
    run, results = shown
    arms, sign = results["arms"], Arm.__dataclass_fields__[key].metadata["label"]
    names = varying(arms, key)
    if len(names) < 2:
        return None
    texts = {name: f"{sign} = {arms[name]['design'][key]:g}" for name in names}
    plane = draw_plane(Plane(results, names, texts=texts, paths=[names]))
    if plane is None:
        return None
    views = [plane]
    if histories := {texts[name]: run.arms[name].history for name in names}:
        views += shares_of(histories, sum(run.block_counts["adaptation"].values()))
    return Picture(views, title, caption, order)


def points_of(arms: Mapping[str, Any], names: Sequence[str], measure: Measure) -> dict[str, Point]:
    """Returns the points of arms that are measured.

    On the logarithmic axis of F_val the base, which is off the picture, is left out, and arms that
    forgot nothing are where an arm that forgot something shows how far that is.
    """
    points = {}
    for name in names:
        loss, forgetting = (arms.get(name, {}).get(key) for key in ("adapt_loss", measure))
        is_drawn = measure == "task_forgetting" or forgetting or name != "base"
        if loss is not None and forgetting is not None and is_drawn:
            points[name] = (float(loss), float(forgetting))
    if measure == "val_forgetting" and not any(f > 0 for _, f in points.values()):
        return {}
    return points


def draw_plane(plane: Plane) -> Spec | None:
    """Returns a view of the arms of a plane over the chord; None without a point.

    The paper's own numbers are crosses.
    """
    results, measure = plane.results, plane.measure
    arms, is_log = results["arms"], measure == "val_forgetting"
    points = points_of(arms, plane.names, measure)
    if not points:
        return None
    paper = points_of(paper_arms(results["recipe"]), list(points), measure)
    every = [*points.values(), *paper.values()]
    losses = [loss for loss, _ in every]
    pad = 0.12 * max(max(losses) - min(losses), 0.02)
    ends = [min(losses) - pad, max(losses) + 2 * pad]  # labels are on the right
    x = number(_X, f"{_X} (nats per token)", scale={"domain": ends})
    heights = [forgetting for _, forgetting in every]
    zero, sign = 0.0, list[Spec]()
    if is_log:
        y, zero, sign = drawing.log_axis(heights, _TITLES[measure])
    else:
        most = max(*heights, 0.01)
        y = number(_Y, _TITLES[measure], scale={"domain": [-0.06 * most, 1.12 * most]})
    y["field"] = _Y

    def row(point: Point, **more: Any) -> dict[str, Any]:
        return {_X: point[0], _Y: max(point[1], zero) if is_log else point[1], **more}

    at: Spec = {"x": x, "y": y}
    order = {"order": {"field": "i", "type": "quantitative"}}
    clipped = {"type": "line", "clip": True, "tooltip": None}
    below, lines = list[Spec](), list[list[Point]]()
    if is_log and (chord := chord_of(arms, results["chord"])):
        # straight on a logarithmic axis, exactly the interpolation that is judged
        lines.append([(loss, forgetting) for forgetting, loss in chord])
        mark = clipped | {"color": light("fixed-2")}
        below.append(layer(mark, [row(p, i=i) for i, p in enumerate(lines[-1])], **at, **order))
    names = list(arms)
    for path in plane.paths:
        met = [row(points[name]) for name in path if name in points]
        if len(met) > 1:
            lines.append([(r[_X], r[_Y]) for r in met])
            colour = arm_colour(_as_drawn(results, path[-1])[0].name, names)
            mark = clipped | {"color": colour, "strokeWidth": 1, "opacity": 0.6}
            below.append(layer(mark, [r | {"i": i} for i, r in enumerate(met)], **at, **order))
    marks = [
        row(point, **_mark(results, name, names), arm=parse_arm(name).label, F_val=point[1],
            text=plane.texts.get(name, parse_arm(name).label), bold=parse_arm(name).kind == "rod")
        for name, point in points.items()
    ]  # fmt: skip
    # the subject last, above the others
    marks.sort(key=lambda one: one["bold"])
    by_look = {key: as_is(key) for key in ("shape", "size", "fill", "stroke")}
    tips = [
        {"field": "arm"},
        *({"field": f, "format": ".4f"} for f in (_X, "F_val" * is_log or _Y)),
    ]
    point = {"type": "point", "opacity": 1, "strokeWidth": 1.3}
    below += _intervals(results, marks, at) if is_log else []
    labels = [*marks, *_gain(plane, row, ends)]
    if len(labels) > len(marks):
        dashed = {"type": "rule", "strokeDash": [5, 3], "strokeWidth": 1.5, "color": light("rod"),
                  "clip": True, "tooltip": None}  # fmt: skip
        below.append(layer(dashed, labels[len(marks) :], **at, x2={"field": "from"}))
        lines.append([(labels[-1]["from"], labels[-1][_Y]), (labels[-1][_X], labels[-1][_Y])])
    crosses = [row(p, stroke=arm_colour(n, names)) for n, p in paper.items()]
    theirs = {"type": "point", "shape": drawing.CROSS, "size": 60, "opacity": 1, "tooltip": None}
    return view(
        *sign,
        *below,
        layer(theirs, crosses, **at, stroke=as_is("stroke")),
        layer(point, marks, **at, **by_look, tooltip=tips),
        *label_layers(labels, x, y, lines),
        title=plane.heading,
        height=380,
    )


def _mark(results: Results, name: str, names: Sequence[str]) -> dict[str, Any]:
    """Returns the look of an arm's mark."""
    arm, is_open = _as_drawn(results, name)
    shape, size = _SHAPES.get(arm.kind, ("circle", 110))
    colour = arm_colour(arm.name, names)
    fill = light("surface") if is_open else colour
    return {"shape": shape, "size": size, "fill": fill, "stroke": colour}


def _as_drawn(results: Results, name: str) -> tuple[Any, bool]:
    """Returns the arm that determines mark and colour, and whether the mark is open."""
    arm = parse_arm(name)
    of = (results["arms"].get(name, {}).get("design") or {}).get("of")
    if arm.kind == "other" and of not in (None, name):
        return parse_arm(of), True
    return arm, arm.kind in _OPEN


def _intervals(results: Results, marks: Rows, at: Spec) -> list[Spec]:
    """Returns thin crosses over the intervals of the arms that have both."""
    labels = {parse_arm(name).label: ends for name, ends in results["intervals"].items()}
    rows = []
    for mark in marks:
        ends = labels.get(mark["arm"], {})
        if {"adapt_loss", "val_forgetting"} <= set(ends):
            (low, high), (least, most) = ends["adapt_loss"], ends["val_forgetting"]
            here = {"stroke": mark["stroke"], _X: mark[_X], _Y: mark[_Y]}
            rows += [here | {_X: low, "x2": high}, here | {_Y: max(least, 1e-9), "y2": most}]
    thin = {"type": "rule", "clip": True, "strokeWidth": 0.8, "opacity": 0.6, "tooltip": None}
    return [
        layer(thin, [row for row in rows if end in row], **at, color=as_is("stroke"),
              **{end: {"field": end}})
        for end in ("x2", "y2")
    ]  # fmt: skip


def _gain(plane: Plane, row: Any, ends: Sequence[float]) -> Rows:
    """Returns the end of RoD's distance from the chord at equal forgetting, with its text."""
    comparison = plane.results["comparisons"].get("rod", {})
    arm = plane.results["arms"].get("rod", {})
    if not plane.shows_gain or (gain := comparison.get("gain")) is None:
        return []
    how = "extrapolated" if comparison["extrapolated"] else "at equal F_val"
    # an extended chord may end outside
    end = float(min(max(arm["adapt_loss"] + gain, ends[0]), ends[1]))
    place = row((end, arm["val_forgetting"]), text=f"{with_sign(3)(gain)} {how}", bold=True)
    return [place | {"from": arm["adapt_loss"]}]
