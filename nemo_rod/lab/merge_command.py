"""`nemo-rod merge BASE ADAPTED OUT lambda=WEIGHT`: merges two given checkpoints."""

from __future__ import annotations

from argparse import Namespace

from nemo_rod.commands.arguments import Arguments, Key
from nemo_rod.lab.merging import merge_checkpoints

_USAGE = """\
nemo-rod merge BASE ADAPTED OUT lambda=WEIGHT
       nemo-rod merge recipe=NAME [arm=merge_WEIGHT] [KEY=VALUE ...]"""
_DESCRIPTION = """\
Interpolates linearly between the weights of two checkpoints.

With lambda=, or when the first argument is a folder, between any two folders: checkpoints of
Hugging Face, or Megatron's distributed ones. Otherwise the merged arms of a recipe, in Hydra's
grammar: `nemo-rod merge recipe=NAME --cfg job` shows all keys of that form."""


def declare(parser: Arguments) -> None:
    """Declares the arguments of `nemo-rod merge` with two folders."""
    parser.usage, parser.description = _USAGE, _DESCRIPTION
    parser.add_argument("base", metavar="BASE", help="checkpoint that lambda=0 gives")
    parser.add_argument("adapted", metavar="ADAPTED", help="checkpoint that lambda=1 gives")
    parser.add_argument("out", metavar="OUT", help="folder of the merged checkpoint")
    parser.add_keys(
        Key(
            name="lambda",
            value="WEIGHT",
            help="weight of ADAPTED, from 0 to 1",
            expected="a number from 0 (BASE) to 1 (ADAPTED)",
            read=float,
            required=True,
        )
    )
    parser.set_defaults(main=main)


def main(options: Namespace) -> None:
    """Merges the two checkpoints.

    Raises:
        ValueError: if the checkpoints cannot be merged.
    """
    weight = vars(options)["lambda"]
    merge_checkpoints(options.base, options.adapted, options.out, weight)
    print(f"{options.out}: {1 - weight:g} of {options.base} and {weight:g} of {options.adapted}")
