"""`nemo-rod reference` without a recipe: of a Megatron-Bridge job.

Scripts of other hosts call `nemo_rod.hosts.swap_in.reference` themselves; see docs/swap-in.md.
"""

from __future__ import annotations

from nemo_rod.commands.arguments import Arguments
from nemo_rod.hosts import bridge_reference

_USAGE = """\
nemo-rod reference job=FILE.py:FUNCTION role=ROLE out=FOLDER roles={PATH: ROLE, ...} [KEY=VALUE ...]
       nemo-rod reference recipe=NAME [arm=ARM] [KEY=VALUE ...]"""
_DESCRIPTION = """\
Computes reference losses: the losses of a fixed model on the blocks of one role.

With job=, on the data of a Megatron-Bridge job of your own; docs/swap-in.md. Without it, as a stage
of a recipe, in Hydra's grammar: `nemo-rod reference recipe=NAME --cfg job` shows all keys of that
form."""

MARKS = {"job"}  # words of the form without a recipe


def declare(parser: Arguments) -> None:
    """Declares the arguments of `nemo-rod reference` without a recipe."""
    parser.usage, parser.description = _USAGE, _DESCRIPTION
    parser.add_argument("words", metavar="KEY=VALUE", nargs="*", help="those below")
    parser.add_keys(*bridge_reference.KEYS)
    parser.set_defaults(main=bridge_reference.run)
