"""The report's Jinja2 templates: markup, style and fixed prose."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def environment() -> Any:
    """Returns Jinja2's environment, which escapes what it fills in and refuses missing values."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup, escape

    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    subscript = Markup("F<sub>val</sub>")
    made.filters["typeset"] = lambda text: escape(text).replace("F_val", subscript)
    return made
