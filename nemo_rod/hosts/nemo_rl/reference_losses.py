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
from nemo_rod.selection import ReferenceWriter, compact, logged_ids, remove_logs
from nemo_rod.selection.references.folder import holds, role_manifest

_BATCHES_PER_CALL = 8  # micro-batches per replica between two writes


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
    cure = "name another folder as rod.out, or remove it to compute it again."
    if holds(out, manifest, cure=cure):
        remove_logs(out)
        return
    ids = np.arange(manifest.start, manifest.stop)
    out.mkdir(parents=True, exist_ok=True)
    policy_cfg["megatron_cfg"]["train_iters"] = 1  # required, although nothing is trained
    policy, cluster = make_policy(config, train=False)
    try:
        micro_batch_size = scoring.micro_batch_size
        task = Task(blocks=rod["blocks"], scoring_micro_batch_size=micro_batch_size)
        workers = Workers(policy, task, stall_seconds=rod["stall_seconds"])
        missing = ~np.isin(ids, logged_ids(out, manifest))
        replicas = policy.sharding_annotations.get_axis_size("data_parallel")
        size = micro_batch_size * _BATCHES_PER_CALL * replicas
        writer = ReferenceWriter(out, rank=0, manifest=manifest)
        progress = Progress("reference", len(ids), unit="blocks", prefix="")
        progress.start(len(ids) - int(missing.sum()))
        for start in range(0, len(ids), size):
            part, pending = ids[start : start + size], missing[start : start + size]
            if (
                pending.any()
            ):  # score the whole part, so that a block always has the same neighbours
                losses = workers.losses_at(part, manifest.lengths)
                writer.append(part[pending], losses[pending], store.hashes(part[pending]))
            progress.step(start + len(part))
        writer.close()
    finally:
        policy.worker_group.shutdown(force=True)
        cluster.shutdown()
    compact(out, manifest=manifest, hashes=store.hashes)
