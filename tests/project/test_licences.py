"""The table of licences, the digests of the pinned sets, and the sets themselves, agree.

`UPDATE_GOLDEN=1 make test ARGS="-k licences"` writes docs/licences.md anew.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import licences
import pytest
from places import ROOT

PINNED = sorted((ROOT / "requirements").glob("*.txt"))


def test_licences_are_those_of_the_packages() -> None:
    if os.environ.get("UPDATE_GOLDEN"):
        licences.PAGE.write_text(licences.page())
    known = licences.known()
    assert known.keys() == licences.pins().keys()
    assert "unknown" not in known.values()
    installed = {name: licences.licence(name) for name in known}
    if installed["transformers"] == "Apache Software License":  # release 4 has a classifier for it
        installed["transformers"] = "Apache 2.0 License"
    assert {n: text for n, text in installed.items() if text and text != known[n]} == {}
    assert sum(text is not None for text in installed.values()) > 50


def test_page_names_every_package_with_obligations() -> None:
    text = licences.PAGE.read_text().partition("| package")[0]
    named = {name for name in licences.known() if f"`{name}` (" in text}
    assert named == {n for n, lic in licences.known().items() if licences.COPYLEFT.search(lic)}


@pytest.mark.parametrize("file", PINNED, ids=lambda file: file.stem)
def test_pins_have_digests_of_their_files(file: Path) -> None:
    hashed = (file.parent / "hashed" / file.name).read_text()
    entries = re.findall(
        r"^(\S+==\S+) \\\n((?: +--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", hashed, re.MULTILINE
    )
    found = [licences.PIN.match(entry) for entry, digests in entries if digests]
    pins = {
        (licences.normal(name), version) for name, version in licences.PIN.findall(file.read_text())
    }
    assert {(licences.normal(m[1]), m[2]) for m in found if m} == pins
    assert len(found) == len(pins), "a pin without digests, or twice"
    # nothing else, such as an index or another file
    assert hashed.count("==") == len(pins)
