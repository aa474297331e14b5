"""Draws docs/figures/mix.svg, a part of `make docs`, from the raw numbers of docs/research/mix.md.

Loss on new text over forgetting, three seeds: fixed shares as lines, other arms as points.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from nemo_rod.lab.report.figures.drawing import converting, layer, named, number, view, whole
from nemo_rod.lab.report.style import light

DOCS = Path(__file__).parent.parent / "docs"
LABELS = {  # beginning of an arm's name -> label and role of its colour
    "fixed_": ("fixed shares", "fixed-2"), "rod_averages": ("rod_averages", "source-3"),
    "rod_mix": ("rod_mix, auto", "source-2"), "mix_": ("rod_mix, target", "source-4"),
    "parts_": ("sources split", "replay"), "rod": ("rod", "rod"),
}  # fmt: skip


def main() -> None:
    """Writes the figure, if vl-convert is installed."""
    rows = []
    for seed in (42, 43, 44):
        arms = json.loads((DOCS / "research" / "mix" / f"seed_{seed}.json").read_text())["arms"]
        for name, arm in arms.items():
            label = next((label for n, (label, _) in LABELS.items() if name.startswith(n)), None)
            if label and 0.1 < arm["val_forgetting"] < 0.23:
                place = {"F": arm["val_forgetting"], "loss": arm["adapt_loss"]}
                rows.append(place | {"seed": str(seed), "arm": label})
    scale = {"zero": False, "nice": False, "padding": 12}
    at = {
        "x": number("F", "forgetting F_val, nats per token", scale=scale | {"type": "log"}),
        "y": number("loss", "loss on new text, nats per token", scale=scale),
        "detail": {"field": "seed"},
    }
    colour = named("arm", {label: light(role) for label, role in LABELS.values()}, columns=3)
    shape = {"field": "seed", "type": "nominal", "title": "seed"}
    fixed = [row for row in rows if row["arm"].startswith("fixed")]
    picture = view(
        layer({"type": "line", "color": light("fixed-2"), "opacity": 0.5}, fixed, **at),
        layer({"type": "point", "filled": True, "size": 70, "opacity": 0.9}, rows, **at,
              shape=shape, color=colour),
    )  # fmt: skip
    if (converter := converting()) is None:
        sys.exit("docs/figures/mix.svg is not drawn: install vl-convert-python")
    (DOCS / "figures" / "mix.svg").write_text(converter.vegalite_to_svg(whole(picture)) + "\n")


if __name__ == "__main__":
    main()
