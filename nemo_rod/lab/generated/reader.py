"""Documents sampled from a model, as a source of kind ``generated``.

    own: {role: replay, kind: generated, path: MODEL, max_tokens: 1_000_000, options: {seed: 1}}

Texts are sampled from the end-of-document token alone or, with `files` (JSON Lines), from the first
tokens of given texts. An end of document begins the next document of the same sequence.

Every batch is a function of the settings and its own number (with vLLM up to rounding, which there
depends on what else is computed at once), and is kept as a file in the user's
cache folder: an interrupted `prepare` resumes with the next batch. ``generated.json`` beside the
batches says what was sampled, from which weights, and what was dropped: documents of fewer than
`SHORTEST` tokens; loops, in which less than half of the runs of four tokens are distinct; and
documents whose mean loss under the model is less than half or more than twice that of the batch.

Documents are the model's own token ids. One that the length of its sequence cuts off is left open:
no end of document follows it, which the model did not write, and no half character stays.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
from numpy.typing import NDArray

from nemo_rod.bounds import check_bounds, check_types, key, one_of
from nemo_rod.corpus.formats import Input, JsonLines, LongText
from nemo_rod.corpus.input_files import matching_files
from nemo_rod.corpus.sources import SourceSpec, takes
from nemo_rod.corpus.tokenizer import load_tokenizer
from nemo_rod.corpus.tokenizer_identity import Tokenizer, whole_characters
from nemo_rod.files import digest, digest_files, move_whole, naming, read_json, write_json
from nemo_rod.lab.generated.engines import ENGINES, choose
from nemo_rod.lab.text import user_cache
from nemo_rod.progress import Progress

SHORTEST = 16
_CACHE_BYTES = 8 * 2**30  # leaves room for a small model on a GPU of 24 GB


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The `options` of a source of kind ``generated``."""

    seed: int = key(42, "in [0, 2**31)")  # sampling is seeded by it and the batch's number
    temperature: float = key(1.0, "> 0")  # 1: the model's own distribution
    tokens: int | None = key(None, ">= 2")  # a sequence has; null: the model's context length
    batch: int | None = key(None, ">= 1")  # sequences sampled at once; null: see `batch_size`
    first: int = key(16, ">= 1")  # tokens of every text of `files` that the model continues
    eod: int | None = key(None, ">= 0")  # ends documents; null: the EOS of the model's tokenizer
    engine: str | None = one_of(None, *ENGINES)  # null: vLLM where it and a GPU are, or the other


@takes("path", "revision", "files", "text_field", "filter", "options")
def read_generated(spec: SourceSpec) -> list[Input]:
    """Returns the documents of a source of kind ``generated``, as one input.

    Raises:
        ValueError: an option is not valid, nothing ends the source, or the model is missing.
    """
    where = f"domain.sources.{spec.name}"
    known = {field.name for field in dataclasses.fields(Sampling)}
    if unknown := sorted(spec.options.keys() - known):
        raise ValueError(
            f"{where}.options has the unknown key {unknown[0]!r}: expected some of "
            f"{', '.join(sorted(known))}."
        )
    sampling = Sampling(**spec.options)
    check_types(sampling, get_type_hints(Sampling), f"{where}.options.")
    check_bounds(sampling, f"{where}.options.")
    if spec.max_tokens is None and spec.max_documents is None:
        raise ValueError(f"{where} has no end: a model writes on for ever; set max_tokens.")
    if spec.dedup:
        raise ValueError(f"{where}.dedup=true reads to an end, which {where} lacks: remove it.")
    try:
        engine = choose(sampling.engine)
    except ValueError as error:
        raise ValueError(f"{where}.options.engine={sampling.engine}: {error}") from None
    folder = Path(str(spec.path))
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(str(spec.path), revision=spec.revision))
        except Exception as error:
            raise ValueError(
                f"{where}.path={spec.path} is neither a folder here nor could it be fetched from "
                f"the hub ({type(error).__name__}): give the base's folder."
            ) from error
    if not (files := sorted(folder.glob("*.safetensors"))):
        raise ValueError(f"{folder} holds no *.safetensors: expected a Hugging Face checkpoint.")
    weights = _weights(
        tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    )
    if sampling.batch is None:
        sampling = dataclasses.replace(sampling, batch=batch_size(folder, sampling.tokens))
    settings: dict[str, Any] = {"model": spec.path, "revision": spec.revision, "weights": weights}
    settings |= {**dataclasses.asdict(sampling), "engine": engine, "cut": "left open"}
    if spec.files:
        # Sizes, not contents: files may lie on a storage that is read once.
        settings["files"] = [(name, path.stat().st_size) for path, name in matching_files(spec)]
    name = digest(json.dumps(settings, sort_keys=True).encode())[:16]
    batches = user_cache() / "generated" / name
    return [_GeneratedDocuments(f"generated-{name}", spec, sampling, folder, batches, settings)]


def batch_size(folder: Path, tokens: int | None) -> int:
    """Returns how many sequences have `_CACHE_BYTES` of keys and values in bf16, at most 1,024.

    It is a function of the model and of their length, in tokens or None for its context: the text
    of a batch must not depend on the machine.
    """
    described = read_json(folder / "config.json")
    model = described.get("text_config") or described
    heads = model.get("num_attention_heads", 1)
    width = model.get("head_dim") or model.get("hidden_size", 1) // heads
    of_a_token = model.get("num_hidden_layers", 1) * model.get("num_key_value_heads", heads) * width
    length = tokens or model.get("max_position_embeddings", 1)
    return max(1, min(1024, _CACHE_BYTES // (2 * 2 * of_a_token * length)))


@functools.lru_cache(maxsize=8)  # a source is opened several times, and weights may be large
def _weights(files: tuple[tuple[Path, int, int], ...]) -> str:
    return digest_files([file for file, _, _ in files])


class _GeneratedDocuments(Input):
    """The documents that a model writes, as token ids."""

    def __init__(
        self, name: str, spec: SourceSpec, sampling: Sampling, folder: Path, batches: Path,
        settings: dict[str, Any],
    ) -> None:  # fmt: skip
        super().__init__(name, None)
        self._spec, self._sampling, self._folder = spec, sampling, folder
        self._batches, self._settings = batches, settings

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Refuses another tokenizer than the model's."""
        eod = self._sampling.eod
        if load_tokenizer(str(self._folder), eod=eod).fingerprint != tokenizer.fingerprint:
            where = f"domain.sources.{self._spec.name}"
            raise ValueError(
                f"{where}.path={self._spec.path} writes ids of another tokenizer, or with another "
                f"end of document ({where}.options.eod={eod}), than domain.tokenizer and "
                f"domain.eod={tokenizer.eod_id}: let both be the same"
            )

    def read(self, start: int) -> Iterator[NDArray[np.int32]]:
        """Yields the token ids of every document."""
        documents = ((ids, cut) for batch in self._generate() for ids, cut in batch["documents"])
        for ids, self.cut in itertools.islice(documents, start, None):
            yield np.array(ids, np.int32)

    def _generate(self) -> Iterator[dict[str, Any]]:
        """Yields the batches, sampled or from the cache."""
        spec, batches, settings = self._spec, self._batches, self._settings
        batches.mkdir(parents=True, exist_ok=True)
        counts: Counter[str] = Counter()
        total = spec.max_tokens or 0
        progress = Progress(f"generate {spec.name}", total, unit="tokens")
        sampler = None
        for number in itertools.count():
            file = batches / f"{number:06d}.json"
            fresh = not file.exists()
            if fresh:
                sampler = sampler or Sampler(spec, self._sampling, self._folder, settings["engine"])
                made = file.with_suffix(f".{os.getpid()}")
                with naming(file):
                    made.write_text(json.dumps(sampler.sample(number)))
                    move_whole(made, file)
            batch = json.loads(file.read_text())
            counts.update(batch["counts"])
            if fresh:
                about = {**settings, "version": version(settings["engine"]), "batches": number + 1}
                write_json(batches / "generated.json", {**about, **counts})
                progress.step(min(counts["kept_tokens"], total or counts["kept_tokens"]))
            else:
                progress.start(counts["kept_tokens"])
            if number == 9 and not counts["kept"]:
                raise ValueError(
                    f"{spec.path} wrote {counts['sampled']} documents in ten batches, and all were "
                    f"dropped ({dict(counts)}): see {batches}; lower domain.sources.{spec.name}."
                    "options.temperature, or give `files` to continue."
                )
            yield batch
            if total and counts["kept_tokens"] >= total:
                return


class Sampler:
    """Samples the batches of one source."""

    def __init__(
        self, spec: SourceSpec, sampling: Sampling, folder: Path, engine: str = "transformers"
    ) -> None:
        from transformers import AutoConfig

        self.sampling = sampling
        self.tokenizer: Tokenizer = load_tokenizer(str(folder), eod=sampling.eod)
        context = AutoConfig.from_pretrained(folder).get_text_config().max_position_embeddings
        length: int = sampling.tokens or context
        if length > context:
            raise ValueError(
                f"domain.sources.{spec.name}.options.tokens={length} is longer than the context "
                f"of {spec.path}, {context}: lower it."
            )
        self.starts = []
        for path, name in matching_files(spec):
            for text in JsonLines(path, name, spec).records(None):
                if text:
                    text = text.utf8.decode() if isinstance(text, LongText) else str(text)
                    ids = self.tokenizer.encode_batch([text])[0]
                    begin = ids[: min(sampling.first, length - 2)]
                    self.starts.append(whole_characters(self.tokenizer, begin).tolist())
        self.engine = ENGINES[engine](folder, length)

    def sample(self, number: int) -> dict[str, Any]:
        """Returns the documents of one batch, and how many of them were dropped, and why."""
        sampling, eod = self.sampling, self.tokenizer.eod_id
        assert sampling.batch is not None
        first = number * sampling.batch
        starts = [
            [eod, *(self.starts[index % len(self.starts)] if self.starts else [])]
            for index in range(first, first + sampling.batch)
        ]
        seed = sampling.seed * 1_000_003 + number
        sequences, losses = self.engine.sample(starts, sampling.temperature, seed)
        return self.keep(sequences, losses)

    def keep(
        self, sequences: Sequence[Sequence[int]], losses: Sequence[Sequence[float]]
    ) -> dict[str, Any]:
        """Splits sequences into documents, and drops some by the rule that is stated above.

        Each sequence begins with an end of document; `losses` are nats, of every token but the
        first.
        """
        eod = self.tokenizer.eod_id
        mean = sum(map(sum, losses)) / sum(map(len, losses))
        counts: Counter[str] = Counter()
        documents: list[tuple[list[int], bool]] = []  # and whether they were cut off
        for ids, costs in zip(sequences, losses, strict=True):
            pairs = zip(ids[1:], costs, strict=True)
            groups = [
                (is_end, [*group])
                for is_end, group in itertools.groupby(pairs, lambda pair: pair[0] == eod)
            ]
            for number, (is_end, group) in enumerate(groups, start=1):
                if is_end:
                    continue
                document, cost = zip(*group, strict=True)
                if is_cut := number == len(groups):
                    whole = whole_characters(self.tokenizer, np.array(document, np.int32))
                    document = tuple(whole.tolist())
                    counts["cut"] += 1
                counts["sampled"] += 1
                runs = list(zip(*(document[i:] for i in range(4)), strict=False))
                if len(document) < SHORTEST:
                    counts["short"] += 1
                elif len(set(runs)) < len(runs) / 2:
                    counts["loops"] += 1
                elif not mean / 2 <= sum(cost) / len(cost) <= mean * 2:
                    counts["far_from_own_loss"] += 1
                else:
                    counts["kept"] += 1
                    counts["kept_tokens"] += len(document)
                    documents.append(([*document], is_cut))
        return {"counts": dict(counts), "loss": mean, "documents": documents}
