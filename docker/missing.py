"""Prints the pins, with the digests of their files, of what a Python lacks of requirements.txt.

python missing.py PYTHON requirements.txt hashed/*.txt >missing.txt
"""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement  # PYTHON itself may have no pip
from pip._vendor.packaging.utils import canonicalize_name

ENTRY = re.compile(r"^([\w.-]+)==(\S+) \\\n(?: +--hash=\S+(?: \\)?\n)+", re.MULTILINE)


def main(python: str, wanted: Path, *hashed: Path) -> None:
    """Prints one entry for every requirement that no version there meets."""
    program = "import sys; print(*filter(None, sys.path), sep='\\n')"
    paths = subprocess.run(
        [python, "-P", "-c", program], capture_output=True, text=True, check=True
    )
    there = {
        canonicalize_name(found.name): found.version
        for found in metadata.distributions(path=paths.stdout.splitlines())
    }
    pins = [match for file in hashed for match in ENTRY.finditer(file.read_text())]
    for line in wanted.read_text().splitlines():
        if not (text := line.partition("#")[0].strip()):
            continue
        needed = Requirement(text)
        name, meets = canonicalize_name(needed.name), needed.specifier.contains
        if name in there and meets(there[name], prereleases=True):
            continue
        found = [pin[0] for pin in pins if canonicalize_name(pin[1]) == name and meets(pin[2])]
        if not found:
            sys.exit(f"no pin with digests meets {text}")
        print(found[-1], end="")


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
