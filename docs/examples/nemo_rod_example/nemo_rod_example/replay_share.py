"""A command: the mean replay share of a recorded curriculum."""

from argparse import Namespace
from pathlib import Path

from nemo_rod.commands.arguments import Arguments
from nemo_rod.selection import Curriculum, replay_share


def declare(parser: Arguments) -> None:
    parser.usage = "nemo-rod replay-share CURRICULUM"
    parser.add_argument("path", metavar="CURRICULUM", type=Path, help="a curriculum.rod")
    parser.set_defaults(main=main)


def main(options: Namespace) -> None:
    with Curriculum.open(options.path, read_only=True) as curriculum:
        print(f"{replay_share(curriculum):.4f}")
