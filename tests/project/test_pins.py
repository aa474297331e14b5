"""The pinned sets and the digests of their files agree; licences with obligations are named."""

import importlib.metadata
import re

import pytest
from places import ROOT

PINNED = sorted((ROOT / "requirements").glob("*.txt"))
PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[a-z,]+\])?==(\S+)", re.MULTILINE)
# Licences that oblige a distributor to more than a notice.
COPYLEFT = re.compile(r"\b[AL]?GPL|MPL|EPL|CDDL|Proprietary", re.IGNORECASE)


def normal(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def licence(name: str) -> str | None:
    """The licence in the metadata of a package; None if it is not installed."""
    try:
        metadata = importlib.metadata.metadata(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    classifiers = [c for c in metadata.get_all("Classifier") or () if c.startswith("License ::")]
    text = metadata.get("License-Expression") or ", ".join(classifiers)
    return text or (metadata.get("License") or "")[:60]


def test_packages_with_obligations_are_named():
    page = (ROOT / "docs" / "support.md").read_text().partition("## Licences\n")[2]
    named = {*re.findall(r"`([a-z-]+)`", page.partition("\n## ")[0])}
    pinned = {
        normal(name)
        for file in PINNED
        if file.stem != "sbom"  # a tool in an environment of its own
        for name, _ in PIN.findall(file.read_text())
    }
    assert named <= pinned
    licences = {name: text for name in pinned if (text := licence(name)) is not None}
    assert len(licences) > 50
    assert {name for name, text in licences.items() if COPYLEFT.search(text)} <= named


@pytest.mark.parametrize("file", PINNED, ids=lambda file: file.stem)
def test_pins_have_digests_of_their_files(file):
    hashed = (file.parent / "hashed" / file.name).read_text()
    entries = re.findall(
        r"^(\S+==\S+) \\\n((?: +--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", hashed, re.MULTILINE
    )
    pinned = [PIN.match(entry) for entry, digests in entries if digests]
    pins = {(normal(name), version) for name, version in PIN.findall(file.read_text())}
    assert {(normal(m[1]), m[2]) for m in pinned if m} == pins
    assert len(pinned) == len(pins), "a pin without digests, or twice"
    # nothing else, such as an index or another file
    assert hashed.count("==") == len(pins)
