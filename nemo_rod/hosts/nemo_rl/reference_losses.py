"""Reference losses of a role, computed by the workers of a NeMo-RL policy."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from nemo_rod.hosts.nemo_rl.policy import started
from nemo_rod.hosts.nemo_rl.settings import open_store
from nemo_rod.jobs import ReferenceJob
from nemo_rod.selection.references.folder import holds, precision_name, role_manifest
from nemo_rod.selection.references.reference_pass import write_references


def write_reference(job: ReferenceJob, config: dict[str, Any]) -> None:
    """Writes a model's losses on the training blocks of the job's role.

    An interrupted run resumes where it stopped. Ray must be running.

    Raises:
        ValueError: the role is missing or has no blocks, or the folder has references of another
            model, role, store or precision.
        WorkerFailed: a worker failed; raised at once, with the cause.
    """
    store, out = open_store(config, job), Path(job.out)
    manifest = role_manifest(
        store,
        job.role,
        model=job.model_digest,
        lengths=job.lengths,
        precision=precision_name(config["policy"]["precision"]),
    )
    required = np.load(job.wanted)[manifest.start : manifest.stop] if job.wanted else None
    if holds(out, manifest, required):
        return
    with started(config, job) as workers:
        scorer = SimpleNamespace(
            store=store,
            losses_at=lambda ids, lengths: workers.call(
                "rod_losses_at", block_ids=ids, lengths=lengths
            ),
            micro_batch_size=job.config.scoring.micro_batch_size,
            replicas=workers.policy.sharding_annotations.get_axis_size("data_parallel"),
        )
        write_references(
            scorer,
            out,
            manifest=manifest,
            name="reference",
            required=required,
            agree=lambda function: function(),  # the driver alone writes
        )
