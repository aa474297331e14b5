"""From documents to blocks: the same files whatever happens on the way, or one clear sentence.

Packing loses nothing but the counted rest, and keeps the order.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from corpus_cases import S, interrupted, manifest, run, stop_at, texts, train_bpe, tree, web, write

from nemo_rod.corpus import BlockStore, SourceSpec, is_holdout, load_tokenizer
from nemo_rod.corpus.pack import pack


@pytest.fixture
def corpus(shared):
    return list(shared[0])


@pytest.fixture
def blocks(shared, tmp_path):
    """A copy of the corpus's store."""
    return shutil.copytree(shared[1], tmp_path / "blocks")


def all_tokens(store: BlockStore, name: str) -> np.ndarray[Any, np.dtype[np.int32]]:
    (source,) = (s for s in store.sources if s.name == name)
    return store.tokens(np.arange(source.start, source.start + source.count))


def read(spec: SourceSpec) -> list[str]:
    files = (Path(file).read_text("utf-8").splitlines() for file in spec.files)
    return [json.loads(line)["text"] for lines in files for line in lines]


def test_the_number_of_workers_changes_nothing(tmp_path, corpus, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr("nemo_rod.corpus.encode.BATCH_BYTES", 3000)
    tokenizer = load_tokenizer(str(train_bpe(tmp_path / "bpe", vocabulary=280)))
    for workers in (1, 2):
        run(tmp_path / str(workers), corpus, tokenizer=tokenizer, workers=workers)
    assert tree(tmp_path / "1") == tree(tmp_path / "2")
    packed = pack(tokenizer.encode_batch(read(corpus[1])), S, tokenizer.eod_id)
    expected = [block for block in packed if not is_holdout(block, fraction=0.1)]
    assert all_tokens(BlockStore(tmp_path / "1"), "new").tolist() == np.stack(expected).tolist()


@pytest.mark.parametrize("end", ["", "<|end|>", "<|end|><|end|>", "<|end|>\n", "<|end|>\n<|end|>"])
def test_documents_end_with_one_eod_whatever_their_texts_end_with(tmp_path, end):
    pytest.importorskip("transformers")
    tokenizer = load_tokenizer(str(train_bpe(tmp_path / "bpe", vocabulary=280)))
    texts = [f"the {number}" for number in range(400)]
    rows = [json.dumps({"text": text + end}) for text in texts]
    (file := tmp_path / "a").write_text("\n".join(rows))
    spec = SourceSpec(name="web", role="replay", kind="jsonl", files=[str(file)])
    run(tmp_path / "blocks", [spec], tokenizer=tokenizer)
    packed = pack(tokenizer.encode_batch(texts), S, tokenizer.eod_id)
    kept = np.stack([block for block in packed if not is_holdout(block, fraction=0.1)])
    assert all_tokens(BlockStore(tmp_path / "blocks"), "web").tolist() == kept.tolist()


def test_unfinished_work_for_other_settings_is_not_gone_on_with(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr("nemo_rod.corpus.encode.BATCH_BYTES", 3000)
    interrupted(tmp_path / "blocks", corpus, 5)
    assert (tmp_path / "blocks" / ".partial" / "replay-web" / "state.json").exists()
    run(tmp_path / "blocks", corpus, holdout_seed=1)
    run(tmp_path / "fresh", corpus, holdout_seed=1)
    assert tree(tmp_path / "blocks") == tree(tmp_path / "fresh")


def test_a_finished_store_is_not_touched(blocks, corpus):
    before = {path: path.stat().st_mtime_ns for path in blocks.rglob("*.bin")}
    run(blocks, corpus, progress=stop_at(1))  # which nothing calls
    assert before == {path: path.stat().st_mtime_ns for path in blocks.rglob("*.bin")}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 16}, "block_size was 32 and is now 16"),
        ({"holdout_seed": 43}, "holdout.seed was 42 and is now 43"),
        ({"holdout_fraction": 0.2}, "holdout.fraction was 0.1 and is now 0.2"),
    ],
)
def test_other_settings_are_refused_or_rebuilt(tmp_path, blocks, corpus, changes, message):
    before = tree(blocks)
    with pytest.raises(ValueError, match=f"made otherwise: {message}; .*rebuild=.prepare."):
        run(blocks, corpus, **changes)
    assert tree(blocks) == before
    run(blocks, corpus, **changes, rebuild=True)
    run(tmp_path / "fresh", corpus, **changes)
    assert tree(blocks) == tree(tmp_path / "fresh")


def test_changed_inputs_are_refused(tmp_path, blocks, corpus):
    files = [shutil.copy(file, tmp_path) for file in corpus[0].files]
    with Path(files[1]).open("a") as handle:
        handle.write('{"text": "more"}\n')
    longer = dataclasses.replace(corpus[0], files=files)
    sentence = r"web were made otherwise: size of 1.jsonl \(file 2\) was \d+"
    with pytest.raises(ValueError, match=sentence):
        run(blocks, [longer, *corpus[1:]])
    with pytest.raises(ValueError, match=r"new holds blocks of a source that domain.sources does"):
        run(blocks, corpus[2:])
    moved = dataclasses.replace(corpus[1], subsample=0.5)
    with pytest.raises(ValueError, match=r"reading.subsample was 1.0 and is now 0.5"):
        run(blocks, [corpus[3], moved, corpus[2], corpus[0]])
    assert len(run(blocks, corpus[2:], rebuild=True).sources) == 2


def test_moved_inputs_are_the_same_inputs(tmp_path):
    for number in range(2):
        write(tmp_path / "data" / f"{number}.jsonl", texts(60, number))
    run(tmp_path / "blocks", [web(tmp_path / "data" / "*.jsonl")])
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    run(tmp_path / "blocks", [web(tmp_path / "elsewhere" / "*.jsonl")])


@pytest.mark.parametrize(
    ("fields", "changes", "message"),
    [
        ({"text_field": "body"}, {}, r"a.jsonl:1: no field 'body' \(found: text\)"),
        ({"filter": "text == x"}, {}, "replay source a has no document"),
        ({}, {"block_size": 10**6}, r"replay source a has \d+ tokens, fewer than one block of"),
        ({"files": ["nowhere/*"]}, {}, "source a: no file matches 'nowhere/"),
        ({}, {"holdout_fraction": 1.0}, r"a has \d+ blocks and all of them are held out"),
        ({}, {"holdout_floor": 0, "holdout_fraction": 1e-9},
         r"a has \d+ blocks and none of them is "),
        ({"max_tokens": 2 * S - 1}, {}, "a has 1 block of 32, expected 2 or more, to train on one"),
        ({}, {"block_size": 1}, "block_size must be at least 2"),
        ({}, {"holdout_fraction": 2.0}, "holdout_fraction must lie between 0 and 1"),
        ({}, {"workers": 0}, "workers must be at least 1"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_sentence_and_leaves_nothing(tmp_path, fields, changes, message):
    file = write(tmp_path / "a.jsonl", texts(50, 1))
    spec = SourceSpec(
        **{"name": "a", "role": "replay", "kind": "jsonl", "files": [str(file)], **fields}
    )
    with pytest.raises(ValueError, match=message) as error:
        run(tmp_path / "blocks", [spec], **changes)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "blocks").exists()


def test_sources_without_a_holdout_are_fine_when_asked_for(tmp_path):
    spec = web(write(tmp_path / "a.jsonl", texts(50, 1)))
    store = run(tmp_path / "blocks", [spec], holdout_fraction=0.0)
    held = BlockStore(tmp_path / "blocks", "holdout")
    assert len(store) > 0 and len(held) == 0 and held.sources[0].count == 0
    held.verify()
    assert held.tokens([]).shape == (0, S) and held.hashes([]).shape == (0, 16)


def test_names_must_differ(tmp_path, corpus):
    twice = dataclasses.replace(corpus[1], role="replay")
    with pytest.raises(ValueError, match=r"domain.sources names 'new' twice"):
        run(tmp_path / "blocks", [*corpus, twice])
    with pytest.raises(ValueError, match=r"domain.sources is empty: name at"):
        run(tmp_path / "blocks", [])


def test_a_source_that_fails_leaves_the_finished_ones(tmp_path, shared, corpus):
    wrong = dataclasses.replace(corpus[1], text_field="body")
    with pytest.raises(ValueError, match="no field 'body'"):
        run(tmp_path / "blocks", [corpus[0], wrong])
    assert {path.rsplit("/", 1)[0] for path in tree(tmp_path / "blocks")} == {
        "replay/web", "replay/web/holdout"
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"no complete block store in .* \(no store.json\)"):
        BlockStore(tmp_path / "blocks")
    run(tmp_path / "blocks", corpus)
    assert tree(tmp_path / "blocks") == tree(shared[1])


def test_one_run_at_a_time_prepares_a_folder(tmp_path, corpus):
    def meanwhile(done: int, total: int | None, what: str) -> None:
        with pytest.raises(ValueError, match="another run is preparing"):
            run(tmp_path / "blocks", corpus)

    run(tmp_path / "blocks", corpus, progress=meanwhile)


def test_progress_has_labels_and_totals(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr("nemo_rod.corpus.encode.BATCH_BYTES", 3000)
    reports: dict[str, list[tuple[int, int | None]]] = {}

    def report(done: int, total: int | None, label: str) -> None:
        reports.setdefault(label, []).append((done, total))

    run(tmp_path / "blocks", corpus, progress=report)
    assert {"replay/web", "adaptation/new", "replay/twice"} < set(reports)
    steps = reports["replay/web"]
    total = sum(Path(file).stat().st_size for file in corpus[0].files)
    assert steps == sorted(steps) and steps[-1] == (total, total) and len(steps) > 5


class Hub:
    """The hub, with one dataset, whose branch is moved; its file has an address, as there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        import datasets
        import fsspec
        import huggingface_hub

        self.commit, self.read = "a" * 40, set[str | None]()
        open_dataset, address = datasets.load_dataset_builder, f"memory:/{folder}/train.jsonl"
        file = write(folder / "train.jsonl", texts(200, 7))
        fsspec.filesystem("memory").put_file(file, address)

        def opened(path: str, name: str | None = None, revision: str | None = None) -> Any:
            assert path == "org/data"
            self.read.add(revision)
            return open_dataset("json", data_files={"train": address})

        def asked(_: Any, path: str, **options: Any) -> SimpleNamespace:
            return SimpleNamespace(sha=self.commit)

        monkeypatch.setattr(datasets, "load_dataset_builder", opened)
        monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", asked)


def test_a_hub_dataset_is_read_at_one_commit_which_is_recorded(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    hub = Hub(monkeypatch, tmp_path / "data")
    spec = SourceSpec(name="web", role="replay", kind="huggingface", path="org/data")

    interrupted(tmp_path / "blocks", [spec], 1)
    hub.commit = "b" * 40
    run(tmp_path / "blocks", [spec])
    told = manifest(tmp_path / "blocks")
    assert told["commit"] == "a" * 40 and hub.read == {"a" * 40}
    assert told["reading"]["revision"] is None
    run(tmp_path / "blocks", [spec])  # it is there: a branch that moved is no other source


@pytest.mark.parametrize("document_holdout", [False, True])
@pytest.mark.parametrize(
    ("texts", "cap", "stream", "documents"),
    [  # | is the name of the EOD, whose id is 0
        (["ab|", "cd"], {}, b"ab\0cd\0", 2),
        (["ab||", "|cd"], {}, b"ab\0cd\0", 2),
        (["|", "ab", "||"], {}, b"ab\0", 1),
        (["\0", "abc", "\0\0", "ü", "\0"], {}, b"abc\0\xc3\xbc\0", 2),
        (["a|b", "a||b|"], {}, b"a\0b\0a\0\0b\0", 2),
        ([" |a", "\n| |b|", "a|" + "\n" * 40, " |"], {}, b"a\0b\0a\0 \0", 4),
        (["abc|", "def"], {"max_tokens": 6}, b"abc\0de", 2),
        (["abc", "def"], {"max_tokens": 6}, b"abc\0de", 2),
        (["abc", "def"], {"max_tokens": 7}, b"abc\0def", 2),
        (["abc", "def", "ghi"], {"max_tokens": 8}, b"abc\0def\0", 2),
        (["abc", "d\U0001f642", "ghi"], {"max_tokens": 7}, b"abc\0d", 2),
        (["abc", "d\U0001f642", "ghi"], {"max_tokens": 9}, b"abc\0d" + "\U0001f642".encode(), 2),
        # half a character, of which nothing is left, is no document
        (["abc", "def", "ü", "ghi"], {"max_tokens": 9}, b"abc\0def\0", 2),
        (["abc", "def", "ü", "ghi"], {"max_tokens": 10}, b"abc\0def\0\xc3\xbc", 3),
        (["abc", "def", "ü", "ghi"], {"max_bytes": 6}, b"abc\0def\0", 2),
        (["abc", "def", "ü", "ghi"], {"max_bytes": 7}, b"abc\0def\0", 2),
        (["abc", "def", "ü", "ghi"], {"max_bytes": 8}, b"abc\0def\0\xc3\xbc\0", 3),
        (["abc", "def"], {"max_bytes": 5}, b"abc\0de", 2),
        (["abc", "dü"], {"max_bytes": 5}, b"abc\0d", 2),
    ],
)
def test_ends_are_those_of_the_documents(tmp_path, texts, cap, stream, documents, document_holdout):
    load_tokenizer("byte").save_pretrained(tmp_path / "tokenizer")
    named = load_tokenizer(str(tmp_path / "tokenizer"))
    file = write(tmp_path / "a.jsonl", [text.replace("|", str(named.token(0))) for text in texts])
    spec = web(file, document_holdout=document_holdout, **cap)
    whole = len(stream) // 2 * 2
    options = {"block_size": 2, "holdout_fraction": 0, "holdout_floor": 0, "tokenizer": named}
    store = run(tmp_path / "blocks", [spec], **options)
    assert bytes(store.tokens(range(len(store))).ravel().tolist()) == stream[:whole]
    told = manifest(tmp_path / "blocks")
    assert (told["tokens"], told["dropped_tokens"]) == (len(stream), len(stream) - whole)
    assert told["documents"] == documents
