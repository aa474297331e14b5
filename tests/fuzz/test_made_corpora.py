"""Corpora of every format, prepared with interruptions, against an oracle of a few lines.

The oracle knows the documents: their ids with an EOD each, concatenated and cut, are the blocks to
train on and those that are held out, where documents are not held out whole.
"""

import bz2
import dataclasses
import gzip
import hashlib
import json
import lzma
import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpus_cases import BYTE, S, manifest, run, source, train_bpe, write_parquet

from nemo_rod import corpus
from nemo_rod.corpus import BlockStore, SourceSpec, is_holdout, load_tokenizer
from nemo_rod.corpus.adapters import parquet_tables

pytest.importorskip("transformers")
pytest.importorskip("datasets")
zstandard = pytest.importorskip("zstandard")
WORDS = [
    "the cat", "sat on", "the mat;", "ü", "你好", "🙂", "\n", "\u2028", "\x00", "dog's", '"', "\\",
]  # fmt: skip
Record = dict[str, Any]


def documents(dice: np.random.Generator) -> list[str]:
    count = int(dice.integers(30, 120))
    lengths = dice.choice([0, 1, 7, 30, 400], count, p=[0.03, 0.1, 0.4, 0.45, 0.02])
    made = [" ".join(dice.choice(WORDS, length)) for length in lengths]
    return [made[i] if dice.random() < 0.9 else made[0] for i in range(count)]


def members(pack: Callable[[bytes], bytes], data: bytes) -> bytes:
    return pack(data[: len(data) // 2]) + pack(data[len(data) // 2 :])


PACKS: dict[str, Callable[[bytes], bytes]] = {
    "jsonl": bytes,
    "jsonl.gz": partial(members, gzip.compress),
    "jsonl.bz2": partial(members, bz2.compress),
    "jsonl.xz": partial(members, lzma.compress),
    "jsonl.zst": partial(members, zstandard.compress),
}
FORMS = ["text", *PACKS, "string", "large_string", "dictionary", "saved", "hub"]


def write(folder: Path, form: str, parts: list[list[Record]], rows: int) -> SourceSpec:
    """Writes the records in a number of files, and returns the source that reads them."""
    import pyarrow
    from datasets import Dataset

    folder.mkdir()
    if form == "saved":
        everything = [record for records in parts for record in records]
        Dataset.from_list(everything).save_to_disk(folder, num_shards=len(parts))
    for number, records in enumerate(parts if form != "saved" else ()):
        if form == "text":
            for row, record in enumerate(records):
                path = folder / f"{number:02d}-{row:04d}.txt"
                path.write_bytes(b"\xef\xbb\xbf" * (row % 2) + record["text"].encode())
        elif form in PACKS:
            texts = [json.dumps(r, ensure_ascii=row % 2 == 0) for row, r in enumerate(records)]
            data = "\n".join(texts).encode() + b"\n" * (len(records) % 2)
            (folder / f"{number}.{form}").write_bytes(PACKS[form](data))
        else:
            score = pyarrow.struct([("score", "f8")])
            fields = [("text", pyarrow.string()), ("meta", score)]
            table = pyarrow.Table.from_pylist(records, pyarrow.schema(fields))
            column = table.column("text").combine_chunks()
            if form == "dictionary":
                column = column.dictionary_encode()
            if form == "large_string":
                column = column.cast(form)
            table = table.set_column(0, "text", column)
            write_parquet(folder / f"train-{number}.parquet", table, row_group_size=rows)
    if form in ("saved", "hub"):
        return source("web", [], kind="huggingface", path=str(folder))
    os.symlink(".", folder / "latest")
    kind = "text" if form == "text" else "jsonl" if form in PACKS else "parquet"
    suffix = {"text": "txt", "parquet": "parquet"}.get(kind, form)
    return source("web", [f"{folder}/**/*.{suffix}"], kind=kind)


def expected(texts: list[str], options: dict[str, Any]) -> Iterator[tuple[int, str]]:
    """The documents in use, and the numbers of their records."""
    seen, size, number_used = set(), 0, 0
    for number, text in enumerate(texts):
        if not text or (options.get("filter") and number % 10 < 3):
            continue
        digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"rod-sub-v1").digest()
        if int.from_bytes(digest, "little") >= options.get("subsample", 1.0) * 2**64:
            continue
        if options.get("dedup") and text in seen:
            continue
        seen.add(text)
        limit = options.get("max_bytes", 10**9) - size
        size += len(text.encode())
        if size > options.get("max_bytes", 10**9):
            text = text.encode()[:limit].decode(errors="ignore")
        if text:
            yield number, text
        number_used += bool(text)
        if number_used == options.get("max_documents"):
            return
        if limit <= len(text.encode()) or size >= options.get("max_bytes", 10**9):
            return


@pytest.mark.parametrize(
    "seeds",
    [range(22), pytest.param(range(22, 522), marks=[pytest.mark.slow, pytest.mark.timeout(3000)])],
)
def test_made_corpora(seeds, tmp_path, monkeypatch):
    import datasets

    datasets.disable_progress_bars()
    bpe = load_tokenizer(str(train_bpe(tmp_path / "bpe", vocabulary=290)))
    monkeypatch.setattr("nemo_rod.corpus.encode.PIECE_CHARS", 400)
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    stops = 0
    for seed in seeds:
        dice, form = np.random.default_rng(seed), FORMS[seed % len(FORMS)]
        monkeypatch.setattr("nemo_rod.corpus.encode.BATCH_BYTES", int(dice.integers(50, 3000)))
        for module in (corpus.formats, corpus.documents, parquet_tables):
            monkeypatch.setattr(module, "LONG_BYTES", (1 << 24, 300)[seed // len(FORMS) % 2])
        tokenizer = bpe if dice.random() < 0.5 else BYTE
        texts = documents(dice)
        records = [{"text": t, "meta": {"score": i % 10 / 10}} for i, t in enumerate(texts)]
        ends = [0, *sorted(dice.integers(0, len(texts), 2)), len(texts)]
        parts = [(a, b) for a, b in pairwise(ends) if a < b]
        options: dict[str, Any] = {}
        if form != "text" and dice.random() < 0.3:
            options["filter"] = "meta.score >= 0.3"
        for name, value in (
            *(("subsample", 0.6), ("dedup", True), ("document_holdout", True)),
            *(("max_bytes", int(dice.integers(400, 4000))),),
            *(("max_documents", int(dice.integers(20, 60))),),
        ):
            if dice.random() < 0.3:
                options[name] = value
        rows = [records[a:b] for a, b in parts]
        plain = write(tmp_path / f"{seed}", form, rows, int(dice.integers(1, 20)))
        spec = dataclasses.replace(plain, **options)
        left = int(dice.integers(0, 3))

        def stop(*_: Any, dice: np.random.Generator = dice) -> None:
            nonlocal left, stops
            if left and dice.random() < 0.3:
                left, stops = left - 1, stops + 1
                raise KeyboardInterrupt

        root, run_options = tmp_path / f"{seed}-blocks", {
            "tokenizer": tokenizer, "progress": stop, "checkpoint_seconds": 0,
            "holdout_fraction": 0.2, "holdout_floor": 0,
        }  # fmt: skip
        used = [text for _, text in expected(texts, options)]
        ids = [text.tolist() for text in tokenizer.encode_batch(used)]
        streams: list[list[int]] = [[], []]
        for number, document in enumerate(ids, start=1):
            # the cap may have cut the last one, so that it does not end
            ends = [tokenizer.eod_id] * (number < len(ids) or used[-1] in texts)
            is_held = options.get("document_holdout") and is_holdout(document, fraction=0.2)
            streams[bool(is_held)] += document + ends
        blocks: list[list[list[int]]] = [[], []]
        for side, stream in enumerate(streams):
            for start in range(0, len(stream) - S + 1, S):
                block = stream[start : start + S]
                is_held = side or (
                    not options.get("document_holdout") and is_holdout(block, fraction=0.2)
                )
                blocks[bool(is_held)].append(block)
        while True:
            try:
                run(root, [spec], **run_options)
                break
            except KeyboardInterrupt:
                continue
            except ValueError as error:
                assert not all(blocks), (seed, form, options, str(error))
                break
        if not all(blocks):
            assert not (root / "store.json").exists()
            continue
        for split, expected_blocks in zip(("train", "holdout"), blocks, strict=True):
            store = BlockStore(root, split)
            assert store.tokens(np.arange(len(store))).tolist() == expected_blocks, (seed, options)
        told, tokens = manifest(root), sum(map(len, streams))
        assert (told["documents"], told["tokens"]) == (len(used), tokens), (seed, form)
        assert (told["dropped_tokens"], told["count"]) == (
            sum(len(stream) % S for stream in streams), len(blocks[0]),
        )  # fmt: skip
        counts = [file["documents"] for file in told["files"]]
        assert sum(counts) == len(used), (seed, form, options)
        if form not in ("text", "saved", "hub"):
            numbers = [number for number, _ in expected(texts, options)]
            assert counts == [sum(a <= n < b for n in numbers) for a, b in parts], (seed, form)
        sizes = {file.stat().st_size for file in (tmp_path / f"{seed}").iterdir()}
        assert {file["bytes"] for file in told["files"]} <= {*sizes, None}
    assert stops > len(seeds) // 3
