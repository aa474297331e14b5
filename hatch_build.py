"""Metadata of a wheel: the README as PyPI can show it, and the addresses of the project.

    NEMO_ROD_URL=https://github.com/OWNER/NAME python -m build

PyPI has none of the files that README.md links to. With an address, links lead to the files of this
version there; without one, their text stays and pictures go, so that nothing leads nowhere.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:)([^)]+)\)")  # to a file of this repository
_PAPER = "https://github.com/bethgelab/replay-on-demand"


class CustomMetadataHook(MetadataHookInterface):
    """Fills in what pyproject.toml declares as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Sets `readme` and `urls`."""
        home = os.environ.get("NEMO_ROD_URL", "").rstrip("/")
        package = Path(self.root, "nemo_rod", "__init__.py").read_text()
        (version,) = re.findall(r'^__version__ = "(.+)"', package, re.MULTILINE)
        text = Path(self.root, "README.md").read_text()
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": for_pypi(text, home, f"v{version}"),
        }
        metadata["urls"] = {"Authors' code": _PAPER}
        if home:
            metadata["urls"] |= {
                "Source": home,
                "Documentation": f"{home}/blob/main/docs/index.md",
                "Changelog": f"{home}/blob/main/CHANGELOG.md",
                "Issues": f"{home}/issues",
            }


def for_pypi(text: str, home: str, tag: str) -> str:
    """Returns Markdown whose links to files lead to `home` at a tag, or are none without `home`."""

    def replaced(link: re.Match[str]) -> str:
        picture, name, path = link.groups()
        if not home:
            return "" if picture else name
        return f"{picture}[{name}]({home}/{'raw' if picture else 'blob'}/{tag}/{path})"

    return _LINK.sub(replaced, text)
