"""What a tokenizer is, and by what it is recognised.

A tokenizer is identified by its behaviour. Its *fingerprint* hashes the token ids of fixed probe
texts and of samples of its own vocabulary, wherever its files are and whatever library wrote them.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nemo_rod.files import read_json, write_json

PROBES = (
    "The quick brown fox jumps over the lazy dog. It's 12,345.67 miles; isn't it?",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich, § 433 Abs. 1 BGB.",
    "Les naïfs ægithales hâtifs pondant à Noël où il gèle… ¿Qué? Zażółć gęślą jaźń.",
    "def f(x: int) -> str:\n\tif x >= 0x1F:\n        return f'{x!r:>10}'  # ok\n\r\n\n   \n",
    '#include <stdio.h>\nint main(void) { printf("%d\\n", a[i] << 2 | ~b); return 0; }',
    "Съешь ещё этих мягких французских булок. Ξεσκεπάζω. 你好，世界！こんにちは 안녕 مرحبا नमस्ते",
    "<s></s><unk><pad><|endoftext|><|im_start|><|im_end|>[INST] 🙂👩‍🚀 \u00a0\u200b e\u0301 ﬁ ½",
    "  leading and trailing   1234567890 3.14159 1e-10 http://example.org/a?b=c&d=2 \\frac{a}{b} ",
)


class Tokenizer(Protocol):
    """The parts of a tokenizer that the corpus needs.

    Attributes:
        vocab_size: number of ids; every id lies in [0, vocab_size).
        eod_id: the id that ends a document.
        fingerprint: hex digest of the tokenizer's behaviour.
        special_ids: ids of its special tokens; a text that contains their names encodes to them.
    """

    vocab_size: int
    eod_id: int
    fingerprint: str
    special_ids: frozenset[int]

    def token(self, token_id: int) -> str | None:
        """Returns the name of an id in the vocabulary; None if there is no such id."""

    def check(self, texts: Sequence[str]) -> None:
        """Refuses a tokenizer that cuts texts otherwise than the files it comes from."""

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Returns the token ids of each text, without added special tokens."""

    def decode(self, ids: ArrayLike) -> str:
        """Returns the text of token ids, special tokens included."""

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Writes the files that ``AutoTokenizer.from_pretrained`` reads."""


def whole_characters(tokenizer: Tokenizer, ids: NDArray[np.int32]) -> NDArray[np.int32]:
    """Returns the ids of a text that was cut, without those of half a character at their end."""
    for end in range(len(ids), max(-1, len(ids) - 4), -1):
        if not tokenizer.decode(ids[max(0, end - 8) : end]).endswith("\ufffd"):
            return ids[:end]
    return ids  # unchanged


def fingerprint_of(tokenizer: Tokenizer) -> str:
    """Returns the fingerprint of a tokenizer whose other attributes are set."""
    # Samples from the whole vocabulary exercise the merges that the probes do not.
    step = 1 + tokenizer.vocab_size // 4096
    ids = (i for i in range(0, tokenizer.vocab_size, step) if i != tokenizer.eod_id)
    words = [tokenizer.decode([i]) for i in ids]
    state = hashlib.blake2b(digest_size=16, person=b"rod-tok-v1")
    state.update(np.array([tokenizer.vocab_size, tokenizer.eod_id], dtype="<u4").tobytes())
    for tokens in tokenizer.encode_batch([*PROBES, *words]):
        state.update(np.array([len(tokens), *tokens], dtype="<u4").tobytes())
    return state.hexdigest()


def save_fast(tokenizer: Any, directory: str | os.PathLike[str]) -> None:
    """Writes a fast tokenizer of transformers such that version 4 reads it, too."""
    tokenizer.save_pretrained(str(directory))
    file = Path(directory) / "tokenizer_config.json"
    config = read_json(file)
    if config.get("tokenizer_class") == "TokenizersBackend":  # the name in version 5
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    write_json(file, config)
