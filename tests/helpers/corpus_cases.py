"""Small corpora and a short way to prepare them, for the tests of the corpus."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_rod.corpus import BlockStore, SourceSpec, load_tokenizer, prepare
from nemo_rod.corpus.documents import Documents

BYTE = load_tokenizer("byte")
S = 32


def write(path: Path, texts: Sequence[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    return path


def texts(count: int, seed: int, length: int = 120) -> list[str]:
    random = np.random.default_rng(seed)
    letters = np.array(list("abcdefghijklmnop \n"))
    return ["".join(random.choice(letters, random.integers(1, length))) for _ in range(count)]


def write_parquet(path: Path, columns: Any, **options: Any) -> Path:
    """Writes columns by name, or a list of records, or a table."""
    import pyarrow
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(columns, list):
        columns = pyarrow.Table.from_pylist(columns)
    table = pyarrow.table(columns) if isinstance(columns, dict) else columns
    parquet.write_table(table, path, **{"row_group_size": 7, **options})
    return path


def source(
    name: str, files: Sequence[object], role: str = "replay", kind: str = "jsonl", **fields: Any
) -> SourceSpec:
    return SourceSpec(name=name, role=role, kind=kind, files=[str(f) for f in files], **fields)


def web(*files: object, kind: str = "jsonl", **fields: Any) -> SourceSpec:
    """A replay source of this name."""
    return source("web", files, kind=kind, **fields)


def make_corpus(folder: Path) -> list[SourceSpec]:
    twice = texts(200, 2)
    return [
        source("web", [write(folder / "web" / f"{i}.jsonl", texts(150, i)) for i in range(3)]),
        source("new", [write(folder / "new.jsonl", texts(300, 9))], role="adaptation"),
        source("twice", [write(folder / "twice.jsonl", twice + twice[::-1])], dedup=True),
        source("pages", [write(folder / "pages.jsonl", texts(400, 5))], document_holdout=True),
    ]


def read_documents(spec: SourceSpec) -> Iterator[str]:
    return (document.text for document in Documents(spec))


def refuse(spec: SourceSpec, *parts: str) -> None:
    """Reads a source, which is refused by one sentence with these parts."""
    with pytest.raises(ValueError) as error:
        list(read_documents(spec))
    message = str(error.value)
    assert "\n" not in message and message.startswith("source web: "), message
    for part in parts:
        assert part in message, message


def run(root: Path, sources: Sequence[SourceSpec], **changes: Any) -> BlockStore:
    arguments = {"tokenizer": BYTE, "block_size": S, "holdout_fraction": 0.1, **changes}
    return prepare(root, sources, **arguments)


def stop_at(*calls: int) -> Callable[..., None]:
    """A progress that interrupts the run at some of its calls, counted from 1."""
    count = 0

    def progress(*_: object) -> None:
        nonlocal count
        count += 1
        if count in calls:
            raise KeyboardInterrupt

    return progress


def interrupted(root: Path, sources: Sequence[SourceSpec], *calls: int, **changes: Any) -> None:
    """Interrupts a run, and those that go on with it, at these calls of their progress."""
    for call in calls:
        with pytest.raises(KeyboardInterrupt):
            run(root, sources, progress=stop_at(call), checkpoint_seconds=0, **changes)


def manifest(root: Path, place: str = "replay/web") -> dict[str, Any]:
    return dict(json.loads((root / place / "manifest.json").read_text()))


def tree(root: Path) -> dict[str, str]:
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def train_bpe(folder: Path, vocabulary: int, special: Sequence[str] = ("<|end|>",)) -> Path:
    """A folder with a small real tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the cat sat on the mat; the dog ate the cat's hat"] * 3, trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=special[0]).save_pretrained(folder)
    return folder
