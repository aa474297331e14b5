"""`nemo-rod train --config RECIPE.yaml`: training on NeMo-RL, with a recipe in its own form."""

from __future__ import annotations

from argparse import Namespace

from nemo_rod.commands.arguments import Arguments

_USAGE = """\
nemo-rod train --config RECIPE.yaml [KEY=VALUE ...]
       nemo-rod train recipe=NAME [arm=ARM] [KEY=VALUE ...]"""
_DESCRIPTION = """\
Trains one arm.

With --config, on NeMo-RL, with a recipe in its own form; docs/nemo-rl.md. Without it, one arm or
all arms of a recipe, in Hydra's grammar: `nemo-rod train recipe=NAME --cfg job` shows all keys of
that form."""


MARKS = {"--config"}  # words of the form without a recipe of ours


def declare(parser: Arguments) -> None:
    """Declares the arguments of `nemo-rod train --config`."""
    parser.usage, parser.description = _USAGE, _DESCRIPTION
    parser.add_argument(
        "--config", metavar="RECIPE.yaml", required=True, help="a recipe in NeMo-RL's own form"
    )
    parser.add_argument(
        "words", metavar="KEY=VALUE", nargs="*", help="any key of the recipe, in Hydra's grammar"
    )
    parser.set_defaults(main=main)


def main(options: Namespace) -> None:
    """Trains an arm from its latest checkpoint.

    Raises:
        ValueError: the recipe or a key is invalid.
        RuntimeError: a worker failed.
        Stopped: the run was asked to stop; it has saved.
    """
    from nemo_rod.hosts.nemo_rl import algorithm, settings  # which import much

    algorithm.run("train", settings.load(options.config, options.words))
