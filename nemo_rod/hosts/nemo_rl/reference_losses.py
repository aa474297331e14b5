"""Reference losses of a role, computed by the workers of a NeMo-RL policy."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from nemo_rod.config import Scoring
from nemo_rod.hosts.nemo_rl.inputs import open_store
from nemo_rod.hosts.nemo_rl.policy import started
from nemo_rod.selection.references.folder import holds, precision_name, role_manifest
from nemo_rod.selection.references.reference_pass import write_references


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
        lengths=sorted({size, int(size * Fraction(scoring.prefix)), *rod["lengths"]}, reverse=True),
        precision=precision_name(policy_cfg["precision"]),
    )
    required = np.load(rod["wanted"])[manifest.start : manifest.stop] if rod["wanted"] else None
    if holds(out, manifest, required):
        return
    with started(config) as workers:
        scorer = SimpleNamespace(
            store=store,
            losses_at=lambda ids, lengths: workers.call(
                "rod_losses_at", block_ids=ids, lengths=lengths
            ),
            micro_batch_size=scoring.micro_batch_size,
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
