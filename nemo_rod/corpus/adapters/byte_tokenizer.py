"""The tokenizer of the toys: raw bytes."""

import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nemo_rod.corpus.tokenizer_identity import fingerprint_of, save_fast


class ByteTokenizer:
    """Encodes text as its UTF-8 bytes: 256 ids, EOD is 0.

    NUL characters are dropped from the text, so that the byte 0 always means end of document. The
    exported Hugging Face tokenizer yields the same ids.
    """

    def __init__(self, eod: int | None = None) -> None:
        self.vocab_size = 256
        self.eod_id = 0
        if eod not in (None, self.eod_id):
            raise ValueError(
                f"domain.eod={eod} does not fit domain.tokenizer=byte, which ends documents with "
                f"{self.eod_id}: leave it out"
            )
        self.special_ids = frozenset({0})
        self.fingerprint = fingerprint_of(self)

    def token(self, token_id: int) -> str | None:
        """Returns a byte's printable substitute, as in the exported tokenizer."""
        if token_id == self.eod_id:
            return "\0"
        return _alphabet()[token_id] if token_id < self.vocab_size else None

    def check(self, texts: Sequence[str]) -> None:
        """Does nothing: there is no file."""

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Returns the UTF-8 bytes of each text, int32."""
        return [
            np.frombuffer(text.replace("\0", "").encode("utf-8"), dtype=np.uint8).astype(np.int32)
            for text in texts
        ]

    def decode(self, ids: ArrayLike) -> str:
        """Returns the text of the bytes; invalid UTF-8 becomes U+FFFD."""
        return np.asarray(ids).astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Writes an equivalent fast tokenizer, for exported checkpoints.

        It is a byte-level BPE without merges, whose ids are the bytes. The byte-level alphabet
        represents byte 0 by a printable character, which could occur in a text. Here NUL itself is
        its token, a special one: text that was tokenised as bytes has none, and elsewhere it means
        end of document.
        """
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        vocabulary = {"\0" if byte == 0 else char: byte for byte, char in enumerate(_alphabet())}
        backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        backend.decoder = decoders.ByteLevel()
        end = AddedToken("\0", normalized=False, special=True)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend,
            eos_token=end,
            pad_token=end,
            clean_up_tokenization_spaces=False,
            model_max_length=10**9,
            model_input_names=["input_ids", "attention_mask"],
        )
        save_fast(tokenizer, directory)


def _alphabet() -> list[str]:
    """Returns GPT-2's printable substitute for every byte, by byte."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return [
        chr(byte) if byte in printable else chr(256 + hidden.index(byte)) for byte in range(256)
    ]
