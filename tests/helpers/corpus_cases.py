"""Small corpora and a short way to prepare them, for the tests of the corpus."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

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


def source(name: str, files: Sequence[Path], role: str = "replay", **fields: Any) -> SourceSpec:
    return SourceSpec(name=name, role=role, kind="jsonl", files=[str(f) for f in files], **fields)


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


def run(root: Path, sources: Sequence[SourceSpec], **changes: Any) -> BlockStore:
    arguments = {"tokenizer": BYTE, "block_size": S, "holdout_fraction": 0.1, **changes}
    return prepare(root, sources, **arguments)


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
