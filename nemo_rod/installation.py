"""How this package was installed, for advice that names a command or a page."""

from __future__ import annotations

import json
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution, requires, version
from pathlib import Path

_ROOT = Path(__file__).parents[1]  # the checkout, or site-packages


def config_folder() -> Path:
    """Returns the folder of Hydra's groups: the installed package's, or the checkout's."""
    packaged = Path(__file__).parent / "_configs"
    return packaged if packaged.is_dir() else _ROOT / "hydra_configs"


def pip_install(*extras: str) -> str:
    """Returns the command that installs extras of this package, from where it came itself.

    The name alone is of no use, and not ours, where the package came from a folder or a file.
    """
    try:
        came_from = json.loads(distribution("nemo-rod").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:  # a checkout on the path
        came_from = {"url": _ROOT.as_uri(), "dir_info": {}}
    wanted, url = f"nemo-rod[{','.join(extras)}]", came_from.get("url")
    if url is None:
        return f"pip install '{wanted}'"
    if "vcs_info" in came_from:
        url = f"{came_from['vcs_info']['vcs']}+{url}"
    if came_from.get("dir_info", {}).get("editable"):
        return f"pip install -e '{url.removeprefix('file://')}[{','.join(extras)}]'"
    return f"pip install '{wanted} @ {url}'"


def clash(package: str, needed: str) -> str:
    """Returns why the installed version of a package is not one that another asks for; "" if it is.

    They may work together all the same, as in an image that brings both.
    """
    from packaging.requirements import Requirement

    with suppress(PackageNotFoundError):
        installed = version(needed)
        for wanted in map(Requirement, requires(package) or ()):
            if wanted.name == needed and not wanted.specifier.contains(installed, prereleases=True):
                return (
                    f"{package} {version(package)} asks for {needed}{wanted.specifier}, and "
                    f"{installed} is installed: pip install '{needed}{wanted.specifier}'"
                )
    return ""


def page(name: str) -> str:
    """Returns where a page of the documentation is on this machine."""
    packaged = Path(__file__).parent / "_docs"
    return str((packaged if packaged.is_dir() else _ROOT / "docs") / f"{name}.md")
