"""Descriptions of block stores and sources, and blocks as text."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nemo_rod.commands.text import table
from nemo_rod.corpus import BlockStore
from nemo_rod.files import flat
from nemo_rod.lab.block_text import block_text, find_tokenizer
from nemo_rod.lab.overlap import overlap_report
from nemo_rod.lab.text import facts, printable_lines, read_object

_MOST_FILES = 20  # of a source


def find_store(path: Path) -> tuple[BlockStore, int | None] | None:
    """Returns the store at a path; if the path is one of its sources, also the source's index.

    Raises:
        ValueError: the path has a source's manifest, but does not lie in a store.
    """
    if (path / "store.json").exists():
        return BlockStore(path), None
    manifest = read_object(path / "manifest.json")
    if "source" not in manifest:
        return None
    root = path.absolute().parents[2 if manifest["split"] == "holdout" else 1]
    described = (manifest["role"], manifest["source"])
    problem = "is not a block store (no store.json)"
    if (root / "store.json").is_file():
        store = BlockStore(root, manifest["split"])
        names = [(source.role, source.name) for source in store.sources]
        if described in names:
            return store, names.index(described)
        problem = f"has only {', '.join(f'{role}/{name}' for role, name in names)}"
    raise ValueError(
        f"{path / 'manifest.json'} describes the source {'/'.join(map(str, described))} of a block "
        f"store, and {root} {problem}: restore the file from a copy, or run its stage again."
    )


def describe_store(store: BlockStore) -> str:
    """Returns the sources of a store, with their block ids."""
    rows = []
    for source in store.sources:
        folder = store.root / source.role / source.name
        train = read_object(folder / "manifest.json")
        held = read_object(folder / "holdout" / "manifest.json")
        counts = (source.count, held["count"], train["documents"], train["tokens"])
        numbers = [f"{number:,}" for number in (*counts, train["dropped_tokens"])]
        rows.append([source.role, source.name, source.start, *numbers])
    holdout, tokens = train["holdout"], len(store) * store.block_size
    share = f"{holdout['fraction']:.2%} of the {holdout['unit']}s, seed {holdout['seed']}"
    ids = f"{store.vocab_size:,} ids, EOD {store.eod_id}"
    about = facts(
        [
            ("block store", store.root),
            ("split", store.split),
            ("blocks", f"{len(store):,} of {store.block_size} tokens = {tokens:,} tokens"),
            ("roles", f"{store.num_adaptation:,} adaptation, {store.num_replay:,} replay"),
            ("held out", share),
            ("tokenizer", f"{store.tokenizer_fingerprint}, {ids}"),
            ("digest", store.digest),
        ]
    )
    header = ("role", "source", ">first id", ">blocks", ">held out", ">documents", ">tokens")
    return f"{about}\n\n{table((*header, '>dropped'), rows)}"


def describe_source(path: Path) -> str:
    """Returns one split of a source: how it was read, and from which files."""
    manifest = read_object(path / "manifest.json")
    files = manifest.pop("files")
    rows = [[f["name"], f["bytes"], f["documents"]] for f in files[:_MOST_FILES]]
    if len(files) > len(rows):
        rows.append([f"... and {len(files) - len(rows):,} more", None, None])
    about = facts((key, value) for key, value in flat(manifest).items() if value is not False)
    return f"{about}\n\n{table(('file', '>bytes', '>documents'), rows)}"


def describe_block(store: BlockStore, index: int | None, number: int, name: str | None) -> str:
    """Returns a block as text, by its id, or its number in the source with an index.

    Raises:
        ValueError: the block or the tokenizer cannot be found, or the block is damaged.
    """
    first, count = 0, len(store)
    if index is not None:
        first, count = store.sources[index].start, store.sources[index].count
    if not 0 <= number < count:
        raise ValueError(f"block={number} is not valid: expected a number from 0 to {count - 1}.")
    ids = np.array([first + number])
    source = store.sources[int(store.source_index(ids)[0])]
    num_ends = int((store.checked_tokens(ids) == store.eod_id).sum())
    text = block_text(store, find_tokenizer(store, name), int(ids[0]))
    place = f"number {ids[0] - source.start} of {source.role}/{source.name}"
    about = facts(
        [
            ("block", f"{ids[0]} of the {store.split} split, {place}"),
            ("hash", store.hashes(ids)[0].tobytes().hex()),
            ("tokens", f"{store.block_size}, ends of documents: {num_ends}"),
        ]
    )
    return f"{about}\n\n{printable_lines(text)}"


def describe_overlap(root: Path, window: int) -> str:
    """Returns how many held-out blocks of each source share a window of tokens with training."""
    rows = [
        [name, o.blocks, o.sharing, f"{o.share:.1%}", f"{o.shared / max(1, o.windows):.1%}"]
        for name, o in overlap_report(root, window=window).items()
    ]
    header = ("source", ">held-out blocks", ">sharing", ">of blocks", ">of windows")
    return f"windows of {window} tokens that training blocks contain, too\n\n{table(header, rows)}"
