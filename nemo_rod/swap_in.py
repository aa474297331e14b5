"""The former home of `nemo_rod.hosts.swap_in`, whose names are still found here."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_rod.hosts.swap_in import install as install
    from nemo_rod.hosts.swap_in import reference as reference
    from nemo_rod.hosts.swap_in import score as score
else:

    def __getattr__(name: str) -> Any:
        return getattr(importlib.import_module("nemo_rod.hosts.swap_in"), name)
