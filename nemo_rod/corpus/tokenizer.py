"""Tokenizers: raw bytes, or any fast Hugging Face tokenizer.

A tokenizer is identified by its behaviour. Its *fingerprint* hashes the token ids of fixed probe
texts and of samples of its own vocabulary; the location of its files and the library version that
wrote them do not matter. A block store records the fingerprint of the tokenizer that made it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nemo_rod.trust import UntrustedCodeError, explain_own_code, name_and_revision

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
        vocab_size: Number of ids; every id lies in [0, vocab_size).
        eod_id: The id that ends a document.
        fingerprint: Hex digest of the tokenizer's behaviour.
        special_ids: Ids of its special tokens, which text in their names becomes.
    """

    vocab_size: int
    eod_id: int
    fingerprint: str
    special_ids: frozenset[int]

    def token(self, token_id: int) -> str | None:
        """Returns the name of an id in the vocabulary; None if there is no such id."""

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Returns the token ids of each text, without added special tokens."""

    def decode(self, ids: ArrayLike) -> str:
        """Returns the text of token ids, special tokens included."""

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Writes the files that ``AutoTokenizer.from_pretrained`` reads."""


def load_tokenizer(
    name: str, *, eod: int | None = None, trust_remote_code: bool = False
) -> Tokenizer:
    """Loads a tokenizer by name.

    Args:
        name: ``byte``, a folder, or NAME or NAME@REVISION on the hub.
        eod: The id that ends a document; None for the tokenizer's own EOS token. The EOS token of
            a model with a chat template may end turns of a conversation, and mean nothing to its
            base.
        trust_remote_code: Whether code that lies beside the tokenizer may run.

    Raises:
        ValueError: The tokenizer does not exist, is not a fast one, has no token that ends a
            document, or has code of its own that may not run.
    """
    if name != "byte":
        return HuggingFaceTokenizer(name, eod=eod, trust_remote_code=trust_remote_code)
    tokenizer = ByteTokenizer()
    if eod not in (None, tokenizer.eod_id):
        raise ValueError(
            f"domain.eod={eod} does not fit domain.tokenizer=byte, which ends documents with "
            f"{tokenizer.eod_id}: leave it out"
        )
    return tokenizer


class ByteTokenizer:
    """Encodes text as its UTF-8 bytes: 256 ids, EOD is 0.

    NUL characters are dropped from the text, so that the byte 0 always means end of document. The
    exported Hugging Face tokenizer yields the same ids.
    """

    def __init__(self) -> None:
        self.vocab_size = 256
        self.eod_id = 0
        self.special_ids = frozenset({0})
        self.fingerprint = _fingerprint(self)

    def token(self, token_id: int) -> str | None:
        """Returns a byte's printable substitute, as in the exported tokenizer."""
        if token_id == self.eod_id:
            return "\0"
        return _alphabet()[token_id] if token_id < self.vocab_size else None

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
        PreTrainedTokenizerFast(
            tokenizer_object=backend,
            eos_token=end,
            pad_token=end,
            clean_up_tokenization_spaces=False,
            model_max_length=10**9,
            model_input_names=["input_ids", "attention_mask"],
        ).save_pretrained(str(directory))


class HuggingFaceTokenizer:
    """A fast Hugging Face tokenizer, by the arguments of `load_tokenizer`.

    Ids are those of ``tokenizer(text, add_special_tokens=False)``.
    """

    def __init__(
        self, name: str, *, eod: int | None = None, trust_remote_code: bool = False
    ) -> None:
        tokenizer = _auto_tokenizer(name, trust_remote_code)
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                f"tokenizer {name!r} is a slow one ({type(tokenizer).__name__}): "
                "give one that has a tokenizer.json"
            )
        if eod is None and tokenizer.eos_token_id is None:
            raise ValueError(
                f"tokenizer {name!r} has no EOS token to end documents with: "
                "set domain.eod to the id of the token that does"
            )
        # Not the number of entries: there may be ids without one.
        ids = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids) + 1
        self.eod_id: int = int(tokenizer.eos_token_id if eod is None else eod)
        if eod is not None and eod not in {*ids}:
            raise ValueError(
                f"domain.eod={eod} is not an id of tokenizer {name!r}, which has {len({*ids})}: "
                f"give one of them, the largest is {self.vocab_size - 1}"
            )
        # Keep the backend, not its wrapper, so that worker processes start without transformers.
        self._name, self._trust_remote_code = name, trust_remote_code
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.fingerprint: str = _fingerprint(self)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Returns the token ids of each text, int32."""
        # The "fast" variant skips the offsets, which are unused here; without it, BPE is too slow.
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def token(self, token_id: int) -> str | None:
        """Returns the name of an id in the vocabulary; None if there is no such id."""
        name: str | None = self._backend.id_to_token(token_id)
        return name

    def decode(self, ids: ArrayLike) -> str:
        """Returns the text of the ids, special tokens included."""
        return str(self._backend.decode(np.asarray(ids).tolist(), skip_special_tokens=False))

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Writes the tokenizer's own files."""
        _auto_tokenizer(self._name, self._trust_remote_code).save_pretrained(str(directory))


def _auto_tokenizer(name: str, trust_remote_code: bool) -> Any:
    if name.startswith(("/", ".", "~")) and not Path(name).expanduser().exists():
        raise ValueError(
            f"tokenizer {name!r} does not exist: "
            'give "byte", a folder with a tokenizer.json, or a Hugging Face name'
        )
    from transformers import AutoTokenizer

    try:
        with explain_own_code(f"tokenizer {name!r}"):
            repository, revision = name_and_revision(name)
            pin = {} if revision is None else {"revision": revision}
            return AutoTokenizer.from_pretrained(
                repository, use_fast=True, trust_remote_code=trust_remote_code, **pin
            )
    except UntrustedCodeError:
        raise
    except Exception as error:  # the library passes on any error of its many loaders
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        where = "folder" if Path(name).exists() else "name"
        raise ValueError(
            f"tokenizer {name!r} cannot be loaded from that {where} ({reason}): "
            'give "byte", a folder with a tokenizer.json, or a Hugging Face name'
        ) from error


def _fingerprint(tokenizer: Tokenizer) -> str:
    # Samples from the whole vocabulary exercise the merges that the probes do not.
    step = 1 + tokenizer.vocab_size // 4096
    ids = (i for i in range(0, tokenizer.vocab_size, step) if i != tokenizer.eod_id)
    words = [tokenizer.decode([i]) for i in ids]
    state = hashlib.blake2b(digest_size=16, person=b"rod-tok-v1")
    state.update(np.array([tokenizer.vocab_size, tokenizer.eod_id], dtype="<u4").tobytes())
    for tokens in tokenizer.encode_batch([*PROBES, *words]):
        state.update(np.array([len(tokens), *tokens], dtype="<u4").tobytes())
    return state.hexdigest()


def _alphabet() -> list[str]:
    """Returns GPT-2's printable substitute for every byte, by byte."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return [
        chr(byte) if byte in printable else chr(256 + hidden.index(byte)) for byte in range(256)
    ]
