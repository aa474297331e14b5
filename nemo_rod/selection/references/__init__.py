"""Reference losses: what a block costs the specialist, or the untouched base model.

    writer.append(block_ids, sums)         rank_log.py: one log per rank, while blocks are scored
    compact(folder)                        compaction.py: turns logs into arrays, dense by block id
    folder.sums, folder.heads              folder.py: a complete folder and its manifest
    references[block_ids]                  lookup.py: by id; hash_index.py: by content
    block_loss(sums, ...)                  block_loss.py: eighths of a block -> nats per token

All of it needs NumPy alone.
"""

from nemo_rod.selection.references.block_loss import block_loss, num_targets
from nemo_rod.selection.references.compaction import compact, remove_logs
from nemo_rod.selection.references.folder import NUM_PARTS, ReferenceManifest
from nemo_rod.selection.references.lookup import ReferenceLosses, References
from nemo_rod.selection.references.rank_log import ReferenceWriter, logged_ids

__all__ = [
    "NUM_PARTS",
    "ReferenceLosses",
    "ReferenceManifest",
    "ReferenceWriter",
    "References",
    "block_loss",
    "compact",
    "logged_ids",
    "num_targets",
    "remove_logs",
]
