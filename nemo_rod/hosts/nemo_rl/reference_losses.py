"""Reference losses of a whole corpus, computed by the workers of a NeMo-RL policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from nemo_rod.config import Scoring
from nemo_rod.hosts.nemo_rl.inputs import open_store
from nemo_rod.hosts.nemo_rl.policy import Workers, make_policy
from nemo_rod.hosts.nemo_rl.settings import short_precision
from nemo_rod.hosts.nemo_rl.worker import Task
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
    rod, policy_cfg = config["rod"], config["policy"]
    out = Path(rod["out"])
    store = open_store(config)
    scoring, size = Scoring(**rod["scoring"]), store.block_size
    manifest = role_manifest(
        store,
        str(rod["role"]),
        model=rod["model_digest"] or policy_cfg["model_name"],
        lengths=sorted({size, int(size * scoring.part), *rod["lengths"]}, reverse=True),
        precision=short_precision(policy_cfg),
    )
    wanted = None
    if rod["wanted"] is not None:
        wanted = np.load(rod["wanted"])[manifest.start : manifest.stop]
    if holds(out, manifest, wanted):
        return
    writer = ReferenceWriter(out, manifest, store.hashes, wanted)
    policy_cfg["megatron_cfg"]["train_iters"] = 1  # required, although nothing is trained
    policy, cluster = make_policy(config, train=False)
    try:
        task = Task(blocks=rod["blocks"], scoring_micro_batch_size=scoring.micro_batch_size)
        workers = Workers(policy, task, stall_seconds=rod["stall_seconds"])
        replicas = policy.sharding_annotations.get_axis_size("data_parallel")
        done = 0
        progress = Progress("reference", len(writer.missing), unit="blocks")
        progress.start(done)
        for ids, losses in scored_blocks(
            writer.missing,
            writer.manifest,
            workers.losses_at,
            micro_batch_size=scoring.micro_batch_size,
            replicas=replicas,
        ):
            writer.append(ids, losses)
            progress.step(done := done + len(ids))
        writer.close()
    finally:
        policy.worker_group.shutdown(force=True)
        cluster.shutdown()
