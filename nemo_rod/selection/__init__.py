"""Which blocks to train on: candidates, references, scores and policies, and their record.

The algorithm, one module per line (numpy and the standard library only):

    candidates.pool(step)                  candidates.py, permutation.py
    references[block_ids]                  references/
    policy.select(score, is_replay, k)     policies.py, choice.py
    curriculum.append(choice)              curriculum/

`selector.py` combines the first three; `curriculum/journal.py` records the result with the step's
metrics; `dealing.py` assigns the chosen blocks to replicas.
"""

from nemo_rod.selection.candidates import Candidates, Pool, Pools, retention_for_share
from nemo_rod.selection.choice import Choice, OnNonfinite, choose
from nemo_rod.selection.competition import selection_metrics
from nemo_rod.selection.curriculum.header import CurriculumHeader, SourceRow
from nemo_rod.selection.curriculum.log import Curriculum, StepRecord
from nemo_rod.selection.curriculum.recorded_pools import FollowedPools, RecordedPools, replay_share
from nemo_rod.selection.policies import (
    FixedShare,
    Joint,
    Policy,
    TakeAll,
    reducible_loss,
    threshold,
)
from nemo_rod.selection.references import (
    ReferenceLosses,
    ReferenceManifest,
    References,
    ReferenceWriter,
    block_loss,
    compact,
    logged_ids,
    num_targets,
    remove_logs,
)
from nemo_rod.selection.selector import BlockScorer, Selector

__all__ = [
    "BlockScorer",
    "Candidates",
    "Choice",
    "Curriculum",
    "CurriculumHeader",
    "FixedShare",
    "FollowedPools",
    "Joint",
    "OnNonfinite",
    "Policy",
    "Pool",
    "Pools",
    "RecordedPools",
    "ReferenceLosses",
    "ReferenceManifest",
    "ReferenceWriter",
    "References",
    "Selector",
    "SourceRow",
    "StepRecord",
    "TakeAll",
    "block_loss",
    "choose",
    "compact",
    "logged_ids",
    "num_targets",
    "reducible_loss",
    "remove_logs",
    "replay_share",
    "retention_for_share",
    "selection_metrics",
    "threshold",
]
