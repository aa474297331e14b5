"""`nemo-rod inspect PATH`: the content of any of our files and folders, as readable tables."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rod.commands.arguments import Arguments, Key, whole_number
from nemo_rod.commands.text import facts, read_object, table
from nemo_rod.files import flat, interpreting
from nemo_rod.lab.inspect.blocks import (
    describe_block,
    describe_overlap,
    describe_source,
    describe_store,
    find_store,
)
from nemo_rod.lab.inspect.logs import (
    describe_curriculum,
    describe_reference_logs,
    describe_references,
)
from nemo_rod.selection.curriculum import log as curriculum
from nemo_rod.selection.references import rank_log

_USAGE = "nemo-rod inspect PATH [block=ID] [split=SPLIT] [tokenizer=NAME] [overlap=TOKENS]"
_DESCRIPTION = """\
Shows what a file or folder of nemo-rod holds: a run folder, a block store, a source, references, a
curriculum, or a stage's folder or manifest.json. Nothing is changed, and a run may be at work."""


def declare(parser: Arguments) -> None:
    """Declares the arguments of `nemo-rod inspect`."""
    parser.usage, parser.description = _USAGE, _DESCRIPTION
    parser.add_argument(
        "path", metavar="PATH", type=Path, help="one of nemo-rod's files or folders"
    )
    parser.add_keys(
        Key(
            name="block",
            value="ID",
            help="decodes this block: its id in a store, or its number in a source",
            expected="a number",
            read=whole_number,
        ),
        Key(
            name="split",
            value="SPLIT",
            help="split of a store: train or holdout",
            choices=("train", "holdout"),
        ),
        Key(
            name="tokenizer",
            value="NAME",
            help="made the blocks; by default the one beside them",
        ),
        Key(
            name="overlap",
            value="TOKENS",
            help="counts windows of TOKENS tokens that held-out blocks share with training",
            expected="a number",
            read=whole_number,
        ),
    )
    parser.set_defaults(main=main)


def main(options: Namespace) -> None:
    """Prints the content of a path.

    Raises:
        ValueError: if nemo-rod did not write it, or it is damaged.
    """
    with interpreting(options.path, besides=(ValueError,)):
        shown = inspect(
            options.path,
            block=options.block,
            split=options.split,
            tokenizer=options.tokenizer,
            overlap=options.overlap,
        )
    print(shown)


def inspect(
    path: Path,
    *,
    block: int | None = None,
    split: str | None = None,
    tokenizer: str | None = None,
    overlap: int | None = None,
) -> str:
    """Returns the content of a path as text.

    Args:
        path: one of our files or folders.
        block: block to decode: its id in a store, or its number in a source.
        split: "train" or "holdout", for a store.
        tokenizer: tokenizer of the blocks; by default the one beside them.
        overlap: window size in tokens, to count what held-out blocks share with training.

    Raises:
        ValueError: if it is none of ours, or damaged.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist: expected {_USAGE}.")
    if path.is_file() and path.suffix in (".json", ".bin", ".idx", ".npy"):
        path = path.parent  # files of a folder belong together
    found = find_store(path, split)
    if block is not None or overlap is not None:
        if found is None:
            raise ValueError(
                f"{path} is no block store and no source: block= and overlap= need one."
            )
        if overlap is not None:
            return describe_overlap(found[0].root, overlap)
        assert block is not None
        return describe_block(*found, block, tokenizer)
    if found is not None:
        store, source = found
        return describe_store(store) if source is None else describe_source(path)
    for fits, describe in _KINDS:
        if fits(path):
            return describe(path)
    raise ValueError(
        f"{path} is nothing that nemo-rod wrote: expected a run folder, a block store, a source, "
        "references, a curriculum, or a stage's folder or manifest.json."
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
        parts.append(_losses(read_object(path / "evaluation.json")))
    files = ", ".join(sorted(file.name for file in path.iterdir()))
    about = [("stage", manifest.get("stage", path.name)), ("state", state), ("files", files)]
    return "\n\n".join([facts(about), *parts])


def _losses(evaluation: dict[str, Any]) -> str:
    rows = [
        [role, source, f"{loss:.4f}", f"{evaluation['blocks'][role][source]:,}"]
        for role, losses in evaluation["loss"].items()
        for source, loss in losses.items()
    ]
    return table(("role", "source", ">held-out loss", ">blocks"), rows)


def _describe_run(path: Path) -> str:
    folders = {path / "blocks", path / "base"}
    folders |= {*(path / "references").glob("*"), *(path / "arms").glob("*")}
    rows = []
    for folder in sorted({f.with_name(f.name.removesuffix(".partial")) for f in folders}):
        done = (folder / "manifest.json").exists()
        begun = folder.with_name(folder.name + ".partial").exists()
        evaluation = folder / "evaluation.json"
        with interpreting(evaluation):
            losses = read_object(evaluation).get("loss", {})
            means = [
                f"{np.mean(list(losses[role].values())):.4f}" if role in losses else None
                for role in ("adaptation", "replay")
            ]
        # arms/base is not a stage: it holds the evaluation of the base
        state = "done" if done or losses else "interrupted" if begun else "to do"
        rows.append([folder.relative_to(path), state, *means])
    header = ("run folder", "state", ">adaptation", ">replay")
    note = "Losses: of the held-out blocks, nats a token, mean over a role's sources."
    return f"{path}\n\n{table(header, rows)}\n\n{note}"


_STAGE_FILES = ("manifest.json", "inputs.json", "evaluation.json")
_KINDS: tuple[tuple[Callable[[Path], bool], Callable[[Path], str]], ...] = (
    (lambda path: _begins(path, curriculum.LOG_MAGIC), describe_curriculum),
    (lambda path: _begins(path, rank_log.LOG_MAGIC), describe_reference_logs),
    (lambda path: (path / "sums.npy").exists() and (path / "manifest.json").exists(),
     describe_references),
    (lambda path: bool(rank_log.log_paths(path)), describe_reference_logs),
    (lambda path: any((path / name).exists() for name in _STAGE_FILES), _describe_stage),
    (lambda path: (path / "arms").is_dir() or (path / "blocks").is_dir()
     or any(path.glob("launch/*/config.yaml")), _describe_run),  # whose first stage is to do
)  # fmt: skip


def _begins(path: Path, magic: bytes) -> bool:
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(len(magic)) == magic
