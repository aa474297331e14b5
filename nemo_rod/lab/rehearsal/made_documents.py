"""A few documents for every source of a recipe, in files like those that the source reads.

A source keeps its reader, fields, filter, files, split and subsample. Its input lies in the
rehearsal's folder: a Hugging Face dataset becomes a folder with the same configuration, splits,
files and columns (`hub_layouts`), and globs become files that match them. Texts are made up, by
one Markov chain per source.
"""

from __future__ import annotations

import copy
import gzip
import json
import math
from collections.abc import Iterator, Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any

from nemo_rod.corpus.adapters.synthetic import synthetic_documents
from nemo_rod.corpus.filters import parse_filter
from nemo_rod.corpus.sources import SourceSpec
from nemo_rod.lab.rehearsal.hub_layouts import layout_for

# Blocks of a source: enough for held-out ones, and enough replay for an arm with a large share
BLOCKS = {"adaptation": 48, "replay": 72}
_TAKEN = 12  # documents of about 540 tokens that pass a source's subsample, twice the need
# ids of another tokenizer than the rehearsal's, and the text of a base that has learned nothing
_REPLACED = ("megatron", "generated")
_SPLITS = ("one", "two")  # of a configuration of which all splits are read


def small_source(spec: SourceSpec, folder: Path, *, block_size: int) -> dict[str, Any]:
    """Returns the keys that differ in the rehearsal's source: its input and its caps."""
    most = BLOCKS[spec.role] * block_size
    changed: dict[str, Any] = {"max_tokens": min(spec.max_tokens or most, most)}
    if spec.kind == "huggingface":
        changed["path"] = str(_dataset(spec, folder))
    elif spec.kind in _REPLACED:
        files = [str(folder / spec.name / "*.jsonl")]
        changed |= {"kind": "jsonl", "files": files, "path": None, "options": {}}
    elif spec.kind in ("text", "jsonl", "parquet"):
        changed["files"] = [str(folder / spec.name / _below_root(glob)) for glob in spec.files]
    if spec.max_bytes is not None:
        changed["max_bytes"] = min(spec.max_bytes, most)
    return changed


def write_sources(specs: Sequence[SourceSpec], folder: Path) -> None:
    """Writes the documents of every source of the recipe into the rehearsal's folder."""
    cards: dict[Path, dict[str, list[dict[str, str]]]] = {}
    for number, spec in enumerate(specs):
        count = math.ceil(_TAKEN / spec.subsample * _num_files(spec) / (_num_files(spec) - 1))
        rows = list(islice(_records(spec, number), count))
        if spec.kind == "huggingface":
            dataset = _dataset(spec, folder)
            listed = _write_dataset(spec, dataset, rows)
            if layout_for(spec).listed:
                cards.setdefault(dataset, {}).update(listed)
        elif spec.kind in _REPLACED:
            for file in range(2):
                _write_rows(folder / spec.name / f"{file}.jsonl", rows[file::2], kind="jsonl")
        elif spec.kind in ("text", "jsonl", "parquet"):
            for glob, file in product(spec.files, range(2)):
                wild = (("**", f"part{file}"), ("*", f"made{file}"), ("?", str(file)))
                path = _below_root(glob)
                for pattern, value in wild:
                    path = path.replace(pattern, value)
                _write_rows(folder / spec.name / path, rows[file::2], kind=spec.kind)
    for dataset, listed in cards.items():
        configs = [{"config_name": name, "data_files": files} for name, files in listed.items()]
        # the card of a dataset is YAML, of which JSON is a part
        card = f"---\nconfigs: {json.dumps(configs)}\n---\n"
        (dataset / "README.md").write_text(card)


def _num_files(spec: SourceSpec) -> int:
    """Returns the files of a split: one more than the source may read."""
    return (spec.max_files or 1) + 1


def _dataset(spec: SourceSpec, folder: Path) -> Path:
    assert spec.path is not None
    return folder / "datasets" / _below_root(spec.path)


def _below_root(path: str) -> str:
    """Returns a path without its root, so that it can lie in another folder."""
    parts = [part for part in Path(path).expanduser().parts if part not in ("/", "..", ".")]
    return str(Path(*parts))


def _records(spec: SourceSpec, number: int) -> Iterator[dict[str, Any]]:
    """Yields rows with the fields that the source reads, and others."""
    comparisons = parse_filter(spec.filter)
    for index, text in enumerate(synthetic_documents(number)):
        row = copy.deepcopy(dict(layout_for(spec).columns))
        # every text is unique, and has characters that tokenizers treat differently
        _set(row, spec.text_field, f"{spec.name} {index}: Größe § 1, «naïf» <|im_end|> {text}")
        for comparison in comparisons:  # a value that passes it
            passing, operator = comparison.value, comparison.operator
            if operator not in ("==", ">=", "<="):
                if isinstance(passing, bool) or passing is None:
                    passing = passing is not True
                elif isinstance(passing, str):
                    passing = f"{passing}a" if operator != "<" else ""
                else:
                    passing += -1 if operator == "<" else 1
            if comparison.field != spec.text_field:
                _set(row, comparison.field, passing)
        yield row


def _set(row: dict[str, Any], field: str, value: Any) -> None:
    *outer, last = field.split(".")
    for name in outer:
        row = row.setdefault(name, {})
    row[last] = value


def _write_dataset(
    spec: SourceSpec, dataset: Path, rows: list[dict[str, Any]]
) -> dict[str, list[dict[str, str]]]:
    """Writes one configuration of a dataset; returns its entries in the dataset's card."""
    from nemo_rod.corpus.adapters.hub_datasets import ALL_SPLITS

    layout, subset = layout_for(spec), spec.subset or "default"
    splits = _SPLITS if spec.split == ALL_SPLITS else (spec.split,)
    files = _num_files(spec)
    listed: dict[str, list[dict[str, str]]] = {subset: []}
    for place, split in enumerate(splits):
        mine = rows[place :: len(splits)]
        for number in range(files):
            _write_rows(dataset / layout.path(subset, split, number, files), mine[number::files])
        listed[subset].append({"split": split, "path": layout.pattern(subset, split)})
    other = copy.deepcopy(rows[0])
    _set(other, spec.text_field, "not of this source")
    for name, split, path in layout.beside:
        path = path.format(subset=subset)
        _write_rows(dataset / path, [other])
        listed.setdefault(name.format(subset=subset), []).append({"split": split, "path": path})
    return listed


def _write_rows(path: Path, rows: list[dict[str, Any]], *, kind: str | None = None) -> None:
    """Writes "text", "jsonl" or "parquet"; by default one of the last two, by the suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "parquet" or (kind is None and path.suffix == ".parquet"):
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=64)
        return
    if kind == "text":
        data = "\n".join(str(row["text"]) for row in rows).encode()
    else:
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    elif path.suffix == ".zst":
        import zstandard

        data = zstandard.compress(data)
    path.write_bytes(data)
