"""Turns documents into blocks: reading, tokenising, packing, the block store, the holdout."""

from nemo_rod.corpus.hashing import block_hash as block_hash
from nemo_rod.corpus.hashing import is_holdout as is_holdout
from nemo_rod.corpus.pack import Packer as Packer
from nemo_rod.corpus.prepare import prepare as prepare
from nemo_rod.corpus.sources import SourceSpec as SourceSpec
from nemo_rod.corpus.store import BlockStore as BlockStore
from nemo_rod.corpus.tokenizer import load_tokenizer as load_tokenizer
