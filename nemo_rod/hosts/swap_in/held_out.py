"""Held-out losses of a job, by source, on the first samples of its validation split."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from nemo_rod.files import digest
from nemo_rod.hosts.swap_in.job_data import JobData
from nemo_rod.hosts.swap_in.roles import Roles
from nemo_rod.megatron.scoring.scorer import MegatronScorer
from nemo_rod.selection.held_out import source_losses

SAMPLES = 64  # of every source


class HeldOut:
    """Measures held-out losses with the job's own forward step, at the start and every N steps.

    The samples do not depend on how many of them the job's own validation reads.

    Args:
        dataset: the job's validation data; see `JobData`.
        roles: see `roles.py`.
        every: steps between two measurements; the last step is always measured.
        unused: see `JobData`.

    Raises:
        ValueError: the job has no validation data, or not the sources that have roles.
    """

    def __init__(self, dataset: Any, roles: Roles, *, every: int, unused: Collection[str]) -> None:
        if dataset is None:
            raise ValueError("the job has no validation split")
        self.every = every
        self.data = JobData(dataset, roles, num_samples=None, unused=unused)
        self.sources = [row for row in self.data.sources if row.count]
        if not self.sources:
            raise ValueError("the job's validation split has no sample")

    def digest(self) -> str:
        """Returns the digest of the samples' content, hex."""
        starts = ((row.start, min(row.count, SAMPLES)) for row in self.sources)
        ids = np.concatenate([start + np.arange(count) for start, count in starts])
        return digest(self.data.hashes(ids).tobytes())

    def is_due(self, done: int, steps: int) -> bool:
        """Returns whether to measure after a number of steps of the whole job."""
        return done == steps or done % (self.every or math.inf) == 0

    def losses(
        self, model: list, groups: Any, forward_step: Callable, *, micro_batch_size: int
    ) -> dict[str, float]:
        """Returns `validation/<role>/<source>/loss`, nats per token. Collective.

        Args:
            model: the model's chunks on this rank.
            groups: Megatron's process groups.
            forward_step: a forward step that returns losses and their mask.
            micro_batch_size: samples in one forward pass of one replica.
        """
        scorer = MegatronScorer(
            model,
            self.data,
            groups,
            micro_batch_size=micro_batch_size,
            batches=self.data.micro_batches,
            forward_step=forward_step,
        )
        return source_losses(scorer, self.sources, num_blocks=SAMPLES)
