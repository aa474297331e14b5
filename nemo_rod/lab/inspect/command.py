"""`nemo-rod inspect PATH`: the content of any of our files and folders, as readable tables."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from nemo_rod.commands.arguments import Arguments, Key
from nemo_rod.commands.text import table
from nemo_rod.files import flat, interpreting, open_file
from nemo_rod.lab import sample
from nemo_rod.lab.inspect import blocks
from nemo_rod.lab.inspect.logs import describe_curriculum, describe_metrics, describe_references
from nemo_rod.lab.report.under_way import parts_of
from nemo_rod.lab.text import facts, read_object
from nemo_rod.selection.curriculum import log as curriculum

_USAGE = "nemo-rod inspect PATH [block=ID] [tokenizer=NAME] [overlap=TOKENS]"
_PROMPT = "nemo-rod inspect RUN_DIR prompt=TEXT [arm=ARM,...] [tokens=N]"
_DESCRIPTION = """\
Shows what a file or folder of nemo-rod holds: a run folder, a block store, a source, references, a
curriculum, or a stage's folder or manifest.json; or what the models of a run write after a prompt.
Nothing is changed; a run may be in progress."""


def declare(parser: Arguments) -> None:
    """Declares the arguments of `nemo-rod inspect`."""
    parser.usage, parser.description = f"{_USAGE}\n       {_PROMPT}", _DESCRIPTION
    parser.add_argument(
        "path", metavar="PATH", type=Path, help="one of nemo-rod's files or folders"
    )
    parser.add_keys(
        Key(
            "block",
            "ID",
            "decodes this block: its id in a store, or number in a source",
            read=int,
            bound=">= 0",
        ),
        Key("tokenizer", "NAME", "made the blocks; by default the one beside them"),
        Key(
            "overlap",
            "TOKENS",
            "counts windows of so many tokens that held-out blocks share with training",
            read=int,
            bound=">= 0",
        ),
        *sample.KEYS,
    )
    parser.set_defaults(main=main)


def main(options: Namespace) -> None:
    """Prints the content of a path."""
    if options.prompt is not None:
        sample.sample(options.path, options)
        return
    keys = {name: getattr(options, name) for name in ("block", "tokenizer", "overlap")}
    with interpreting(options.path, besides=(ValueError,)):
        shown = inspect(options.path, **keys)
    print(shown)


def inspect(
    path: Path,
    *,
    block: int | None = None,
    tokenizer: str | None = None,
    overlap: int | None = None,
) -> str:
    """Returns the content of a path as text.

    The options are those of the command.

    Raises:
        ValueError: the file is of an unknown kind, or damaged.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist: expected {_USAGE}.")
    if path.is_file() and path.suffix in (".json", ".bin", ".idx", ".npy"):
        path = path.parent  # files of a folder belong together
    if (store_and_source := blocks.find_store(path)) is not None:
        store, source = store_and_source
        if overlap is not None:
            return blocks.describe_overlap(store.root, overlap)
        if block is not None:
            return blocks.describe_block(store, source, block, tokenizer)
        with interpreting(path / "manifest.json"):
            return blocks.describe_store(store) if source is None else blocks.describe_source(path)
    if block is not None or overlap is not None:
        raise ValueError(
            f"{path} is neither a block store nor a source: block= and overlap= need one."
        )
    if path.name == "metrics.jsonl":
        return describe_metrics(path)
    begin = b""
    if path.is_file():
        with open_file(path) as file:
            begin = file.read(16)
    files = {file.name for file in path.iterdir()} if path.is_dir() else set()
    if begin.startswith(curriculum.LOG_MAGIC):
        return describe_curriculum(path)
    if "unfinished.json" in files or any(name.startswith("part-") for name in files):
        return describe_references(path)
    if files & {"manifest.json", "inputs.json", "evaluation.json"}:
        return _describe_stage(path)
    # a run folder whose first stage has not begun has only rendered files
    folders = ((path / "arms").is_dir(), (path / "blocks").is_dir())
    if any(folders) or any(path.glob("launch/*/config.yaml")):
        rows = [
            [part.label, part.state, part.done, part.steps, part.last] for part in parts_of(path)
        ]
        return f"{path}\n\n{table(('part', 'state', '>steps done', '>of', 'last step'), rows)}"
    raise ValueError(
        f"{path} was not written by nemo-rod: expected a run folder, a block store, a source, "
        "references, a curriculum, metrics.jsonl, or a stage's folder or manifest.json."
    )


def _describe_stage(path: Path) -> str:
    manifest = read_object(path / "manifest.json") or read_object(path / "inputs.json")
    begun = (path / "inputs.json").exists()
    state = "interrupted: run it again to resume" if begun else "done"
    parts = [
        table((title, ""), sorted(flat(manifest[key]).items()))
        for key, title in (("outputs", "made"), ("inputs", "from"), ("note", "noted"))
        if manifest.get(key)
    ]
    if (path / "evaluation.json").exists():
        evaluation = read_object(path / "evaluation.json")
        with interpreting(path / "evaluation.json"):
            rows = [
                [role, source, f"{loss:.4f}", f"{evaluation['blocks'][role][source]:,}"]
                for role, losses in evaluation["loss"].items()
                for source, loss in losses.items()
            ]
        parts.append(table(("role", "source", ">held-out loss", ">blocks"), rows))
    files = ", ".join(sorted(file.name for file in path.iterdir()))
    about = [("stage", manifest.get("stage", path.name)), ("state", state), ("files", files)]
    return "\n\n".join([facts(about), *parts])
