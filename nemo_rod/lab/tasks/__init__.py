"""The gains and losses of a trained model: benchmark tasks and merging."""

from __future__ import annotations

from nemo_rod.lab.merging import merge_checkpoints

__all__ = ["merge_checkpoints"]
