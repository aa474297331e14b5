"""Colours of figures and page, for light and dark themes.

Figures are made in the light colours. In the page, each colour of a figure is replaced by a CSS
variable that follows the reader's theme. This requires a different colour for every role.
"""

from __future__ import annotations

from collections.abc import Iterable

from nemo_rod.selection.arm_names import parse_arm

# role -> (light, dark)
COLOURS: dict[str, tuple[str, str]] = {
    "surface": ("#fefefd", "#191a1c"),
    "ink": ("#1d2126", "#eceae4"),
    "muted": ("#626870", "#a3a8ae"),
    "grid": ("#e6e7e4", "#303236"),
    "rule": ("#c4c7c6", "#4b4e53"),
    "rod": ("#d4420c", "#ff8150"),
    "no-replay": ("#3f454c", "#c9ccd0"),
    "max-replay": ("#0e8a63", "#35c795"),
    "merge": ("#7653c4", "#ac92f5"),
    "other": ("#96682b", "#dba75f"),
    "fixed-0": ("#82b3ee", "#31689f"),
    "fixed-1": ("#5897e4", "#3f82c8"),
    "fixed-2": ("#2f79d3", "#5d9fe6"),
    "fixed-3": ("#205da9", "#8dbef5"),
    "fixed-4": ("#15427c", "#c0dcfb"),
    "adaptation": ("#0b7f8c", "#37bcc9"),
    "replay": ("#bb3a83", "#f07cba"),
    "source-0": ("#2b77d5", "#3a86e4"),
    "source-1": ("#1bae79", "#1a9d6f"),
    "source-2": ("#eca000", "#c88400"),
    "source-3": ("#0a8208", "#118511"),
    "source-4": ("#4b3ba6", "#8f84e8"),
    "source-5": ("#e24a49", "#e56766"),
    "source-6": ("#e67ba3", "#d45281"),
    "source-7": ("#ea6935", "#d85a27"),
    "source-rest": ("#9a9c98", "#7b7e82"),
}
NUM_FIXED = 5
NUM_SOURCES = 8

# of kinds of arms whose role has another name
_ROLES = {"base": "muted", "rod_variant": "rod", "ablation": "other", "control": "adaptation"}


def light(role: str) -> str:
    """Returns the light colour of a role, as used in figures."""
    return COLOURS[role][0]


def arm_colour(name: str, names: Iterable[str]) -> str:
    """Returns an arm's colour among arms: one hue for fixed replay, darker for more replay."""
    arm = parse_arm(name)
    if arm.kind != "fixed":
        return light(_ROLES.get(arm.kind, arm.kind.replace("_", "-")))
    shares = sorted(other.value for other in map(parse_arm, names) if other.kind == "fixed")
    place = shares.index(arm.value) / max(len(shares) - 1, 1) if len(shares) > 1 else 0.6
    return light(f"fixed-{round(place * (NUM_FIXED - 1))}")
