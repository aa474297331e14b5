"""Layouts of the recipes' datasets on the hub: paths of files, and columns beside the text.

A rehearsal's made files have the same layouts, so that readers are tested with nested columns,
other columns with text, other splits, and cards without a list of files. docs/data.md names the
origin of this list, which has no column that is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_rod.corpus.sources import SourceSpec


@dataclass(frozen=True, kw_only=True)
class HubLayout:
    """Files of a dataset."""

    # path of a file, with `{subset}`, `{split}`, and the file's `{number}` of `{count}`
    file: str = "{subset}/{split}-{number}-of-{count}.parquet"
    width: int = 5  # digits of a number
    # one row's columns beside those that the source reads
    columns: Mapping[str, Any] = field(default_factory=lambda: {"id": 0})
    # other files, which the source must not read: configuration, split and path, with `{subset}`
    beside: tuple[tuple[str, str, str], ...] = ()
    listed: bool = True  # whether the dataset's card lists configurations and their files

    def path(self, subset: str, split: str, number: int, count: int) -> str:
        """Returns the path of a file in the dataset."""
        numbers = {"number": f"{number:0{self.width}d}", "count": f"{count:0{self.width}d}"}
        return self.file.format(subset=subset, split=split, **numbers)

    def pattern(self, subset: str, split: str) -> str:
        """Returns the pattern of a split's files, as a card lists them."""
        return self.file.format(subset=subset, split=split, number="*", count="*")


_CRAWLED: dict[str, Any] = {
    "id": "<urn:uuid:0>",
    "dump": "CC-MAIN-2024-10",
    "url": "https://example.org/",
    "date": "2024-02-21T00:00:00Z",
    "file_path": "s3://commoncrawl/0.warc.gz",
    "language": "deu",
    "language_score": 0.99,
}


def _fine(columns: Mapping[str, Any]) -> HubLayout:
    beside = (("{subset}", "test", "data/{subset}/test/000_00000.parquet"),)
    file = "data/{subset}/{split}/000_{number}.parquet"
    return HubLayout(file=file, columns=columns, beside=beside)


def _numbered(columns: Mapping[str, Any], *beside: tuple[str, str, str]) -> HubLayout:
    file = "{subset}/part_{number}.parquet"
    return HubLayout(file=file, width=6, columns=columns, beside=beside)


_MADE_BY_A_MODEL = {
    "uuid": "00000000-0000-0000-0000-000000000000",
    "license": "cc-by-4.0",
    "metadata": {"category": "made", "models_used": "Qwen3-30B-A3B"},
}
_LAYOUTS = {
    "HuggingFaceFW/finepdfs": _fine(
        {
            **{key: _CRAWLED[key] for key in ("id", "dump", "url", "date", "language")},
            "token_count": 540,
            "full_doc_lid": "deu_Latn",
            "full_doc_lid_score": 0.99,
            "per_page_languages": ["deu_Latn", "unknown"],
            "is_truncated": False,
            "extractor": "docling",
            "page_ends": [100, 200],
        }
    ),
    "HuggingFaceFW/fineweb-2": _fine(
        {
            **_CRAWLED,
            "language_script": "Latn",
            "minhash_cluster_size": 1,
            "top_langs": '{"deu_Latn_score": 0.99}',
        }
    ),
    "HuggingFaceFW/finewiki": HubLayout(
        file="data/{subset}wiki/000_{number}.parquet",
        columns={
            "id": "dewiki/1",
            "title": "Made",
            "url": "https://de.wikipedia.org/wiki/Made",
            "version": 1,
            "in_language": "de",
        },
    ),
    "coral-nlp/german-commons": HubLayout(columns={"source": "made", "ocr_score": None}),
    "nvidia/Nemotron-CC-v2": _numbered({"id": "0"}),
    "nvidia/Nemotron-CC-Math-v1": _numbered(
        {
            "id": "0",
            "metadata": {
                "category": "Nemotron-CC-MATH",
                "models_used": ["phi-4"],
                "warc_filename": "0.warc.gz",
                "warc_id": "<urn:uuid:0>",
                "finemath_scores": 4.1,
                "finemath_int_scores": 4,
                "nemocurator_scores": 3.2,
                "nemocurator_int_scores": 3,
            },
        },
        # the same pages, written anew
        ("{subset}_MIND", "train", "{subset}_MIND/part_000000.parquet"),
    ),
    "nvidia/Nemotron-Pretraining-SFT-v1": _numbered({"id": "0"}),
    "nvidia/Nemotron-Pretraining-Specialized-v1": _numbered(_MADE_BY_A_MODEL),
    "nvidia/Nemotron-Pretraining-Legal-v1": _numbered(_MADE_BY_A_MODEL),
    "HuggingFaceTB/smollm-corpus/fineweb-edu-dedup": HubLayout(
        columns={"id": "<urn:uuid:0>", "metadata": {**_CRAWLED, "score": 3.1, "int_score": 3}}
    ),
    "HuggingFaceTB/smollm-corpus/cosmopedia-v2": HubLayout(
        columns={
            "prompt": "Write a textbook.",
            "token_length": 540,
            "audience": "general",
            "format": "textbook",
            "seed_data": "made",
        }
    ),
    "HuggingFaceTB/finemath": HubLayout(
        columns={"url": "https://example.org/", "score": 4.1, "int_score": 4}
    ),
    "codeparrot/codeparrot-clean": HubLayout(
        file="file-{number}.json.gz",
        width=12,
        columns={"repo_name": "made/made", "path": "made.py", "size": "540", "license": "mit"},
        listed=False,
    ),
}


def layout_for(spec: SourceSpec) -> HubLayout:
    """Returns the layout of a source's dataset on the hub; a generic one if it is not known."""
    dataset = _LAYOUTS.get(str(spec.path), HubLayout())
    return _LAYOUTS.get(f"{spec.path}/{spec.subset}", dataset)
