"""Turns documents into blocks: reading, tokenising, packing, the block store, the holdout."""

from nemo_rod.corpus import tokenizer as _tokenizer
from nemo_rod.corpus.adapters.tokenizers import load_tokenizer as load_tokenizer
from nemo_rod.corpus.hashing import block_hash as block_hash
from nemo_rod.corpus.hashing import is_holdout as is_holdout
from nemo_rod.corpus.pack import Packer as Packer
from nemo_rod.corpus.prepare import prepare as prepare
from nemo_rod.corpus.sources import SourceSpec as SourceSpec
from nemo_rod.corpus.store import BlockStore as BlockStore

_tokenizer.load_tokenizer = load_tokenizer  # type: ignore[attr-defined]  # where scripts have it from
