"""Fast tokenizers of Hugging Face, with the ids of their own files.

Some classes of transformers 5 put a pre-tokenizer, normaliser and decoder of their own in place of
those of `tokenizer.json`. A base knows the ids of its file, so that file is loaded here whatever
class its configuration names. One without it is compared with sentencepiece.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nemo_rod.corpus.adapters.hub_files import file_of, name_and_revision
from nemo_rod.corpus.input_files import HEAD, refuse_placeholder
from nemo_rod.corpus.tokenizer_identity import PROBES, fingerprint_of, save_fast
from nemo_rod.files import read_json
from nemo_rod.trust import UntrustedCodeError, explain_own_code

_FILE, _CONFIG, _NAMES = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
_PIECES = ("tokenizer.model", "spiece.model", "spm.model", "sentencepiece.bpe.model")
# Text in which tokenizers with one vocabulary differ, beside `PROBES`.
_MADE = (
    " a  b   c\n\n\n\td\r\ne\u00a0f\u3000g ",
    "0 01 012 0123 2023 650841823 1,234,567.89 ١٢٣ ½² x1y22z333",
    "e\u0301 é A\u030a Å ﬁ Ⅷ Ａ１ 한국어 \u1112\u1161\u11ab \u200b\u200d\u00ad",
    "東京都は日本の首都。我爱北京 שלום עולם، مرحبا ภาษาไทย हिन्दी",
    "👩‍👩‍👧‍👦 🇩🇪 ☺\ufe0f 𝔘𝔫𝔦 \ufffd \x1b[0m \ufeff",
    "I'LL we've don’t O'Neill's U.S.A. http://a.b/c?d=e&f_g ---===>>> _private __init__ camelCase",
    "for(int i=0;i<10;++i){\n\t\tx[i]+=1;\n}\n\n    return   x;\n",
)
# Settings of tokenizer_config.json that classes obey instead of the file, and what the file has.
_SETTINGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "add_prefix_space": lambda part: {
        "ByteLevel": part.get("add_prefix_space"),
        "Metaspace": part.get("prepend_scheme", part.get("add_prefix_space")) not in ("never", 0),
        "Prepend": True,
    }.get(part["type"]),
    "do_lower_case": lambda part: part.get("lowercase"),
    "strip_accents": lambda part: part.get("strip_accents"),
    "tokenize_chinese_chars": lambda part: part.get("handle_chinese_chars"),
}


class _Loaded(NamedTuple):
    """What is left of a tokenizer without transformers."""

    backend: Any  # a `tokenizers.Tokenizer`
    splits: bool  # whether names of special tokens in a text stay text
    eos_id: int | None
    source: Path | None  # the file that says what its ids are, if it is one of those compared
    replaced: str  # name of the class whose ids are others; "" if they are the same


class HuggingFaceTokenizer:
    """A fast Hugging Face tokenizer, by the arguments of `load_tokenizer`.

    Ids are those of its own file, without added special tokens.
    """

    def __init__(
        self, name: str, *, eod: int | None = None, trust_remote_code: bool = False
    ) -> None:
        self._name, self._trust_remote_code = name, trust_remote_code
        self._backend, self._splits, eos_id, self._source, self._replaced = _load(
            name, trust_remote_code
        )
        end = eos_id if eod is None else eod
        self._other_end = _other_end(name, end) if eod is None else ""
        if end is None:
            raise ValueError(
                f"tokenizer {name!r} has no EOS token in its files to end documents with: "
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
        _keep_whole(self._backend)
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.fingerprint: str = fingerprint_of(self)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Returns the token ids of each text, int32."""
        # The "fast" variant skips the offsets, which are unused here; without it, BPE is too slow.
        self._backend.encode_special_tokens = self._splits  # pickling loses it
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def check(self, texts: Sequence[str]) -> None:
        """Compares with the file that the tokenizer comes from, and says whose ids are used.

        Raises:
            ValueError: the ids of a text are others.
        """
        if self._source is not None:
            _compare(self._name, self._backend, self._source, texts)
        if self._replaced:
            self._replaced = (
                f"  Note: the ids are those of {self._source}; {self._replaced} of the installed "
                "transformers puts rules of its own in their place, and so may other programs that "
                "load this tokenizer with it.\n"
            )
        print(self._other_end + self._replaced, end="", file=sys.stderr, flush=True)
        self._other_end = self._replaced = ""

    def token(self, token_id: int) -> str | None:
        """Returns the name of an id in the vocabulary; None if there is no such id."""
        name: str | None = self._backend.id_to_token(token_id)
        return name

    def decode(self, ids: ArrayLike) -> str:
        """Returns the text of the ids, special tokens included."""
        return str(self._backend.decode(np.asarray(ids).tolist(), skip_special_tokens=False))

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Writes the tokenizer's own files."""
        save_fast(own_tokenizer(self._name, self._trust_remote_code)[0], directory)


def _load(name: str, trust_remote_code: bool) -> _Loaded:
    """Loads a tokenizer, if possible in a process without torch, which it does not need.

    That saves 8 seconds and 0.8 GB. A failure there is repeated in this process, for its error.
    """
    if not trust_remote_code and "torch" not in sys.modules:
        paths = os.pathsep.join(path for path in sys.path if path)
        alone = subprocess.run(
            [sys.executable, "-P", "-m", "nemo_rod.corpus.adapters.hub_tokenizer", name],
            env=os.environ | {"PYTHONPATH": paths, "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"},
            stdout=subprocess.PIPE,
        )
        if alone.returncode == 0:
            return _Loaded(*pickle.loads(alone.stdout))
    tokenizer, source, replaced = own_tokenizer(name, trust_remote_code)
    backend = tokenizer.backend_tokenizer
    # transformers appends what the vocabulary lacks: the base never met that
    eos_id = backend.token_to_id(tokenizer.eos_token) if tokenizer.eos_token else None
    return _Loaded(backend, backend.encode_special_tokens, eos_id, source, replaced)


def _json(name: str, file: str) -> dict[str, Any]:
    """Returns what a file of a tokenizer says; {} if there is none."""
    path = file_of(name, file, fetch=True)
    return read_json(path) if path else {}


def _other_end(name: str, end: int | None) -> str:
    """Returns a warning if the model's files end texts otherwise; refuses a tokenizer's that do."""
    cure = "set domain.eod to the id of the token that ended documents when the base was trained"
    tokens = {file: _json(name, file).get("eos_token") for file in (_CONFIG, _NAMES)}
    said = {f: str(t.get("content") if isinstance(t, dict) else t) for f, t in tokens.items() if t}
    if len({*said.values()}) > 1:
        both = " and ".join(f"{eos!r} by {file}" for file, eos in said.items())
        raise ValueError(f"the EOS token of tokenizer {name!r} is {both}: {cure}")
    for file in ("config.json", "generation_config.json"):
        stated = _json(name, file)
        parts = [part for part in (stated, stated.get("text_config")) if isinstance(part, dict)]
        ids = next((part["eos_token_id"] for part in parts if "eos_token_id" in part), None)
        if ids is not None and end not in (ids if isinstance(ids, list) else [ids]):
            return f"  Warning: the tokenizer's EOS is {end}, that of {file} {ids}: {cure}.\n"
    return ""


def own_tokenizer(name: str, trust_remote_code: bool) -> tuple[Any, Path | None, str]:
    """Loads a tokenizer of transformers whose ids are those of its own file.

    Returns:
        The tokenizer; the file, if it says how text is cut; and a class that has other ids, or "".

    Raises:
        ValueError: it cannot be loaded, is a slow one, or it is not certain which ids are right.
    """
    folder = Path(name).expanduser()
    if folder.is_file() or (name.startswith(("/", ".", "~")) and not folder.exists()):
        raise ValueError(
            f"tokenizer {name!r} {'is a file' if folder.is_file() else 'does not exist'}: "
            'give "byte", a folder with a tokenizer.json, or a Hugging Face name'
        )
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    own = functools.partial(file_of, name, fetch=True)
    file = own(_FILE)
    pieces = None if file else next(filter(None, map(own, _PIECES)), None)
    for each in filter(None, (file, pieces, own(_CONFIG))):
        with each.open("rb") as head:
            refuse_placeholder(each, head.read(HEAD))
    processor: Any = pieces and _sentencepiece(name, pieces)  # says more than transformers
    with_class: Any = None
    try:
        with_class = _from(name, AutoTokenizer, file, trust_remote_code=trust_remote_code)
    except ValueError as error:
        if file is None or isinstance(error, UntrustedCodeError):
            raise
    kind = type(with_class)
    if not getattr(with_class, "is_fast", file is not None):
        raise ValueError(
            f"tokenizer {name!r} is a slow one ({kind.__name__}): give one that has a {_FILE}"
        )
    if file is None:
        if lost := sorted(n for n in {*kind.vocab_files_names.values()} - {_FILE} if not own(n)):
            raise ValueError(
                f"tokenizer {name!r} has neither a {_FILE} nor {' and '.join(lost)}, which "
                f"{kind.__name__} reads: give one that has a {_FILE}"
            )
        words, added = _json(name, "vocab.json"), _added_tokens(name)
        known = processor.get_piece_size() + len(added) if pieces else len(words | added)
        if (pieces or words) and len(with_class) > known:
            raise ValueError(
                f"tokenizer {name!r} has tokens of {kind.__name__} beside those of "
                f"{pieces or 'vocab.json'}, which the base never met: give one that has a {_FILE}"
            )
        if pieces is not None:
            _compare(name, with_class.backend_tokenizer, pieces, _made_texts(with_class))
        return with_class, pieces, ""
    tokenizer = _from(name, PreTrainedTokenizerFast, file)
    backend = tokenizer._tokenizer = _of_file(name, file, tokenizer.backend_tokenizer)
    if with_class is None:
        return tokenizer, file, ""
    texts = _made_texts(with_class)
    ours = [e.ids for e in backend.encode_batch_fast(texts, add_special_tokens=False)]
    theirs: list[Any] = [None] * len(texts)
    with suppress(Exception):  # the class's vocabulary may not fit the model
        theirs = with_class(texts, add_special_tokens=False)["input_ids"]
    difference = next((t for t, a, b in zip(texts, ours, theirs, strict=True) if a != b), None)
    if tokenizer.eos_token is None and str(with_class.eos_token) in tokenizer.get_vocab():
        tokenizer.eos_token = with_class.eos_token  # the class's default
    if difference is None:
        return tokenizer, file, ""
    if not kind.__module__.startswith("transformers."):
        inside = with_class.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        if [e.ids for e in inside] != theirs:
            raise ValueError(
                f"tokenizer {name!r} changes text in code of its own ({kind.__name__}) before it "
                "is cut into tokens: tokenise your documents with it, and give their ids"
            )
        return with_class, None, ""
    if stated := _contradiction(name, file):
        raise ValueError(
            f"tokenizer {name!r} contradicts itself: tokenizer_config.json has {stated}, and "
            f"{file} cuts {difference[:80]!r} otherwise; remove that key, or save the file anew "
            "as the base was trained with it"
        )
    return tokenizer, file, kind.__name__


def _of_file(name: str, file: Path, loaded: Any) -> Any:
    """Returns the `tokenizers.Tokenizer` of a file, with the tokens that were added beside it.

    transformers also makes a token of every name in the configuration: `pad_token: "!"` would cut
    all text at exclamation marks.
    """
    from tokenizers import Tokenizer

    own = Tokenizer.from_file(str(file))
    stated = _added_tokens(name)
    for i, token in sorted(loaded.get_added_tokens_decoder().items()):
        if own.token_to_id(token.content) is None and stated.get(token.content) == i:
            own.add_tokens([token])
    own.encode_special_tokens = loaded.encode_special_tokens
    return own


def _added_tokens(name: str) -> dict[str, int]:
    """Returns the tokens that files beside the vocabulary add to it, with their ids."""
    tokens = _json(name, _CONFIG).get("added_tokens_decoder", {}).items()
    return {token["content"]: int(i) for i, token in tokens} | _json(name, "added_tokens.json")


def _made_texts(tokenizer: Any) -> list[str]:
    """Returns texts of all kinds of characters, and with the tokenizer's own words and names."""
    size = len(tokenizer)
    words = [tokenizer.decode([i]) for i in range(0, size, 1 + size // 512)]
    names = [f" a{name}b {name}{name} c " for name in tokenizer.added_tokens_encoder]
    return [*PROBES, *_MADE, *words, *names[:256]]


def _contradiction(name: str, file: Path) -> str:
    """Returns a setting of tokenizer_config.json other than that of tokenizer.json; "" if none."""

    def parts(value: Any) -> Iterator[dict[str, Any]]:
        if isinstance(value, dict) and "type" in value:
            yield value
        inner = value.values() if isinstance(value, dict) else value
        for each in inner if isinstance(inner, list) or isinstance(value, dict) else ():
            yield from parts(each)

    config, whole = _json(name, _CONFIG), _json(name, _FILE)
    pipeline = [*parts([whole.get("normalizer"), whole.get("pre_tokenizer")])]
    for key, of in _SETTINGS.items():
        found = [setting for part in pipeline if (setting := of(part)) is not None]
        if isinstance(config.get(key), bool) and found and config[key] not in found:
            return f"{key}={json.dumps(config[key])}"
    return ""


def _compare(name: str, backend: Any, source: Path, texts: Sequence[str]) -> None:
    """Refuses a tokenizer that cuts a text otherwise than the file it comes from."""
    names: list[str] = []  # tokens that are none of sentencepiece's own
    if source.suffix == ".json":
        own = _of_file(name, source, backend)
        _keep_whole(own)
        cut: Callable[[str], list[str]] = lambda text: _tokens(own, text)  # noqa: E731
    else:
        names = [token.content for token in backend.get_added_tokens_decoder().values()]
        processor = _sentencepiece(name, source)
        cut = lambda text: [processor.id_to_piece(i) for i in processor.encode(text)]  # noqa: E731
    for text in texts:
        if any(each in text for each in names):
            continue
        expected, found = cut(text), _tokens(backend, text)
        if expected != found:
            pairs = enumerate(itertools.zip_longest(expected, found))
            at = next(i for i, (a, b) in pairs if a != b)
            raise ValueError(
                f"tokenizer {name!r} cuts {text[:80]!r} into other tokens than {source} ("
                f"{found[at : at + 3]} and {expected[at : at + 3]} from token {at} on): give a "
                f"folder with a {_FILE} that was saved by the transformers of its base"
            )


def _keep_whole(backend: Any) -> None:
    """Makes a `tokenizers.Tokenizer` give all ids of a text, always the same, and no others."""
    backend.no_truncation()
    backend.no_padding()
    if hasattr(backend.model, "dropout"):
        backend.model.dropout = None  # BPE dropout would make ids random


def _tokens(backend: Any, text: str) -> list[str]:
    ids = backend.encode(text, add_special_tokens=False).ids
    return [backend.id_to_token(i) for i in ids]


def _sentencepiece(name: str, file: Path) -> Any:
    """Returns sentencepiece's own reader of a file."""
    try:
        import sentencepiece.sentencepiece_model_pb2  # transformers reads the file with it

        return sentencepiece.SentencePieceProcessor(model_file=str(file))
    except Exception as error:  # missing, not for the installed protobuf, or a list of tiktoken's
        raise ValueError(
            f"tokenizer {name!r} comes as {file.name} alone, which sentencepiece does not read "
            f"({str(error).splitlines()[0][:200]}): pip install sentencepiece, in a version for the"
            f" installed protobuf, or give a folder with a {_FILE}"
        ) from None


def _from(name: str, kind: Any, file: Path | None, **options: Any) -> Any:
    """Loads a tokenizer as a class of transformers, from its own file if it has one."""
    if file is not None:  # its configuration may name another place
        options["tokenizer_file"] = str(file)
    repository, revision = name_and_revision(os.path.expanduser(name))
    try:
        with explain_own_code(f"tokenizer {name!r}"):
            return kind.from_pretrained(repository, revision=revision or "main", **options)
    except UntrustedCodeError:
        raise
    except Exception as error:  # the library passes on any error of its many loaders
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        where = "folder" if Path(repository).exists() else "name"
        raise ValueError(
            f"tokenizer {name!r} cannot be loaded from that {where} ({reason}): "
            'give "byte", a folder with a tokenizer.json, or a Hugging Face name'
        ) from error


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "wb") as result:
        os.dup2(2, 1)  # libraries may print to stdout
        sys.modules["torch"] = None  # type: ignore[assignment]  # makes torch look uninstalled
        try:
            pickle.dump(tuple(_load(sys.argv[1], trust_remote_code=False)), result)
        except Exception:  # see `_load`
            sys.exit(1)
