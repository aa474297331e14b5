"""Text -> blocks, as described by the recipe's domain."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from nemo_rod import parts
from nemo_rod.config import Domain
from nemo_rod.corpus.documents import open_inputs
from nemo_rod.corpus.encode import Encoder
from nemo_rod.corpus.prepare import prepare
from nemo_rod.corpus.store import BlockStore
from nemo_rod.corpus.tokenizer import load_tokenizer
from nemo_rod.files import interpreting, read_json
from nemo_rod.progress import Progress


def prepare_blocks(
    domain: Domain, folder: Path, *, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Writes the block store of a domain; code of its tokenizer runs only if trusted.

    Returns:
        Its digest and the number of training blocks of each role.

    Raises:
        ValueError: see `prepare`; or a source has no held-out block.
    """
    bars: dict[str, Progress] = {}

    def progress(done: int, total: int | None, what: str) -> None:
        bar = bars.setdefault(what, Progress(what, total or 0, unit="bytes"))
        bar.step(done)

    prepare(
        folder,
        domain.specs,
        tokenizer=load_tokenizer(
            domain.tokenizer, eod=domain.eod, trust_remote_code=trust_remote_code
        ),
        block_size=domain.block_size,
        holdout_fraction=domain.holdout_fraction,
        holdout_seed=domain.holdout_seed,
        holdout_floor=domain.holdout_floor,
        replay_ratio=domain.replay_ratio,
        workers=domain.workers,
        progress=progress,
        encoder=next(iter(parts.load_all("encoders")), Encoder),
        rebuild=True,  # replaces sources with other settings in a folder not yet handed over
    )
    for source in BlockStore(folder, split="holdout").sources:
        if source.count == 0:  # no model could be evaluated on it
            raise ValueError(
                f"{source.role} source {source.name} has no held-out block: give it more text, or "
                "raise domain.holdout_fraction or domain.holdout_floor."
            )
    store = BlockStore(folder)
    return {key: getattr(store, key) for key in ("digest", "num_adaptation", "num_replay")}


def refuse_other_files(domain: Domain, blocks: Path) -> None:
    """Refuses blocks whose source files have changed since, or of which a source was removed.

    Files that can no longer be listed pass: blocks may outlive their sources.

    Raises:
        ValueError: a file was added, removed or changed; the message names it and its source.
    """
    listing = blocks / "store.json"
    with interpreting(listing):
        listed = read_json(listing, "sources")["sources"] if listing.exists() else []
        paths = [blocks / row["role"] / row["name"] / "manifest.json" for row in listed]
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path} is missing: add rebuild=[prepare] to make the blocks again")
    for spec in domain.specs:
        try:
            inputs = open_inputs(spec)
            manifest = read_json(blocks / spec.role / spec.name / "manifest.json", "files")
        except (ValueError, OSError, ImportError):
            continue
        if not all(Path(item.place).exists() for item in inputs):  # made by a toy, or remote
            continue
        now = [part for item in inputs for part in item.parts or [(item.name, item.size)]]
        of = manifest["files"] if not inputs[0].parts else manifest.get("dataset_files")
        before = now if of is None else [(file["name"], file["bytes"]) for file in of]
        if Counter(now) != Counter(before):
            changed = min({*now} ^ {*before})[0] if {*now} ^ {*before} else now[0][0]
            is_there, was_there = changed in dict(now), changed in dict(before)
            what = "changed" if is_there and was_there else "added" if is_there else "removed"
            raise ValueError(
                f"{blocks} was made of other files: {changed} of source {spec.name} was {what} "
                "since; restore the former files, or add rebuild=[prepare] to make it again"
            )
