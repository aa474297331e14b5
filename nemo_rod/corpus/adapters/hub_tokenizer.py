"""Fast tokenizers of Hugging Face."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nemo_rod.corpus.tokenizer import fingerprint_of
from nemo_rod.trust import UntrustedCodeError, explain_own_code, name_and_revision


class HuggingFaceTokenizer:
    """A fast Hugging Face tokenizer, by the arguments of `load_tokenizer`.

    Ids are those of ``tokenizer(text, add_special_tokens=False)``.
    """

    def __init__(
        self, name: str, *, eod: int | None = None, trust_remote_code: bool = False
    ) -> None:
        self._name, self._trust_remote_code = name, trust_remote_code
        self._backend, eos_id = _backend(name, trust_remote_code)
        end = eos_id if eod is None else eod
        if end is None:
            raise ValueError(
                f"tokenizer {name!r} has no EOS token to end documents with: "
                "set domain.eod to the id of the token that does"
            )
        # Not the number of entries: there may be ids without one.
        ids = self._backend.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids) + 1
        self.eod_id = int(end)
        if eod is not None and eod not in {*ids}:
            raise ValueError(
                f"domain.eod={eod} is not an id of tokenizer {name!r}, which has {len({*ids})}: "
                f"give one of them, the largest is {self.vocab_size - 1}"
            )
        self._backend.no_truncation()
        self._backend.no_padding()
        if hasattr(self._backend.model, "dropout"):
            self._backend.model.dropout = None  # of BPE: ids would be others every time
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.fingerprint: str = fingerprint_of(self)

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


def _backend(name: str, trust_remote_code: bool) -> tuple[Any, int | None]:
    """Returns the part of a tokenizer that needs no transformers, and the id of its EOS token.

    transformers imports torch, scikit-learn and pandas, in 8 seconds and 0.8 GB, and needs none of
    them here. It is therefore imported in a separate process without torch. A
    failure there is repeated in this process, for its error.
    """
    if not trust_remote_code and "torch" not in sys.modules:
        paths = os.pathsep.join(path for path in sys.path if path)
        alone = subprocess.run(
            [sys.executable, "-P", "-m", "nemo_rod.corpus.adapters.hub_tokenizer", name],
            env=os.environ | {"PYTHONPATH": paths, "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"},
            stdout=subprocess.PIPE,
        )
        if alone.returncode == 0:
            backend, eos_id = pickle.loads(alone.stdout)
            return backend, eos_id
    tokenizer = _auto_tokenizer(name, trust_remote_code)
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"tokenizer {name!r} is a slow one ({type(tokenizer).__name__}): "
            "give one that has a tokenizer.json"
        )
    return tokenizer.backend_tokenizer, tokenizer.eos_token_id


def _auto_tokenizer(name: str, trust_remote_code: bool) -> Any:
    if name.startswith(("/", ".", "~")) and not Path(name).expanduser().exists():
        raise ValueError(
            f"tokenizer {name!r} does not exist: "
            'give "byte", a folder with a tokenizer.json, or a Hugging Face name'
        )
    from transformers import AutoTokenizer

    try:
        with explain_own_code(f"tokenizer {name!r}"):
            repository, revision = name_and_revision(os.path.expanduser(name))
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


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "wb") as result:
        os.dup2(2, 1)  # where libraries may print
        sys.modules["torch"] = None  # type: ignore[assignment]  # as if it were not installed
        try:
            pickle.dump(_backend(sys.argv[1], trust_remote_code=False), result)
        except Exception:  # see `_backend`
            sys.exit(1)
