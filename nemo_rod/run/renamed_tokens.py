"""Tokenizers that treat text alike, and differ in the names of their special tokens.

A family of models may share its vocabulary and merges, and rename the special tokens of the chat
template. Blocks of the one then mean the same to the other, unless they hold a renamed token.
"""

from __future__ import annotations

import numpy as np

from nemo_rod.corpus.store import BlockStore
from nemo_rod.corpus.tokenizer_identity import PROBES, Tokenizer


def check_renamed(store: BlockStore, made_by: Tokenizer, other: Tokenizer) -> None:
    """Refuses a model's tokenizer that differs in more than names of special tokens.

    Both splits of the store are read whole if such names differ: no block may hold one of them.
    """
    store.check_tokenizer(made_by)
    if other.fingerprint == made_by.fingerprint:
        return
    if other.eod_id != made_by.eod_id:
        raise ValueError(
            f"the blocks in {store.root} end documents with token {made_by.eod_id}, and the "
            f"model's tokenizer with {other.eod_id}: set domain.eod to {made_by.eod_id}"
        )
    both = (made_by, other)
    ids = range(max(tokenizer.vocab_size for tokenizer in both))
    renamed = [i for i in ids if made_by.token(i) != other.token(i)]
    for i in renamed:
        # An id that only one of them has must be special to that one.
        if any(t.token(i) is not None and i not in t.special_ids for t in both):
            raise ValueError(
                f"token {i} is {made_by.token(i)!r} to the tokenizer of the blocks and "
                f"{other.token(i)!r} to the model's, and it is not a special one: prepare the "
                "blocks with the model's own tokenizer"
            )
    special = made_by.special_ids | other.special_ids
    names = [t.token(i) for t in both for i in t.special_ids]
    words = (made_by.decode([i]) for i in range(made_by.vocab_size) if i not in special)
    texts = [t for t in (*PROBES, *words) if not any(name and name in t for name in names)]
    for text, *tokens in zip(texts, *(t.encode_batch(texts) for t in both), strict=True):
        expected, actual = (array.tolist() for array in tokens)
        if expected != actual:
            raise ValueError(
                f"the text {text!r} is {expected} to the tokenizer of the blocks and {actual} to "
                "the model's: prepare the blocks with the model's own"
            )
    is_renamed = np.isin(np.arange(store.vocab_size), renamed)
    for split in (store, BlockStore(store.root, split="holdout")) if is_renamed.any() else ():
        for block_ids in split.chunks():
            tokens_CS = split.tokens(block_ids)
            places = np.argwhere(is_renamed[tokens_CS])
            if len(places):
                row, column = places[0]
                token = int(tokens_CS[row, column])
                raise ValueError(
                    f"block {block_ids[row]} of the {split.split} split of {store.root} holds "
                    f"token {token}, which was {made_by.token(token)!r} and is "
                    f"{other.token(token)!r} to the model: prepare the blocks with the model's own "
                    "tokenizer"
                )
