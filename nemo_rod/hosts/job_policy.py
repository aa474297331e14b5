"""The policy of a job on any host, with the options that go with it; and that of a watched job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from nemo_rod import parts
from nemo_rod.files import digest
from nemo_rod.hosts.job_record import refuse_nameless
from nemo_rod.selection import Candidates, OnNonfinite, Policy, TakeAll
from nemo_rod.selection.arms import registered_policy
from nemo_rod.selection.arrays import Floats, Nats
from nemo_rod.selection.policies import Joint, check_policy


class Watch(TakeAll):
    """Takes the whole pool, and has the losses of its blocks in training recorded."""

    state: Mapping[str, Floats] = {}  # none, as it learns nothing

    def observe(self, choice: Any, loss_K: Nats) -> None:
        """Learns nothing: the losses of a policy that observes them are recorded."""


def refuse_if(*checks: tuple[object, str]) -> None:
    """Raises a ValueError with the sentence of the first check whose condition holds."""
    for refused, sentence in checks:
        if refused:
            raise ValueError(sentence)


def job_policy(
    policy: Policy | str | None, on_nonfinite: str, validation_every: int | None, *, measures: bool
) -> tuple[Policy, list[str]]:
    """Returns the policy of a job, and the digests of the files that it is made of.

    It is one that is given, registered or in FILE.py:NAME, or else `Joint()`.

    Args:
        policy: the policy.
        on_nonfinite: treatment of a score that is not finite.
        validation_every: steps between two measurements of held-out losses; 0 for none, None if the
            host decides.
        measures: whether held-out losses are measured during training.

    Raises:
        ValueError: it is no policy or could not be recognised later, or an option is not valid.
    """
    policy = Joint() if policy is None else policy
    file = parts.file_of(policy) if isinstance(policy, str) else None
    policy = check_policy(registered_policy(policy, None) if isinstance(policy, str) else policy)
    refuse_nameless(policy, "policy")
    is_count = type(validation_every) is int and validation_every >= 0
    refuse_if(
        (validation_every is not None and not is_count,
         f"validation_every={validation_every!r} is not valid: expected a number of steps, or 0 "
         "for no held-out losses during training."),
        (on_nonfinite not in get_args(OnNonfinite),
         f"on_nonfinite={on_nonfinite!r} is not valid: expected 'refuse' or 'exclude'."),
        ("held_out" in policy.needs and not measures,
         f"{type(policy).__name__} follows held-out losses: give the job held-out data, and a "
         "validation_every of at least 1."),
    )  # fmt: skip
    values = getattr(policy, "__dict__", {}).values()  # as the file of a `Schedule`
    files = [file, *(value for value in values if isinstance(value, str) and os.path.isfile(value))]
    return policy, [digest(Path(each).read_bytes()) for each in files if each is not None]


def multiplier_of(policy: Policy) -> float:
    """Returns the candidates that are drawn for a trained sample, unless a job says otherwise."""
    return 1 if isinstance(policy, TakeAll) else Candidates.multiplier
