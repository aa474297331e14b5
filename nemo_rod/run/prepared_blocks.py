"""Text -> blocks, as described by the recipe's domain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_rod.config import Config, Domain
from nemo_rod.corpus.block_text import block_text, find_tokenizer
from nemo_rod.corpus.prepare import prepare
from nemo_rod.corpus.store import BlockStore
from nemo_rod.corpus.tokenizer import load_tokenizer
from nemo_rod.progress import Progress
from nemo_rod.trust import is_commit, name_and_revision

_SHOWN_TOKENS = 512  # of a block, in the report


def prepare_blocks(
    domain: Domain, folder: Path, *, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Writes the block store of a domain; code beside its tokenizer runs only if trusted.

    Returns:
        Its digest and the number of training blocks of each role.

    Raises:
        ValueError: See `prepare`; or a source has no held-out block.
    """
    bars: dict[str, Progress] = {}

    def progress(done: int, total: int | None, what: str) -> None:
        bar = bars.setdefault(what, Progress(what, total or 0, unit="bytes", prefix="  "))
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
        rebuild=True,  # replaces a source made otherwise, left in a folder not yet handed over
    )
    for source in BlockStore(folder, split="holdout").sources:
        if source.count == 0:  # no model could be evaluated on it
            raise ValueError(
                f"{source.role} source {source.name} has no held-out block: give it more text, or "
                "raise domain.holdout_fraction or domain.holdout_floor."
            )
    store = BlockStore(folder)
    return {key: getattr(store, key) for key in ("digest", "num_adaptation", "num_replay")}


def unpinned(config: Config) -> list[str]:
    """Returns the keys that name a repository of the hub without its commit."""
    names = {"model.hf": config.model.hf, "domain.tokenizer": config.domain.tokenizer}
    keys = [
        key
        for key, name in names.items()
        if name not in (None, "byte") and not _is_pinned(str(name), name_and_revision(str(name))[1])
    ]
    return keys + [
        f"domain.sources.{spec.name}"
        for spec in config.domain.specs
        if spec.path is not None and not _is_pinned(spec.path, spec.revision)
    ]


def _is_pinned(name: str, revision: str | None) -> bool:
    return is_commit(revision) or name.startswith(("/", ".", "~")) or Path(name).exists()


def block_texts(blocks: Path, digest: str, block_ids: Sequence[int]) -> list[str]:
    """Returns the beginnings of blocks of a run as text, for its report.

    Raises:
        ValueError: if the store has another digest, or it or its tokenizer cannot be read.
    """
    try:
        store = BlockStore(blocks)
        if store.digest != digest:
            raise ValueError(f"{blocks} is not the store that the curriculum was recorded with.")
        tokenizer = find_tokenizer(store)
        return [block_text(store, tokenizer, i, length=_SHOWN_TOKENS) for i in block_ids]
    except (OSError, ImportError) as error:
        raise ValueError(f"the blocks' tokenizer cannot be read ({error}).") from None
