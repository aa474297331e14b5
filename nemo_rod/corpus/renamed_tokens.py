"""Tokenizers that treat text alike, and differ in the names of their special tokens.

A family of models may share its vocabulary and merges, and rename the special tokens of the chat
template. Blocks of the one then mean the same to the other, unless they hold a renamed token.
"""

from __future__ import annotations

import numpy as np

from nemo_rod.corpus.store import BlockStore
from nemo_rod.corpus.tokenizer import PROBES, Tokenizer


def check_renamed(store: BlockStore, made_by: Tokenizer, other: Tokenizer) -> None:
    """Refuses a tokenizer for which a store's blocks, or ordinary text, mean something else.

    Both splits of the blocks are searched for tokens that the other one, the model's, names
    differently than the one that made them.

    Raises:
        ValueError: The tokenizers differ in more than names of special tokens, or a block holds a
            token whose name differs.
    """
    store.check_tokenizer(made_by)
    if other.fingerprint == made_by.fingerprint:
        return
    if other.eod_id != made_by.eod_id:
        raise ValueError(
            f"the blocks in {store.root} end documents with token {made_by.eod_id}, and the "
            f"model's tokenizer with {other.eod_id}: set domain.eod to {made_by.eod_id}"
        )
    renamed = _renamed(made_by, other)
    _check_text(made_by, other)
    for split in (store, BlockStore(store.root, split="holdout")):
        if (found := _first_with(split, renamed)) is not None:
            token, block = found
            raise ValueError(
                f"block {block} of the {split.split} split of {store.root} holds token {token}, "
                f"which was {made_by.token(token)!r} and is {other.token(token)!r} to the model: "
                "prepare the blocks with the model's own tokenizer"
            )


def _first_with(store: BlockStore, token_ids: list[int]) -> tuple[int, int] | None:
    """Returns the first of some tokens in a store, and the id of its block; reads every block."""
    wanted = np.zeros(store.vocab_size, dtype=bool)
    wanted[[i for i in token_ids if i < store.vocab_size]] = True
    for ids in store.chunks() if wanted.any() else ():
        tokens = store.tokens(ids)
        found = np.argwhere(wanted[tokens])
        if len(found):
            row, column = found[0]
            return int(tokens[row, column]), int(ids[row])
    return None


def _renamed(one: Tokenizer, other: Tokenizer) -> list[int]:
    """Returns the ids whose names differ; refuses if one of them is that of an ordinary token."""
    ids = range(max(one.vocab_size, other.vocab_size))
    renamed = [i for i in ids if one.token(i) != other.token(i)]
    for i in renamed:
        # an id that only one of them has must be special to that one
        if any(t.token(i) is not None and i not in t.special_ids for t in (one, other)):
            raise ValueError(
                f"token {i} is {one.token(i)!r} to the tokenizer of the blocks and "
                f"{other.token(i)!r} to the model's, and it is not a special one: prepare the "
                "blocks with the model's own tokenizer"
            )
    return renamed


def _check_text(one: Tokenizer, other: Tokenizer) -> None:
    """Refuses tokenizers that divide text without special tokens into different ids."""
    special = one.special_ids | other.special_ids
    names = [t.token(i) for t in (one, other) for i in t.special_ids]
    words = (one.decode([i]) for i in range(one.vocab_size) if i not in special)
    texts = [t for t in (*PROBES, *words) if not any(name and name in t for name in names)]
    for text, ids, found in zip(
        texts, one.encode_batch(texts), other.encode_batch(texts), strict=True
    ):
        if ids.tolist() != found.tolist():
            raise ValueError(
                f"the text {text!r} is {ids.tolist()} to the tokenizer of the blocks and "
                f"{found.tolist()} to the model's: prepare the blocks with the model's own"
            )
