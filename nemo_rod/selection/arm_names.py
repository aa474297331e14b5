"""The grammar of arms' names: their kind, their position in lists, their label.

Arms of the paper are `base no_replay fixed_<percent> max_replay merge_<lambda> rod`; one other than
no_replay is merged with the base as `<arm>_merge_<lambda>`. Variants may have any other name:
`rod_<variant>`, `<random|rho>_<random|rho>` (an ablation: adaptation, replay) and `control_<kind>`
have a place in lists, and others are last, with their words as label. `<arm>_residual` adds what
an arm of another run has learned. A number has one spelling: no zeros end its decimals.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

# In the order in which arms are listed.
Kind = Literal[
    "base", "no_replay", "fixed", "max_replay", "merge", "rod", "rod_variant",
    "ablation", "control", "other",
]  # fmt: skip

PAPER = ("base", "no_replay", "fixed", "max_replay", "merge", "rod")  # kinds of the paper's arms
RESIDUAL = re.compile("(?:(.+)_)?residual")
_WHOLE: dict[str, tuple[Kind, str]] = {
    "base": ("base", "base"),
    "no_replay": ("no_replay", "no replay"),
    "max_replay": ("max_replay", "max replay"),
    "rod": ("rod", "RoD"),
    "fixed_like_rod": ("control", "fixed like RoD"),
    "schedule_like_rod": ("control", "random, RoD's shares by step"),
}


@dataclass(frozen=True)
class ArmName:
    """A parsed name of an arm."""

    name: str  # the spelling of files
    kind: Kind
    value: float  # replay share in percent (`fixed`), lambda (`merge`), else 0
    label: str  # readable name

    @property
    def order(self) -> tuple[int, float, str]:
        """Sort key."""
        return (get_args(Kind).index(self.kind), self.value, self.name)


def parse_arm(name: str) -> ArmName:
    """Parses an arm's name; an unknown one has the kind "other"."""
    if name in _WHOLE:
        kind, label = _WHOLE[name]
        return ArmName(name, kind, 0.0, label)
    if match := re.fullmatch(r"fixed_([1-9]\d?(?:\.\d*[1-9])?)", name):
        return ArmName(name, "fixed", float(match[1]), f"fixed {float(match[1]):g} %")
    if match := re.fullmatch(r"(?:(?!base_)((?:(?!merge_).)+)_)?merge_(0(?:\.\d*[1-9])?|1)", name):
        label = f"{parse_arm(match[1]).label}, merge" if match[1] else "merge"
        return ArmName(name, "merge", float(match[2]), f"{label} {float(match[2]):g}")
    if match := RESIDUAL.fullmatch(name):
        label = f"{parse_arm(match[1]).label}, residual" if match[1] else "residual"
        return ArmName(name, "merge", 1.0, label)
    if match := re.fullmatch(r"(random|rho)_(random|rho)", name):
        new, old = (word.replace("rho", "\u03c1") for word in match.groups())
        return ArmName(name, "ablation", 0.0, f"new {new}, replay {old}")
    if match := re.fullmatch(r"(.+)_(converged|long|total)", name):
        word = {"long": "longer", "total": "at RoD's cost in all"}.get(match[2], match[2])
        return ArmName(name, "other", 0.0, f"{parse_arm(match[1]).label}, {word}")
    if name.startswith("control_"):
        copied = {"share": "shares", "source": "shares by source"}.get(name[8:], name[8:])
        return ArmName(name, "control", 0.0, f"random, RoD's {copied}")
    if match := re.fullmatch(r"rod_(kappa_|m)(\d+(?:\.\d+)?)", name):
        sign = {"kappa_": "\u03ba", "m": "m"}[match[1]]
        return ArmName(name, "rod_variant", 0.0, f"RoD {sign} = {match[2]}")
    if name.startswith("rod_"):
        return ArmName(name, "rod_variant", 0.0, "RoD " + name[4:].replace("_", " "))
    return ArmName(name, "other", 0.0, name.replace("_", " "))
