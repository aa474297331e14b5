"""`nemo-rod curriculum export|verify|diff`: tools for finished curricula."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from nemo_rod.commands.arguments import Arguments
from nemo_rod.commands.text import table
from nemo_rod.lab.text import tenths

_HEADER = ("from step", ">steps", ">same blocks", ">replay a", ">replay b", ">drift", ">same pools")


def declare(parser: Arguments) -> None:
    """Declares the arguments of `nemo-rod curriculum`."""
    verbs = parser.add_subparsers(metavar="export|verify|diff", required=True, prog=parser.prog)
    usages = []

    def add(main: Callable[[Namespace], None], name: str, usage: str, text: str) -> Arguments:
        usages.append(f"{parser.prog} {name} {usage}")
        verb: Arguments = verbs.add_parser(name, usage=usages[-1], help=text, description=text)
        verb.add_argument("curriculum", metavar="CURRICULUM", type=Path, help="a curriculum.rod")
        verb.set_defaults(main=main)
        return verb

    text = "Writes a Parquet file with one row per candidate."
    add(_export, "export", "CURRICULUM [PARQUET]", text).add_argument(
        "parquet",
        metavar="PARQUET",
        type=Path,
        nargs="?",
        help="file to write; by default the curriculum's path with the ending .parquet",
    )
    text = "Checks every step, and that its blocks are those of the store."
    add(_verify, "verify", "CURRICULUM [STORE]", text).add_argument(
        "store",
        metavar="STORE",
        type=Path,
        nargs="?",
        help="block store; by default blocks/ of the run that the curriculum lies in",
    )
    text = "Compares the blocks and the replay share of two curricula, step by step."
    add(_diff, "diff", "CURRICULUM CURRICULUM", text).add_argument(
        "other", metavar="CURRICULUM", type=Path, help="the one to compare it with"
    )
    parser.usage = "\n       ".join(usages)
    parser.description = "Exports, verifies or compares recorded curricula."


def _export(options: Namespace) -> None:
    from nemo_rod.selection import Curriculum
    from nemo_rod.selection.curriculum.tools import export

    path = options.curriculum
    parquet = options.parquet or path.with_suffix(".parquet")
    with Curriculum.open(path, read_only=True) as curriculum:
        export(curriculum, parquet)
        candidates = len(curriculum) * curriculum.header.num_candidates
    print(f"{parquet}: {candidates:,} candidates of {len(curriculum):,} steps")


def _verify(options: Namespace) -> None:
    from nemo_rod.corpus import BlockStore
    from nemo_rod.selection import Curriculum
    from nemo_rod.selection.curriculum.tools import verify

    path = options.curriculum
    # a run's curriculum is in <run>/arms/<arm>/, its blocks in <run>/blocks/
    root = options.store or path.absolute().parent.parent.parent / "blocks"
    with Curriculum.open(path, read_only=True) as curriculum:
        verify(curriculum, BlockStore(root))
    print(f"{path}: {len(curriculum):,} steps, whole and of the blocks in {root}")


def _diff(options: Namespace) -> None:
    from nemo_rod.selection import Curriculum
    from nemo_rod.selection.curriculum.tools import diff

    with (
        Curriculum.open(options.curriculum, read_only=True) as a,
        Curriculum.open(options.other, read_only=True) as b,
    ):
        result = diff(a, b)
    rows: list[list[object]] = []
    for part in [*tenths(len(result.step)), slice(0, len(result.step))]:
        share_a, share_b = result.replay_share_a[part].mean(), result.replay_share_b[part].mean()
        shares = (f"{share_a:.1%}", f"{share_b:.1%}", f"{100 * (share_b - share_a):+.1f}")
        overlap, pools = result.overlap[part].mean(), result.same_pools[part].mean()
        first, count = f"{result.step[part][0]:,}", len(result.step[part])
        rows.append([first, count, f"{overlap:.1%}", *shares, f"{pools:.0%}"])
    rows[-1][0] = "all"
    print(f"a  {options.curriculum}\nb  {options.other}\n\n{table(_HEADER, rows)}")
