"""The gains and losses of a trained model: per-source losses, forgetting, merging."""

from __future__ import annotations

from nemo_rod.evaluation.merging import merge_checkpoints
from nemo_rod.selection.forgetting import (
    forgetting_by_source,
    validation_forgetting,
    weighted_loss,
)

__all__ = ["forgetting_by_source", "merge_checkpoints", "validation_forgetting", "weighted_loss"]
