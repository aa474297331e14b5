"""`nemo-rod curriculum export|materialise|verify|diff`: tools for recorded curricula."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from nemo_rod.commands.arguments import Arguments
from nemo_rod.commands.text import table
from nemo_rod.lab.text import add_verb, tenths
from nemo_rod.progress import Progress

_STORE = "block store; by default blocks/ of the run that the curriculum lies in"
FORMATS = ("parquet", "megatron")  # here: materialise.py needs NumPy
_HEADER = ("from step", ">steps", ">same blocks", ">replay a", ">replay b", ">drift", ">same pools")


def declare(parser: Arguments) -> None:
    """Declares the arguments of `nemo-rod curriculum`."""
    names = "export|materialise|verify|diff"
    verbs = parser.add_subparsers(metavar=names, required=True, prog=parser.prog)

    def add(main: Callable[[Namespace], None], name: str, usage: str, text: str) -> Arguments:
        verb = add_verb(parser, verbs, main, name, usage, text)
        add_curriculum(verb, "curriculum", "a curriculum.rod, or the folder of its arm")
        return verb

    def add_curriculum(verb: Arguments, name: str, text: str) -> None:
        verb.add_argument(
            name, metavar="CURRICULUM", help=text,
            type=lambda text: Path(text) / "curriculum.rod" if Path(text).is_dir() else Path(text),
        )  # fmt: skip

    text = "Writes one row per candidate as Parquet, or the authors' trace of the chosen blocks."
    verb = add(_export, "export", "CURRICULUM [OUT] [--format FORMAT] [--blocks STORE]", text)
    where = "file to write; by default beside the curriculum, .parquet or .jsonl"
    verb.add_argument("out", metavar="OUT", type=Path, nargs="?", help=where)
    verb.add_argument(
        "--format", default="parquet", choices=("parquet", "authors"), help="parquet or authors"
    )
    verb.add_argument("--blocks", metavar="STORE", type=Path, help="block store, for authors")
    text = "Writes the blocks that a run trained on, in order, for any trainer to read."
    usage = "CURRICULUM --format FORMAT [--blocks STORE] OUT"
    verb = add(_materialise, "materialise", usage, text)
    verb.add_argument("out", metavar="OUT", type=Path, help="folder to write, or to continue")
    verb.add_argument(
        "--format", metavar="FORMAT", required=True, choices=FORMATS, help=", ".join(FORMATS)
    )
    verb.add_argument("--blocks", metavar="STORE", type=Path, help=_STORE)
    text = "Checks every step, and that its blocks are those of the store."
    verb = add(_verify, "verify", "CURRICULUM [STORE]", text)
    verb.add_argument("store", metavar="STORE", type=Path, nargs="?", help=_STORE)
    text = "Compares the blocks and the replay share of two curricula, step by step."
    verb = add(_diff, "diff", "CURRICULUM CURRICULUM", text)
    add_curriculum(verb, "other", "the one to compare it with")
    parser.description = "Exports, materialises, verifies or compares recorded curricula."


def _export(options: Namespace) -> None:
    from nemo_rod.lab.curriculum_tools import export
    from nemo_rod.selection import Curriculum

    path, authors = options.curriculum, options.format == "authors"
    suffix = ".jsonl" if authors else ".parquet"
    out = options.out or path.with_suffix(suffix)
    if out.suffix != suffix:  # such as the curriculum itself, which it would replace
        raise ValueError(f"{out} is no name for this export: expected one that ends in {suffix}.")
    with Curriculum.open(path, read_only=True) as curriculum:
        if authors:
            from nemo_rod.corpus import BlockStore
            from nemo_rod.lab.authors.trace import export_trace

            export_trace(curriculum, BlockStore(options.blocks or _blocks_of(path)), out)
            rows, kind = len(curriculum) * curriculum.header.num_chosen, "chosen blocks"
        else:
            export(curriculum, out)
            rows, kind = len(curriculum) * curriculum.header.num_candidates, "candidates"
    print(f"{out}: {rows:,} {kind} of {len(curriculum):,} steps")


def _verify(options: Namespace) -> None:
    from nemo_rod.corpus import BlockStore
    from nemo_rod.lab.curriculum_tools import verify
    from nemo_rod.selection import Curriculum

    path = options.curriculum
    root = options.store or _blocks_of(path)
    with Curriculum.open(path, read_only=True) as curriculum:
        verify(curriculum, BlockStore(root))
    print(f"{path}: {len(curriculum):,} steps, whole and of the blocks in {root}")


def _materialise(options: Namespace) -> None:
    from nemo_rod.corpus import BlockStore
    from nemo_rod.lab.materialise import materialise
    from nemo_rod.selection import Curriculum

    path, out = options.curriculum, options.out
    with Curriculum.open(path, read_only=True) as curriculum:
        progress = Progress(f"materialise {out.name}", len(curriculum), unit="steps")
        store = BlockStore(options.blocks or _blocks_of(path))
        materialise(curriculum, store, out, format=options.format, progress=progress.step)
        blocks = len(curriculum) * curriculum.header.num_chosen
        print(f"{out}: {blocks:,} blocks of {len(curriculum):,} steps, in order")


def _blocks_of(curriculum: Path) -> Path:
    """Returns <run>/blocks of the run that has a curriculum in <run>/arms/<arm>/."""
    return curriculum.absolute().parent.parent.parent / "blocks"


def _diff(options: Namespace) -> None:
    from nemo_rod.lab.curriculum_tools import diff
    from nemo_rod.selection import Curriculum

    with (
        Curriculum.open(options.curriculum, read_only=True) as a,
        Curriculum.open(options.other, read_only=True) as b,
    ):
        result = diff(a, b)
    rows: list[list[object]] = []
    for part in [*tenths(len(result.step)), slice(0, len(result.step))]:
        share_a, share_b = result.replay_share_a[part].mean(), result.replay_share_b[part].mean()
        shares = (f"{share_a:.1%}", f"{share_b:.1%}", f"{100 * (share_b - share_a):+z.1f}")
        overlap, pools = result.overlap[part].mean(), result.same_pools[part].mean()
        first, count = f"{result.step[part][0]:,}", len(result.step[part])
        rows.append([first, count, f"{overlap:.1%}", *shares, f"{pools:.0%}"])
    rows[-1][0] = "all"
    print(f"a  {options.curriculum}\nb  {options.other}\n\n{table(_HEADER, rows)}")
