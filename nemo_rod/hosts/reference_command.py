"""`nemo-rod reference` without a recipe: of a Megatron-Bridge job, or on NeMo-RL.

Scripts of other hosts call `nemo_rod.hosts.swap_in.reference` themselves; see docs/swap-in.md.
"""

from __future__ import annotations

from argparse import Namespace

from nemo_rod.commands.arguments import Arguments
from nemo_rod.hosts import bridge_reference

_USAGE = """\
nemo-rod reference job=FILE.py:FUNCTION role=ROLE out=FOLDER roles={PATH: ROLE, ...} [KEY=VALUE ...]
       nemo-rod reference --config RECIPE.yaml rod.role=ROLE [KEY=VALUE ...]
       nemo-rod reference recipe=NAME [arm=ARM] [KEY=VALUE ...]"""
_DESCRIPTION = """\
Computes reference losses: the losses of a fixed model on the blocks of one role.

With job=, on the data of a Megatron-Bridge job of your own; docs/swap-in.md. With --config, on
NeMo-RL, with a recipe in its own form; docs/nemo-rl.md. With neither, as a stage of a recipe, in
Hydra's grammar: `nemo-rod reference recipe=NAME --cfg job` shows all keys of that form."""

MARKS = {"--config", "job"}  # words of the forms without a recipe


def declare(parser: Arguments) -> None:
    """Declares the arguments of `nemo-rod reference` without a recipe."""
    parser.usage, parser.description = _USAGE, _DESCRIPTION
    parser.add_argument("--config", metavar="RECIPE.yaml", help="a recipe in NeMo-RL's own form")
    parser.add_argument(
        "words",
        metavar="KEY=VALUE",
        nargs="*",
        help="with --config, any key of the recipe in Hydra's grammar; with job=, those below",
    )
    parser.add_keys(*bridge_reference.KEYS)
    parser.set_defaults(main=main)


def main(options: Namespace) -> None:
    """Computes the losses.

    Raises:
        ValueError: a key or a value is invalid.
        RuntimeError: a worker of NeMo-RL failed.
        Stopped: the run was asked to stop; it resumes when it is started again.
    """
    if options.config is None:
        bridge_reference.run(options)
        return
    for key in bridge_reference.KEYS:
        if getattr(options, key.name) is not None:
            raise ValueError(f"{key.name}= goes with job=, not with --config: leave it out.")
    from nemo_rod.hosts.nemo_rl import algorithm, settings  # which import much

    algorithm.run("reference", settings.load(options.config, options.words))
