"""Corpora of every format, prepared with interruptions, against an oracle of a few lines.

The oracle knows the documents: their ids with an EOD each, concatenated and cut. Every block of
that is the next training block or the next held-out one, and nothing is left.
"""

import bz2
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
from corpus_cases import BYTE, S, run, train_bpe

from nemo_rod import corpus
from nemo_rod.corpus import BlockStore, SourceSpec, is_holdout, load_tokenizer
from nemo_rod.hosts.data import parquet_tables

pytest.importorskip("transformers")
WORDS = [
    "the cat", "sat on", "the mat;", "ü", "你好", "🙂", "\n", "\u2028", "\x00", "dog's", '"', "\\",
]  # fmt: skip
Record = dict[str, Any]


def documents(dice: np.random.Generator) -> list[str]:
    count = int(dice.integers(30, 120))
    lengths = dice.choice([0, 1, 7, 30, 400], count, p=[0.03, 0.1, 0.4, 0.45, 0.02])
    made = [" ".join(dice.choice(WORDS, length)) for length in lengths]
    return [made[i] if dice.random() < 0.9 else made[0] for i in range(count)]


def write_jsonl(path: Path, records: list[Record], pack: Callable[[bytes], bytes]) -> None:
    texts = [
        json.dumps(record, ensure_ascii=number % 2 == 0) for number, record in enumerate(records)
    ]
    path.write_bytes(pack("\n".join(texts).encode() + b"\n" * (len(records) % 2)))


def members(pack: Callable[[bytes], bytes], data: bytes) -> bytes:
    return pack(data[: len(data) // 2]) + pack(data[len(data) // 2 :])


def zst(data: bytes) -> bytes:
    return bytes(pytest.importorskip("zstandard").compress(data))


def write_parquet(path: Path, records: list[Record], form: str, rows: int) -> None:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist(
        records,
        pyarrow.schema([("text", pyarrow.string()), ("meta", pyarrow.struct([("score", "f8")]))]),
    )
    column = table.column("text").combine_chunks()
    column = column.dictionary_encode() if form == "dictionary" else column.cast(form)
    parquet.write_table(table.set_column(0, "text", column), path, row_group_size=rows)


def write(folder: Path, form: str, parts: list[list[Record]], rows: int) -> dict[str, Any]:
    """Writes the records in a number of files, and returns how a source reads them."""
    folder.mkdir()
    for number, records in enumerate(parts):
        if form == "text":
            for row, record in enumerate(records):
                path = folder / f"{number:02d}-{row:04d}.txt"
                path.write_bytes(b"\xef\xbb\xbf" * (row % 2) + record["text"].encode())
        elif form.startswith("jsonl"):
            pack = {"jsonl": bytes, "jsonl.gz": partial(members, gzip.compress),
                    "jsonl.bz2": partial(members, bz2.compress), "jsonl.zst": partial(members, zst),
                    "jsonl.xz": partial(members, lzma.compress)}[form]  # fmt: skip
            write_jsonl(folder / f"{number}.{form}", records, pack)
        elif form in ("string", "large_string", "dictionary", "hub"):
            kind = "string" if form == "hub" else form
            write_parquet(folder / f"train-{number}.parquet", records, kind, rows)
    if form == "saved":
        from datasets import Dataset

        everything = [record for records in parts for record in records]
        Dataset.from_list(everything).save_to_disk(folder, num_shards=len(parts))
    if form in ("saved", "hub"):
        return {"kind": "huggingface", "path": str(folder)}
    os.symlink(".", folder / "latest")
    kind = "text" if form == "text" else "jsonl" if form.startswith("jsonl") else "parquet"
    suffix = {"text": "txt", "parquet": "parquet"}.get(kind, form)
    return {"kind": kind, "files": [f"{folder}/**/*.{suffix}"]}


FORMS = ["text", "jsonl", "jsonl.gz", "jsonl.bz2", "jsonl.xz", "jsonl.zst", "string",
         "large_string", "dictionary", "saved", "hub"]  # fmt: skip


def expected(texts: list[str], options: dict[str, Any]) -> Iterator[str]:
    """The documents in use."""
    seen, size = set(), 0
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
            yield text
        if limit <= len(text.encode()) or size >= options.get("max_bytes", 10**9):
            return


@pytest.mark.parametrize(
    "seeds",
    [range(22), pytest.param(range(22, 522), marks=[pytest.mark.slow, pytest.mark.timeout(3000)])],
)
def test_made_corpora(seeds: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets").disable_progress_bars()
    bpe = load_tokenizer(str(train_bpe(tmp_path / "bpe", vocabulary=290)))
    monkeypatch.setattr("nemo_rod.corpus.encode.PIECE_CHARS", 400)
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
        parts = [records[a:b] for a, b in pairwise(ends) if a < b]
        options: dict[str, Any] = {}
        if form != "text" and dice.random() < 0.3:
            options["filter"] = "meta.score >= 0.3"
        if dice.random() < 0.3:
            options["subsample"] = 0.6
        if dice.random() < 0.3:
            options["dedup"] = True
        if dice.random() < 0.3:
            options["max_bytes"] = int(dice.integers(400, 4000))
        place = write(tmp_path / f"{seed}", form, parts, int(dice.integers(1, 20)))
        spec = SourceSpec(name="web", role="replay", **place, **options)
        left = int(dice.integers(0, 3))

        def stop(*_: Any, dice: np.random.Generator = dice) -> None:
            nonlocal left, stops
            if left and dice.random() < 0.3:
                left, stops = left - 1, stops + 1
                raise KeyboardInterrupt

        root, fraction = tmp_path / f"{seed}-blocks", {"holdout_fraction": 0.2, "holdout_floor": 0}
        used = list(expected(texts, options))
        eod = [tokenizer.eod_id]
        ids = [token for t in tokenizer.encode_batch(used) for token in t.tolist() + eod]
        blocks = [ids[start : start + S] for start in range(0, len(ids) - S + 1, S)]
        held = {is_holdout(block, fraction=0.2) for block in blocks}
        while True:
            try:
                run(
                    root, [spec], tokenizer=tokenizer, progress=stop, checkpoint_seconds=0,
                    **fraction,
                )  # fmt: skip
                break
            except KeyboardInterrupt:
                continue
            except ValueError as error:
                assert held != {False, True}, (seed, form, options, str(error))
                break
        if held != {False, True}:
            assert not (root / "store.json").exists()
            continue
        sides = [BlockStore(root, split) for split in ("train", "holdout")]
        rows = [iter(side.tokens(np.arange(len(side))).tolist()) for side in sides]
        heads = [next(row, None) for row in rows]
        for number, block in enumerate(blocks):
            assert block in heads, (seed, form, options, number)
            side = heads.index(block)
            heads[side] = next(rows[side], None)
        assert heads == [None, None], (seed, form, options)
        manifest = json.loads((root / "replay/web/manifest.json").read_text())
        assert (manifest["documents"], manifest["tokens"]) == (len(used), len(ids)), (seed, form)
        assert manifest["dropped_tokens"] == len(ids) % S
    assert stops > len(seeds) // 3
