"""Where the tests' files are, and modules that are imported where they are first used."""

import importlib
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
ROOT = TESTS.parent
GOLDEN = TESTS / "golden"
WORKERS = TESTS / "workers"  # programs that tests start, most of them under torchrun


class Later:
    """A module whose import takes seconds: every process collects all tests, and runs some."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name[0] == "_":  # pytest asks every name of a file whether it is a test
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)
