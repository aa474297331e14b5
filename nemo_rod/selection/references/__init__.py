"""Reference losses: the loss of a block under the specialist, or the untouched base model.

    writer.append(block_ids, losses)       rank_log.py: one log per rank, while blocks are scored
    compact(folder)                        rank_log.py: turns logs into arrays, dense by block id
    folder.losses, folder.heads            folder.py: a complete folder and its manifest
    references[block_ids]                  lookup.py: by id, or by content

All of it needs NumPy alone.
"""

from nemo_rod.selection.references.folder import ReferenceManifest as ReferenceManifest
from nemo_rod.selection.references.lookup import ReferenceLosses as ReferenceLosses
from nemo_rod.selection.references.lookup import References as References
from nemo_rod.selection.references.rank_log import ReferenceWriter as ReferenceWriter
from nemo_rod.selection.references.rank_log import compact as compact
from nemo_rod.selection.references.rank_log import logged_ids as logged_ids
from nemo_rod.selection.references.rank_log import remove_logs as remove_logs
