"""Draws figures of docs/research from the raw numbers of their pages, a part of `make docs`.

Loss on new text over forgetting: fixed shares as lines, one a seed, other arms as points.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from nemo_rod.lab.report.figures.drawing import by_name, converting, layer, number, view, whole
from nemo_rod.lab.report.style import light

DOCS = Path(__file__).parent.parent / "docs"
# page -> seeds, forgetting from and to, and for names of arms their label and role of its colour
FIGURES = {
    "mix": ((42, 43, 44), (0.1, 0.23), {
        r"fixed_.*": ("fixed shares", "fixed-2"), "rod_averages": ("rod_averages", "source-3"),
        "rod_mix": ("rod_mix, auto", "source-2"), "mix_.*": ("rod_mix, target", "source-4"),
        "parts_.*": ("sources split", "replay"), "rod": ("rod", "rod"),
    }),
    "practice": ((44, 45, 46), (0.07, 0.31), {
        r"fixed_\d+": ("fixed shares", "fixed-2"),
        r"fixed_\d+_kl_.*": ("fixed shares, KL to the base", "source-2"),
        "rod": ("rod", "rod"), "rod_kl(_base_.*)?": ("rod, KL to the base", "source-4"),
        "rod_mix": ("rod_mix", "source-3"), "mix_kl": ("rod_mix, KL to the base", "replay"),
    }),
}  # fmt: skip


def main() -> None:
    """Writes the figures, if vl-convert is installed."""
    if (converter := converting()) is None:
        sys.exit("The figures are not drawn: install vl-convert-python")
    scale = {"zero": False, "nice": False, "padding": 12}
    at = {
        "x": number("F", "forgetting F_val, nats per token", scale=scale | {"type": "log"}),
        "y": number("loss", "loss on new text, nats per token", scale=scale),
        "detail": {"field": "seed"},
    }
    shape = {"field": "seed", "type": "nominal", "title": "seed"}
    for page, (seeds, (least, most), labels) in FIGURES.items():
        rows = []
        for seed in seeds:
            raw = json.loads((DOCS / "research" / page / f"seed_{seed}.json").read_text())
            for name, arm in raw["arms"].items():
                label = next((x for n, (x, _) in labels.items() if re.fullmatch(n, name)), None)
                if label and least < arm["val_forgetting"] < most:
                    place = {"F": arm["val_forgetting"], "loss": arm["adapt_loss"]}
                    rows.append(place | {"seed": str(seed), "arm": label})
        fixed = [row for row in rows if row["arm"] == "fixed shares"]
        colours = {label: light(role) for label, role in labels.values()}
        picture = view(
            layer({"type": "line", "color": light("fixed-2"), "opacity": 0.5}, fixed, **at),
            layer({"type": "point", "filled": True, "size": 70, "opacity": 0.9}, rows, **at,
                  shape=shape, color=by_name("arm", colours, columns=3)),
        )  # fmt: skip
        file = DOCS / "figures" / f"{page}.svg"
        file.write_text(converter.vegalite_to_svg(whole(picture)) + "\n")


if __name__ == "__main__":
    main()
