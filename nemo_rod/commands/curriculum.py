"""`nemo-rod curriculum export|verify|diff`: what one does with a finished curriculum."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nemo_rod.commands.text import parse, table, tenths
from nemo_rod.corpus import BlockStore
from nemo_rod.selection import Curriculum
from nemo_rod.selection.curriculum.tools import diff, export, verify

USAGE = (
    "nemo-rod curriculum export CURRICULUM [PARQUET], "
    "nemo-rod curriculum verify CURRICULUM [STORE], or "
    "nemo-rod curriculum diff CURRICULUM CURRICULUM"
)


def main(arguments: Sequence[str]) -> None:
    """Runs one of the three.

    Raises:
        ValueError: for other arguments, a damaged curriculum, or one of another store.
    """
    (name, *words), _ = parse(arguments, USAGE) if arguments else ([""], {})
    paths = [Path(word) for word in words]
    if name == "export" and len(paths) in (1, 2):
        print(_export(*paths))
    elif name == "verify" and len(paths) in (1, 2):
        print(_verify(*paths))
    elif name == "diff" and len(paths) == 2:
        print(_diff(*paths))
    else:
        raise ValueError(f"'{' '.join(arguments)}' is not understood: expected {USAGE}.")


def _export(path: Path, parquet: Path | None = None) -> str:
    parquet = parquet or path.with_suffix(".parquet")
    with Curriculum.open(path, read_only=True) as curriculum:
        export(curriculum, parquet)
        candidates = len(curriculum) * curriculum.header.num_candidates
    return f"{parquet}: {candidates:,} candidates of {len(curriculum):,} steps"


def _verify(path: Path, root: Path | None = None) -> str:
    # a run keeps it in <run>/arms/<arm>/, and its blocks in <run>/blocks/
    root = root or path.absolute().parent.parent.parent / "blocks"
    with Curriculum.open(path, read_only=True) as curriculum:
        verify(curriculum, BlockStore(root))
    return f"{path}: {len(curriculum):,} steps, whole and of the blocks in {root}"


def _diff(path_a: Path, path_b: Path) -> str:
    with (
        Curriculum.open(path_a, read_only=True) as a,
        Curriculum.open(path_b, read_only=True) as b,
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
    return f"a  {path_a}\nb  {path_b}\n\n{table(header, rows)}"
