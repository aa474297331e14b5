"""The paper's own numbers for its settings, from paper.json."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any


@cache
def paper() -> dict[str, Any]:
    """Returns the transcribed numbers by the paper's labels."""
    content: dict[str, Any] = json.loads((Path(__file__).parent / "paper.json").read_text("utf-8"))
    return content


def paper_arms(recipe: str) -> dict[str, dict[str, float]]:
    """Returns the paper's numbers of a recipe's arms; empty if the setting is not the paper's."""
    arms: dict[str, dict[str, float]] = {}
    for label in ("tab:cross_scale", "tab:rod_convergence", "tab:frontier_full"):
        for arm, numbers in paper()[label].get(recipe, {}).items():
            arms[arm] = {**arms.get(arm, {}), **numbers}
    return arms


def paper_value(label: str, key: str, recipe: str) -> Any:
    """Returns a recipe's value in a figure of the paper; None if there is none."""
    return paper()[label].get(key, {}).get(recipe)


def title_of(recipe: str) -> str:
    """Returns the paper's title of a setting; the recipe's name if it is not the paper's."""
    return str(paper()["titles"].get(recipe, recipe))


def category_of(source: str) -> str | None:
    """Returns the paper's knowledge category of one of its replay sources; None for others.

    In the authors' own corpora, the Legal sources are categories, and the German ones have names
    that differ from ours.
    """
    for names in ("categories", "categories of the authors' corpora"):
        for category, sources in paper()[names].items():
            if source in sources:
                return str(category)
    return None


def category_role(category: str) -> str:
    """Returns the role of a category's colour (`style.py`), the same in all settings."""
    return f"source-{list(paper()['categories']).index(category)}"
