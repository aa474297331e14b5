"""Reference losses: the loss of a block under the specialist, or the untouched base model.

    writer.append(block_ids, losses)       folder.py: one file per range of blocks, and a manifest
    references[block_ids]                  lookup.py: by id, or by content

All of it needs NumPy alone.
"""

from nemo_rod.selection.references.folder import ReferenceManifest as ReferenceManifest
from nemo_rod.selection.references.folder import ReferenceWriter as ReferenceWriter
from nemo_rod.selection.references.lookup import References as References
