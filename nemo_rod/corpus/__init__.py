"""Turns documents into blocks: reading, tokenising, packing, the block store, the holdout."""

from nemo_rod.corpus.documents import SourceSpec, read_documents
from nemo_rod.corpus.hashing import block_hash, is_holdout
from nemo_rod.corpus.overlap import Overlap, overlap_report
from nemo_rod.corpus.pack import Packer, pack
from nemo_rod.corpus.prepare import prepare
from nemo_rod.corpus.store import BlockStore, StoreSource
from nemo_rod.corpus.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "BlockStore",
    "Overlap",
    "Packer",
    "SourceSpec",
    "StoreSource",
    "Tokenizer",
    "block_hash",
    "is_holdout",
    "load_tokenizer",
    "overlap_report",
    "pack",
    "prepare",
    "read_documents",
]
