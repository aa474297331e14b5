"""The report's Jinja2 templates: markup, style and fixed prose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nemo_rod.lab.report.style import css_variables


def render(template: str, **values: Any) -> str:
    """Returns a filled-in page; values are escaped, and missing ones refused."""
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
    colours = {"light": css_variables(0), "dark": css_variables(1)}
    return made.get_template(template).render(colours | values)
