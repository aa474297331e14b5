"""The part common to all hosts: the user's options, and the selector built from them for a job.

A host's `install` creates a `SelectingJob`, calls `ready` when the trainer has built its training
data, and replaces the schedule of every training step by `around(...)`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rod.selection import Choice, Joint, Policy, References
from nemo_rod.swap_in.blend import Blend
from nemo_rod.swap_in.host_selector import StreamSelector
from nemo_rod.swap_in.step_record import ChoiceRecord

Log = Callable[[int, dict[str, float]], None]


class SelectingJob:
    """A job with the selector installed.

    Args:
        references: folders of reference losses for all of the job's data, written by `reference`.
        policy: policy that chooses the batch from a pool; `Joint()` by default.
        multiplier: candidates per trained sample (m), a whole number.
        out: folder for `curriculum.rod` and `metrics.jsonl`; None to write neither.
        log: function called on the recording rank with the number of the step, from 0, and its
            metrics, to show them where the host shows its own.
        unused: keys of the job's batches that its forward step does not read, such as an S x S
            mask that the model computes itself; they are not passed on.
        around_scoring: factory of a context for the scoring pass, in which the host preserves state
            that its forward step would change.

    Raises:
        ValueError: the multiplier or the references cannot be used.
    """

    def __init__(
        self,
        *,
        references: Sequence[str | Path],
        policy: Policy | None,
        multiplier: int,
        out: Path | None,
        log: Log = lambda step, metrics: None,
        unused: Collection[str] = (),
        around_scoring: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        self.policy: Policy = Joint() if policy is None else policy
        self.references, self.multiplier, self.out = references, multiplier, out
        self.log, self.unused, self.around_scoring = log, unused, around_scoring
        check_multiplier(multiplier)
        if self.policy.needs_scores and not references:
            raise ValueError(
                f"{type(self.policy).__name__} chooses by reducible loss: give the folders of "
                "reference losses as 'references', or policy=TakeAll() with multiplier=1."
            )
        if not self.policy.needs_scores and multiplier > 1:
            raise ValueError(
                f"{type(self.policy).__name__} uses no scores, so multiplier={multiplier} "
                "would draw samples in vain: set multiplier=1."
            )
        if references:
            References.open(references)  # refuses missing or damaged ones before the job starts
        self.selector: StreamSelector | None = None
        self.record: ChoiceRecord | None = None
        self.begun = False

    def ready(self, blend: Blend, *, batch_size: int, seed: int) -> None:
        """Builds the selector once the job's data is known, and again if the job restarts.

        Args:
            blend: the job's training data.
            batch_size: samples trained on in one step (K).
            seed: seed of the job's data.

        Raises:
            ValueError: the references belong to other data.
        """
        references = self._references(blend)
        self.record = ChoiceRecord(
            self.out,
            blend=blend,
            references=references,
            policy=self.policy,
            num_chosen=batch_size,
            multiplier=self.multiplier,
            seed=seed,
        )
        self.selector = StreamSelector(
            blend=blend,
            policy=self.policy,
            multiplier=self.multiplier,
            references=references,
            record=self._note,
            unused=self.unused,
            around_scoring=self.around_scoring,
        )
        self.begun = False

    def _references(self, blend: Blend) -> References | None:
        if not self.references:
            return None
        try:
            return References.open(self.references, blend)
        except ValueError as error:
            raise ValueError(
                f"{error}. References of a job hold for its blend, roles, seed, sample length, "
                "masks, number of steps and multiplier alone."
            ) from None

    def around(self, schedule: Callable, *, step: int, groups: Any) -> Callable:
        """Returns the replacement for one training step's schedule; see `StreamSelector.around`.

        The first call opens the files at that step, which is collective.

        Raises:
            ValueError: the files belong to another run; raised on all ranks.
        """
        assert self.selector is not None and self.record is not None, "no data yet"
        if not self.begun:
            self.record.begin(step)
            self.begun = True
        return self.selector.around(schedule, step=step, groups=groups)

    def _note(self, choice: Choice, source_C: np.ndarray) -> None:
        assert self.record is not None
        metrics = self.record(choice, source_C)
        if metrics:
            known = {name: value for name, value in metrics.items() if value is not None}
            self.log(choice.pool.step, known)


def check_multiplier(multiplier: int) -> None:
    """Refuses a multiplier that is not a whole number of candidates per sample.

    Raises:
        ValueError: the multiplier is not an integer of at least 1.
    """
    if not isinstance(multiplier, int) or multiplier < 1:
        raise ValueError(
            f"multiplier={multiplier!r} is not valid: expected a whole number >= 1, as a job's "
            "iterators give whole micro-batches."
        )
