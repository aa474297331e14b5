"""The former home of `nemo_rod.hosts.swap_in`, whose names are still found here."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("nemo_rod.hosts.swap_in"), name)
