"""`nemo-rod merge BASE ADAPTED OUT lambda=WEIGHT`: merges two checkpoints of one's own."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_rod.commands.text import parse
from nemo_rod.evaluation.merging import merge_checkpoints

USAGE = "nemo-rod merge BASE ADAPTED OUT lambda=WEIGHT"


def is_of_folders(arguments: Sequence[str]) -> bool:
    """Whether the command line names folders: a recipe's begins with an override or an option."""
    first = arguments[0] if arguments else "-"
    has_lambda = any(argument.startswith("lambda=") for argument in arguments)
    return has_lambda or not ("=" in first or first.startswith("-"))


def main(arguments: Sequence[str]) -> None:
    """Merges as the command line says.

    Raises:
        ValueError: for other arguments, or checkpoints that cannot be merged.
    """
    paths, values = parse(arguments, USAGE, keys=["lambda"])
    if len(paths) != 3 or "lambda" not in values:
        raise ValueError(f"'{' '.join(arguments)}' is not understood: expected {USAGE}.")
    try:
        lam = float(values["lambda"])
    except ValueError:
        raise ValueError(
            f"lambda={values['lambda']} is not valid: expected a number from 0 (BASE) to 1 "
            f"(ADAPTED)."
        ) from None
    base, adapted, out = paths
    merge_checkpoints(base, adapted, out, lam)
    print(f"{out}: {1 - lam:g} of {base} and {lam:g} of {adapted}")
