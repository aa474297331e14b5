"""Writes a model's losses on blocks as references (paper, "reference caching").

One rank writes a part of the blocks as soon as all of it is scored, so that an interrupted job
resumes at the last part, in this layout or another.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rod.progress import Progress
from nemo_rod.selection import ReferenceManifest, ReferenceWriter
from nemo_rod.selection.arrays import Mask
from nemo_rod.selection.dealing import scored_blocks


def write_references(
    scorer: Any,
    out: Path,
    *,
    manifest: ReferenceManifest,
    name: str,
    agree: Callable[[Callable[[], Any]], Any],
    required: Mask | None = None,
) -> None:
    """Scores the blocks that are missing in a folder and writes their losses. Collective.

    Args:
        scorer: has `store`, `losses_at`, `micro_batch_size` and `replicas`, as `MegatronScorer`.
        out: folder of the references; it and the next are as those of `ReferenceWriter`.
        manifest: provenance of the losses.
        name: title of the progress line.
        agree: calls a function on the rank that writes and returns its result on every rank.
        required: blocks of the range that must have a reference; None for all.

    Raises:
        ValueError: as `ReferenceWriter`, or a loss is not finite.
    """
    writer: ReferenceWriter | None = None  # set on the rank that writes
    num_required = manifest.num_blocks if required is None else int(required.sum())
    progress = Progress(name, num_required, unit="blocks", tokens=manifest.block_size)

    def begin() -> tuple[ReferenceManifest, np.ndarray]:
        nonlocal writer
        writer = ReferenceWriter(out, manifest, scorer.store.hashes, required)
        is_missing_N = np.zeros(manifest.num_blocks, dtype=bool)
        is_missing_N[writer.missing - manifest.start] = True
        return writer.manifest, np.packbits(is_missing_N)

    manifest, bits = agree(begin)
    missing = manifest.start + np.flatnonzero(np.unpackbits(bits, count=manifest.num_blocks))
    done = num_required - len(missing)
    progress.start(done)
    for ids, losses in scored_blocks(
        missing,
        manifest,
        scorer.losses_at,
        micro_batch_size=scorer.micro_batch_size,
        replicas=scorer.replicas,
    ):
        if writer is not None:
            writer.append(ids, losses)
            progress.step(done := done + len(ids))
    agree(lambda: writer.close() if writer else None)
