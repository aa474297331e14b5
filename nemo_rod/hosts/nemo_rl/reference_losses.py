"""Reference losses of a role, computed by the workers of a NeMo-RL policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from nemo_rod.config import Scoring
from nemo_rod.hosts.nemo_rl.inputs import open_store
from nemo_rod.hosts.nemo_rl.policy import started
from nemo_rod.hosts.nemo_rl.settings import short_precision
from nemo_rod.progress import Progress
from nemo_rod.selection import ReferenceWriter
from nemo_rod.selection.dealing import scored_blocks
from nemo_rod.selection.references.folder import holds, role_manifest


def write_reference(config: dict[str, Any]) -> None:
    """Writes the losses of `policy.model_name` on the training blocks of `rod.role` to `rod.out`.

    An interrupted run resumes where it stopped. Ray must be running.

    Raises:
        ValueError: the role is missing or has no blocks, or the folder has references of another
            model, role, store or precision.
        WorkerFailed: a worker failed; raised at once, with the cause.
    """
    rod, policy_cfg, out = config["rod"], config["policy"], Path(config["rod"]["out"])
    store = open_store(config)
    scoring, size = Scoring(**rod["scoring"]), store.block_size
    manifest = role_manifest(
        store,
        str(rod["role"]),
        model=rod["model_digest"] or policy_cfg["model_name"],
        lengths=sorted({size, int(size * scoring.part), *rod["lengths"]}, reverse=True),
        precision=short_precision(policy_cfg),
    )
    required = np.load(rod["wanted"])[manifest.start : manifest.stop] if rod["wanted"] else None
    if holds(out, manifest, required):
        return
    writer = ReferenceWriter(out, manifest, store.hashes, required)
    progress, done = Progress("reference", len(writer.missing), unit="blocks"), 0
    with started(config) as workers:
        progress.start(done)
        for ids, losses in scored_blocks(
            writer.missing,
            writer.manifest,
            lambda ids, lengths: workers.call("rod_losses_at", block_ids=ids, lengths=lengths),
            micro_batch_size=scoring.micro_batch_size,
            replicas=workers.policy.sharding_annotations.get_axis_size("data_parallel"),
        ):
            writer.append(ids, losses)
            progress.step(done := done + len(ids))
    writer.close()
