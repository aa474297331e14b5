"""`[ARM_]lower_lr_<factor>`: the recipe's learning rate, divided by a factor."""

from __future__ import annotations

from typing import Any

from nemo_rod.alternatives import read_name
from nemo_rod.config import Config


def arm(config: Config, name: str) -> dict[str, Any] | None:
    """Returns the variant that a name means; None for other names."""
    if (found := read_name(name, "lower_lr")) is None:
        return None
    of, factor = found
    return {"of": of, "train": {"lr": config.train.lr / factor}}
