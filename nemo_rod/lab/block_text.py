"""Blocks of a store as text, by the tokenizer that made it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nemo_rod.corpus.store import BlockStore
from nemo_rod.corpus.tokenizer import load_tokenizer
from nemo_rod.corpus.tokenizer_identity import Tokenizer
from nemo_rod.files import read_json

_SHOWN_TOKENS = 512  # tokens of a block that the report shows
END_OF_DOCUMENT = "\n--- end of document ---\n"


def block_text(store: BlockStore, tokenizer: Tokenizer, block_id: int, *, length: int = 0) -> str:
    """Returns a block's first `length` tokens, 0 for all, as text with its ends of documents.

    Raises:
        ValueError: the block is not that of its hash, such as a part of another file.
    """
    tokens = store.checked_tokens(np.array([block_id]))[0][: length or None]
    ends = np.flatnonzero(tokens == store.eod_id)
    begins = np.concatenate([[0], ends + 1])
    return END_OF_DOCUMENT.join(
        tokenizer.decode(tokens[begin:end])
        for begin, end in zip(begins, [*ends, len(tokens)], strict=True)
    )


def find_tokenizer(store: BlockStore, name: str | None = None) -> Tokenizer:
    """Returns the tokenizer that made a store.

    Without a name, the one for bytes, that of the run's base and the recorded one are tried.

    Raises:
        ValueError: the tokenizer cannot be found, or did not make the store.
    """
    if name is not None:
        tokenizer = load_tokenizer(name, eod=store.eod_id)
        store.check_tokenizer(tokenizer)
        return tokenizer
    manifest = Path(store.root) / "manifest.json"
    inputs = read_json(manifest).get("inputs", {}) if manifest.exists() else {}
    beside = Path(store.root).absolute().parent / "base" / "hf"
    names = ["byte" if store.eod_id == 0 else None]
    names += [str(beside) if beside.is_dir() else None, inputs.get("domain.tokenizer")]
    for name in filter(None, names):
        tokenizer = load_tokenizer(name, eod=store.eod_id)
        if tokenizer.fingerprint == store.tokenizer_fingerprint:
            return tokenizer
    raise ValueError(
        f"the tokenizer that made {store.root} (fingerprint {store.tokenizer_fingerprint}) does "
        "not lie beside it: name it with tokenizer=NAME."
    )


def block_texts(blocks: Path, digest: str, block_ids: Sequence[int]) -> list[str]:
    """Returns the beginnings of blocks of a run as text, for its report.

    Raises:
        ValueError: the store has another digest, or it or its tokenizer cannot be read.
    """
    try:
        store = BlockStore(blocks)
        if store.digest != digest:
            raise ValueError(f"{blocks} is not the store that the curriculum was recorded with.")
        tokenizer = find_tokenizer(store)
        return [block_text(store, tokenizer, i, length=_SHOWN_TOKENS) for i in block_ids]
    except (OSError, ImportError) as error:
        raise ValueError(f"the blocks' tokenizer cannot be read ({error}).") from None
