"""What one would do instead of RoD, one idea a file: arms by name, terms of a loss, policies.

    lower_lr_3              no replay at a third of the learning rate
    fixed_8_l2_base_0.1     fixed replay of 8 %, with a term that another part of this room adds

A part registers the arms that its names mean as `nemo_rod.arms`, what it adds to the loss as
`nemo_rod.terms`, and another choice of the batch as `nemo_rod.policies`.
"""

from __future__ import annotations

import re


def read_name(name: str, idea: str) -> tuple[str, float] | None:
    """Returns the arm and the number in a name `[ARM_]IDEA_NUMBER`; None for other names.

    ARM is no_replay, which is the default, fixed_<percent>, rod or rod_mix.

    Raises:
        ValueError: the number is 0.
    """
    number = r"(\d+(?:\.\d*[1-9])?(?:e-?\d+)?)"
    match = re.fullmatch(rf"(?:(no_replay|fixed_[\d.]+|rod|rod_mix)_)?{idea}_{number}", name)
    if match is None:
        return None
    if not float(match[2]):
        raise ValueError(f"The arm {name} changes nothing: expected a number above 0 at its end.")
    return match[1] or "no_replay", float(match[2])
