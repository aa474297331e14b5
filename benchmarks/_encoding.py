"""Tokenise and pack, against per-document encoding and against the tokenizer alone.

The text is the source code of this Python's standard library, the tokenizer a byte-level BPE with
32k ids trained on a part of it: nothing is fetched.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from _rows import Row, Setting, over, under

from nemo_rod.corpus import Packer, SourceSpec, load_tokenizer, prepare
from nemo_rod.corpus.documents import Documents
from nemo_rod.corpus.encode import Batch, Encoder, batches

BLOCK_SIZE = 4096
VOCABULARY = 32_000
DOCUMENT_CHARS = 8192  # longer files are cut up: on the web a document has some kilobytes
_TRAINED_ON = 8_000_000  # characters


def documents(limit: int) -> list[str]:
    """About `limit` characters of Python, in documents of a few kilobytes."""
    pieces: list[str] = []
    size = 0
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:  # some tests of Python's own are there to be undecodable
            continue
        pieces += [text[i : i + DOCUMENT_CHARS] for i in range(0, len(text), DOCUMENT_CHARS)]
        size += len(text)
    order = np.random.default_rng(0).permutation(len(pieces))
    total, chosen = 0, []
    while total < limit:  # around again where there is not enough
        for index in order:
            if total >= limit:
                break
            chosen.append(pieces[index])
            total += len(pieces[index])
    return chosen


def train_tokenizer(folder: Path, texts: list[str]) -> Path:
    """A fast tokenizer as large models have them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>").save_pretrained(folder)
    return folder


def corpus(setting: Setting, characters: int) -> tuple[Path, SourceSpec]:
    """The tokenizer's folder, and a source of `characters`."""
    path = setting.folder / "documents.jsonl"
    with path.open("w") as file:
        for text in documents(characters):
            file.write(json.dumps({"text": text}) + "\n")
    tokenizer = train_tokenizer(setting.folder / "tokenizer", documents(_TRAINED_ON))
    return tokenizer, SourceSpec(name="text", role="replay", kind="jsonl", files=[str(path)])


def encoding(setting: Setting) -> Iterator[Row]:
    """CPU time of one core for the same text, batch by batch in turns, in three ways.

    Each has a tokenizer of its own, so that none profits from the words another has just seen.
    """
    from transformers import AutoTokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    folder, spec = corpus(setting, 4_000_000 if setting.quick else 24_000_000)
    ours, bare = load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    plain, eod_id = AutoTokenizer.from_pretrained(folder), ours.eod_id
    packer = Packer(BLOCK_SIZE, eod_id)

    def tokenise_and_pack(batch: Batch) -> int:
        with Encoder(ours, workers=1) as encoder:
            ((_, (tokens, lengths)),) = encoder.encode(iter([batch]))
        packer.add(np.split(tokens, np.cumsum(lengths)[:-1]))
        return len(tokens)

    def per_document(batch: Batch) -> int:
        """As the loop of Megatron's preprocess_data: one call, one list of ids, one array."""
        count = 0
        for text in batch.texts:
            ids = plain(text)["input_ids"]
            ids.append(eod_id)
            count += len(np.array(ids, dtype=np.int32)) - 1
        return count

    def tokenizer_alone(batch: Batch) -> int:
        encodings = bare.backend_tokenizer.encode_batch_fast(batch.texts, add_special_tokens=False)
        return sum(len(encoding) for encoding in encodings)

    ways = (tokenise_and_pack, per_document, tokenizer_alone)
    speed = _speeds(ways, list(batches(Documents(spec))))
    ratio = "ratio"
    yield over("encode_vs_per_document", speed[ways[0]] / speed[ways[1]], ratio, 1.2)
    yield over("encode_vs_limit", speed[ways[0]] / speed[ways[2]], ratio, 0.9)
    for way in ways:
        yield Row(f"encode.{way.__name__}", speed[way] / 1e3, "ktok/s/core")


def _speeds(
    ways: tuple[Callable[[Batch], int], ...], rounds: list[Batch]
) -> dict[Callable[[Batch], int], float]:
    """Tokens per second of CPU time; who begins changes from batch to batch."""
    seconds, tokens = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0)
    for number, batch in enumerate(rounds):
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            begin = time.process_time()
            count = way(batch)
            if number:  # the first warms up
                seconds[way] += time.process_time() - begin
                tokens[way] += count
    assert len({*tokens.values()}) == 1, f"the ways differ: {tokens}"
    return {way: tokens[way] / seconds[way] for way in ways}


def workers(setting: Setting) -> Iterator[Row]:
    """All of `prepare` with one worker and with two, in turns; processes start anew each time."""
    folder, spec = corpus(setting, 12_000_000 if setting.quick else 60_000_000)
    rounds = 1 if setting.quick else 3
    times: dict[int, list[float]] = {1: [], 2: []}
    peaks = []
    for number in range(rounds):
        for count in (1, 2):
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                root = setting.folder / f"{count}-{number}"
                seconds, megabytes = pool.submit(_prepare, root, spec, folder, count).result()
            times[count].append(seconds)
            peaks.append(megabytes)
    # the best of each: whatever else runs on the machine only ever takes time
    yield over("two_workers", min(times[1]) / min(times[2]), "ratio", 1.7)
    # What this machine gives to two processes that have nothing to do with each other.
    yield Row("two_workers.two_tokenizers_alone", _two_processes(folder, spec, rounds), "ratio")
    yield under("prepare_peak_mb", max(peaks), "MB", 1000)
    yield Row("prepare_peak_mb.text", Path(spec.files[0]).stat().st_size / 1e6, "MB")


def _prepare(root: Path, spec: SourceSpec, folder: Path, count: int) -> tuple[float, float]:
    """Seconds of `prepare`, and megabytes of its processes together when each is largest.

    The process that loads the tokenizer counts, though it has ended before the others start.
    """
    peaks: dict[str, int] = {}
    done = threading.Event()
    watch = threading.Thread(target=_watch_memory, args=(peaks, done))
    watch.start()
    tokenizer = load_tokenizer(str(folder))
    begin = time.perf_counter()
    prepare(root, [spec], tokenizer=tokenizer, block_size=BLOCK_SIZE, workers=count)
    seconds = time.perf_counter() - begin
    done.set()
    watch.join()
    return seconds, sum(peaks.values()) / 1e6


def _watch_memory(peaks: dict[str, int], done: threading.Event) -> None:
    """Notes the largest resident memory so far of this process and its children, in bytes."""
    while not done.wait(0.2):
        children = Path("/proc/self/task").glob("*/children")
        pids = [pid for file in children for pid in file.read_text().split()]
        for pid in ["self", *pids]:
            with suppress(OSError):  # it has just ended
                for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                    if line.startswith("VmHWM"):
                        peaks[pid] = 1024 * int(line.split()[1])


def _two_processes(folder: Path, spec: SourceSpec, rounds: int) -> float:
    context = multiprocessing.get_context("spawn")
    texts = [text for batch in batches(Documents(spec)) for text in batch.texts]
    part = texts[: len(texts) // 4]
    times: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(rounds):
        for count in (1, 2):
            with context.Pool(count, initializer=_load, initargs=(str(folder),)) as pool:
                pool.map(_encode, [part[:10]] * count, chunksize=1)
                begin = time.perf_counter()
                pool.map(_encode, [part] * count, chunksize=1)
                times[count].append((time.perf_counter() - begin) / count)
    return min(times[1]) / min(times[2])


_tokenizer: Any = None  # of a process of `ProcessPoolExecutor`


def _load(folder: str) -> None:
    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokenizer = load_tokenizer(folder)


def _encode(texts: list[str]) -> int:
    step = 128
    parts = (texts[i : i + step] for i in range(0, len(texts), step))
    return sum(len(ids) for part in parts for ids in _tokenizer.encode_batch(part))
