"""Turns documents into blocks: reading, tokenising, packing, the block store, the holdout."""

from nemo_rod.corpus.hashing import block_hash, is_holdout
from nemo_rod.corpus.pack import Packer
from nemo_rod.corpus.prepare import prepare
from nemo_rod.corpus.sources import SourceSpec
from nemo_rod.corpus.store import BlockStore
from nemo_rod.corpus.tokenizer import load_tokenizer

__all__ = [
    "BlockStore",
    "Packer",
    "SourceSpec",
    "block_hash",
    "is_holdout",
    "load_tokenizer",
    "prepare",
]
