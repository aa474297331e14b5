"""`nemo-rod curriculum export|verify|diff`: tools for finished curricula."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from nemo_rod.commands.arguments import Arguments
from nemo_rod.commands.text import table, tenths
from nemo_rod.corpus import BlockStore
from nemo_rod.selection import Curriculum
from nemo_rod.selection.curriculum.tools import diff, export, verify


def declare(parser: Arguments) -> None:
    """Declares the arguments of `nemo-rod curriculum`."""
    usages = [f"{parser.prog} {name} {words}" for name, words, _, _ in _VERBS]
    parser.usage = "\n       ".join(usages)
    parser.description = "Exports, verifies or compares recorded curricula."
    verbs = parser.add_subparsers(metavar="export|verify|diff", required=True, prog=parser.prog)
    for (name, _, text, main), usage in zip(_VERBS, usages, strict=True):
        verb = verbs.add_parser(name, usage=usage, help=text, description=text)
        verb.add_argument("curriculum", metavar="CURRICULUM", type=Path, help="a curriculum.rod")
        verb.set_defaults(main=main)
    verbs.choices["export"].add_argument(
        "parquet",
        metavar="PARQUET",
        type=Path,
        nargs="?",
        help="file to write; by default the curriculum's path with the ending .parquet",
    )
    verbs.choices["verify"].add_argument(
        "store",
        metavar="STORE",
        type=Path,
        nargs="?",
        help="block store; by default blocks/ of the run that the curriculum lies in",
    )
    verbs.choices["diff"].add_argument(
        "other", metavar="CURRICULUM", type=Path, help="the one to compare it with"
    )


def _export(options: Namespace) -> None:
    path = options.curriculum
    parquet = options.parquet or path.with_suffix(".parquet")
    with Curriculum.open(path, read_only=True) as curriculum:
        export(curriculum, parquet)
        candidates = len(curriculum) * curriculum.header.num_candidates
    print(f"{parquet}: {candidates:,} candidates of {len(curriculum):,} steps")


def _verify(options: Namespace) -> None:
    path = options.curriculum
    # a run's curriculum is in <run>/arms/<arm>/, its blocks in <run>/blocks/
    root = options.store or path.absolute().parent.parent.parent / "blocks"
    with Curriculum.open(path, read_only=True) as curriculum:
        verify(curriculum, BlockStore(root))
    print(f"{path}: {len(curriculum):,} steps, whole and of the blocks in {root}")


def _diff(options: Namespace) -> None:
    with (
        Curriculum.open(options.curriculum, read_only=True) as a,
        Curriculum.open(options.other, read_only=True) as b,
    ):
        result = diff(a, b)
    rows: list[list[object]] = []
    for part in [*tenths(len(result.step)), slice(0, len(result.step))]:
        share_a, share_b = result.replay_share_a[part].mean(), result.replay_share_b[part].mean()
        rows.append(
            [
                f"{result.step[part][0]:,}",
                len(result.step[part]),
                f"{result.overlap[part].mean():.1%}",
                f"{share_a:.1%}",
                f"{share_b:.1%}",
                f"{100 * (share_b - share_a):+.1f}",
                f"{result.same_pools[part].mean():.0%}",
            ]
        )
    rows[-1][0] = "all"
    header = (
        "from step",
        ">steps",
        ">same blocks",
        ">replay a",
        ">replay b",
        ">drift",
        ">same pools",
    )
    print(f"a  {options.curriculum}\nb  {options.other}\n\n{table(header, rows)}")


_VERBS = (
    (
        "export",
        "CURRICULUM [PARQUET]",
        "Writes a Parquet file with one row per candidate.",
        _export,
    ),
    (
        "verify",
        "CURRICULUM [STORE]",
        "Checks every step, and that its blocks are those of the store.",
        _verify,
    ),
    (
        "diff",
        "CURRICULUM CURRICULUM",
        "Compares the blocks and the replay share of two curricula, step by step.",
        _diff,
    ),
)
