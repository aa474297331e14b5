"""Layouts of the recipes' datasets on the hub: paths of files, and columns beside the text.

A rehearsal's made files have the same layouts, so that readers are tested with nested columns,
other columns with text, other splits, and cards without a list of files. The list has no column
that is not known, from the datasets' cards, nvidia/Nemotron-Pretraining-Dataset-sample, and public
code that reads them: `data_blend_raw.json` of NVIDIA-NeMo/Nemotron (4c35ae1), `nemotron_v2.py` of
marin-community/marin (29187a0) and `stage_replay_pool.py` of bethgelab/replay-on-demand (637f03b).
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


def _row(*, texts: str = "id", numbers: str = "", **others: Any) -> dict[str, Any]:
    """Returns a row with columns of text and numbers, and others by their value."""
    return dict.fromkeys(texts.split(), "made") | dict.fromkeys(numbers.split(), 0.99) | others


_FINE: dict[str, Any] = {
    "file": "data/{subset}/{split}/000_{number}.parquet",
    "beside": (("{subset}", "test", "data/{subset}/test/000_00000.parquet"),),
}
_NUMBERED: dict[str, Any] = {"file": "{subset}/part_{number}.parquet", "width": 6}
_CRAWLED = "id dump url date language"
_MADE_BY_A_MODEL = HubLayout(
    **_NUMBERED, columns=_row(texts="uuid license", metadata=_row(texts="category models_used"))
)
_LAYOUTS = {
    "HuggingFaceFW/finepdfs": HubLayout(
        **_FINE,
        columns=_row(
            texts=f"{_CRAWLED} full_doc_lid extractor", numbers="full_doc_lid_score",
            token_count=540, per_page_languages=["deu_Latn", "unknown"], is_truncated=False,
            page_ends=[100, 200],
        ),
    ),
    "HuggingFaceFW/fineweb-2": HubLayout(
        **_FINE,
        columns=_row(
            texts=f"{_CRAWLED} file_path language_script top_langs", numbers="language_score",
            minhash_cluster_size=1,
        ),
    ),
    "HuggingFaceFW/finewiki": HubLayout(
        file="data/{subset}wiki/000_{number}.parquet",
        columns=_row(texts="id title url in_language", version=1),
    ),
    "coral-nlp/german-commons": HubLayout(columns=_row(texts="source", ocr_score=None)),
    "nvidia/Nemotron-CC-v2": HubLayout(**_NUMBERED, columns=_row()),
    "nvidia/Nemotron-CC-Math-v1": HubLayout(
        **_NUMBERED,
        columns=_row(
            metadata=_row(
                texts="category warc_filename warc_id", models_used=["phi-4"],
                numbers="finemath_scores nemocurator_scores", finemath_int_scores=4,
                nemocurator_int_scores=3,
            )
        ),
        # the same pages, written anew
        beside=(("{subset}_MIND", "train", "{subset}_MIND/part_000000.parquet"),),
    ),
    "nvidia/Nemotron-Pretraining-SFT-v1": HubLayout(**_NUMBERED, columns=_row()),
    "nvidia/Nemotron-Pretraining-Specialized-v1": _MADE_BY_A_MODEL,
    "nvidia/Nemotron-Pretraining-Legal-v1": _MADE_BY_A_MODEL,
    "HuggingFaceTB/smollm-corpus/fineweb-edu-dedup": HubLayout(
        columns=_row(
            metadata=_row(
                texts=f"{_CRAWLED} file_path", numbers="language_score score", int_score=3
            )
        )
    ),
    "HuggingFaceTB/smollm-corpus/cosmopedia-v2": HubLayout(
        columns=_row(texts="prompt audience format seed_data", token_length=540)
    ),
    "HuggingFaceTB/finemath": HubLayout(columns=_row(texts="url", numbers="score", int_score=4)),
    "codeparrot/codeparrot-clean": HubLayout(
        file="file-{number}.json.gz", width=12, listed=False,
        columns=_row(texts="repo_name path size license"),
    ),
}  # fmt: skip


def layout_for(spec: SourceSpec) -> HubLayout:
    """Returns the layout of a source's dataset on the hub; a generic one if it is not known."""
    dataset = _LAYOUTS.get(str(spec.path), HubLayout())
    return _LAYOUTS.get(f"{spec.path}/{spec.subset}", dataset)
