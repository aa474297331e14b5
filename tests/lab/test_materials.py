"""What a rehearsal is made of: documents that the sources' readers read, tokenizer, checkpoint."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import composed
from corpus_cases import read_documents

from nemo_rod import parts
from nemo_rod.corpus import BlockStore, SourceSpec, load_tokenizer, prepare
from nemo_rod.corpus.sources import takes
from nemo_rod.lab.rehearsal.forms import BLOCK_SIZE
from nemo_rod.lab.rehearsal.hub_layouts import layout_for
from nemo_rod.lab.rehearsal.made_documents import small_source, write_sources
from nemo_rod.lab.rehearsal.special_tokens import special_tokens, write_tokenizer

for module in ("datasets", "pyarrow", "tokenizers", "transformers", "zstandard"):
    pytest.importorskip(module)


RECIPES = {
    "german": "german_qwen3_5_4b", "german_open": "german_qwen3_0_6b", "legal": "legal_qwen3_5_9b",
}  # fmt: skip
FILES = {
    "german": {
        "HuggingFaceFW/finepdfs/data/deu_Latn/train/000_00000.parquet",
        "HuggingFaceFW/finewiki/data/dewiki/000_00000.parquet",
        "nvidia/Nemotron-CC-Math-v1/4plus/part_000002.parquet",
        "nvidia/Nemotron-CC-Math-v1/4plus_MIND/part_000000.parquet",
    },
    "german_open": {"codeparrot/codeparrot-clean/file-000000000001.json.gz"},
    "legal": {
        "nvidia/Nemotron-Pretraining-Legal-v1/Nemotron-Pretraining-Legal-eCFR/part_000000.parquet"
    },
}


def small_sources(specs: list[SourceSpec], folder: Path) -> list[SourceSpec]:
    write_sources(specs, folder)
    return [
        SourceSpec(**{**vars(spec), **small_source(spec, folder, block_size=BLOCK_SIZE)})
        for spec in specs
    ]


def made(
    specs: list[SourceSpec], folder: Path, **options: float | None
) -> dict[str, tuple[int, int]]:
    """Blocks of every source, trained on and held out, as its own reader reads what was made."""
    prepare(
        folder / "blocks", small_sources(specs, folder / "made"), tokenizer=load_tokenizer("byte"),
        block_size=BLOCK_SIZE, **options,
    )  # fmt: skip
    stores = [BlockStore(folder / "blocks"), BlockStore(folder / "blocks", split="holdout")]
    counts = [{source.name: source.count for source in store.sources} for store in stores]
    return {name: (counts[0][name], counts[1][name]) for name in counts[0]}


@pytest.mark.parametrize("domain", ["german", "legal"])
def test_every_source_of_the_paper_reads_what_was_made(domain: str, tmp_path: Path) -> None:
    config = composed(f"recipe={RECIPES[domain]}").domain
    options = ("holdout_fraction", "holdout_seed", "holdout_floor", "replay_ratio")
    counted = made(config.specs, tmp_path, **{key: getattr(config, key) for key in options})
    assert set(counted) == {spec.name for spec in config.specs}
    for name, (trained, held) in counted.items():
        least = (trained + held) // 5 if domain == "german" else 1
        assert trained >= 30 and least <= held <= (trained + held) // 5, name


@pytest.mark.parametrize("domain", RECIPES)
def test_files_and_columns_are_those_of_the_hub(domain: str, tmp_path: Path) -> None:
    specs = composed(f"recipe={RECIPES[domain]}").domain.specs
    assert all(layout_for(spec).columns != {"id": 0} for spec in specs), "a dataset is not known"
    for small in small_sources(specs, tmp_path):
        read = list(read_documents(small))
        assert len(read) >= 6, small.name
        # not its test split, nor a configuration with a longer name, nor a prompt
        assert all(text.startswith(f"{small.name} ") for text in read), small.name
    files = {str(path.relative_to(tmp_path / "datasets")) for path in tmp_path.rglob("*.*")}
    assert files >= FILES[domain]


def test_globs_fields_and_filters_are_those_of_the_source(tmp_path: Path) -> None:
    specs = [
        SourceSpec(name="cases", role="adaptation", kind="jsonl",
                   files=["/data/cases/**/*.jsonl.zst"], text_field="body.text",
                   filter='language == "de" and meta.quality > 0.5 and body.text != null'),
        SourceSpec(name="web", role="replay", kind="parquet", files=["../web/*.parquet"]),
        SourceSpec(name="notes", role="replay", kind="text", files=["notes/*.txt.gz"]),
    ]  # fmt: skip
    blocks = {name: sum(both) for name, both in made(specs, tmp_path).items()}
    assert blocks == {"cases": 48, "web": 72, "notes": 72}
    cases = tmp_path / "made/cases/data/cases"
    assert {*tmp_path.rglob("*.zst")} == {cases / f"part{n}/made{n}.jsonl.zst" for n in (0, 1)}


@pytest.mark.parametrize("keys", [("files",), ("path", "max_bytes")])
def test_the_reader_of_a_package_needs_no_cap_of_its_own(
    keys: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = SimpleNamespace(load=lambda: takes(*keys)(lambda spec: []))
    monkeypatch.setattr(parts, "registered", lambda: ({}, {"readers": {"own": reader}}))
    named = {"files": ["here.db"], "path": "here"}[keys[0]]
    spec = SourceSpec(name="rows", role="replay", kind="own", **{keys[0]: named})
    (small,) = small_sources([spec], tmp_path)
    assert (small.kind, small.files, small.path) == ("own", spec.files, spec.path)
    assert small.max_tokens == 72 * BLOCK_SIZE


@pytest.mark.parametrize(
    ("name", "eod"),
    [("Qwen/Qwen3.5-4B-Base", 256), ("nvidia/NVIDIA-Nemotron-Nano-12B-v2-Base", 2)],
)
def test_the_small_tokenizer_has_the_published_special_tokens(
    name: str, eod: int, tmp_path: Path
) -> None:
    tokens = special_tokens(name)
    write_tokenizer(tokens, tmp_path)
    small = load_tokenizer(str(tmp_path))
    assert small.eod_id == eod
    assert small.vocab_size <= 384
    encoded = [ids.tolist() for ids in small.encode_batch([*tokens.ids])]
    assert encoded == [[number] for number in tokens.small_ids().values()]
    text = "Größe § 433 «naïf»\n\t🙂"
    (ids,) = small.encode_batch([text])
    assert len(ids) == len(text.encode()) and small.decode(ids) == text
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"] == tokens.eos
