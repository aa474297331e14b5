"""Another tokenizer for the same blocks: names of special tokens may differ, nothing else."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from corpus_cases import run, source, texts, train_bpe, write

from nemo_rod.corpus import BlockStore, load_tokenizer
from nemo_rod.run.renamed_tokens import check_renamed

pytest.importorskip("transformers")
NAMES = ["</s>", "<SPECIAL_10>", "<SPECIAL_11>"]
Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return train_bpe(tmp_path_factory.mktemp("original"), vocabulary=300, special=NAMES)


def copied(original: Path, folder: Path, change: Change) -> Path:
    shutil.copytree(original, folder)
    file = folder / "tokenizer.json"
    described = json.loads(file.read_text())
    change(described)
    file.write_text(json.dumps(described))
    return folder


def rename(old: str, new: str) -> Change:
    def change(described: dict[str, Any]) -> None:
        vocabulary = described["model"]["vocab"]
        vocabulary[new] = vocabulary.pop(old)
        for token in described["added_tokens"]:
            token["content"] = new if token["content"] == old else token["content"]

    return change


@pytest.fixture(scope="module")
def plain(original, tmp_path_factory):
    """Blocks without special tokens but those that end documents."""
    return store(tmp_path_factory.mktemp("plain") / "blocks", original)


def store(folder: Path, tokenizer: Path, more: str = "") -> BlockStore:
    lines = [text + more for text in texts(60, 1)]
    return run(
        folder,
        [
            source("web", [write(folder.parent / "web.jsonl", lines)]),
            source("new", [write(folder.parent / "new.jsonl", texts(60, 2))], role="adaptation"),
        ],
        tokenizer=load_tokenizer(str(tokenizer)),
    )


def test_other_names_of_special_tokens_are_no_difference(original, tmp_path):
    blocks = store(tmp_path / "blocks", original, " <|im_end|>")
    made_by = load_tokenizer(str(original))
    chat = copied(original, tmp_path / "chat", rename("<SPECIAL_11>", "<|im_end|>"))
    with pytest.raises(ValueError, match="made by a different tokenizer"):
        blocks.check_tokenizer(load_tokenizer(str(chat)))
    tools = copied(chat, tmp_path / "tools", rename("<SPECIAL_10>", "<tool>"))
    for folder in (chat, tools):
        check_renamed(blocks, made_by, load_tokenizer(str(folder)))
    check_renamed(blocks, made_by, made_by)


def test_a_block_with_a_renamed_token_is_found(original, tmp_path):
    blocks = store(tmp_path / "blocks", original, " <SPECIAL_11>")
    other = copied(original, tmp_path / "other", rename("<SPECIAL_11>", "<|im_end|>"))
    with pytest.raises(ValueError) as refusal:
        check_renamed(blocks, load_tokenizer(str(original)), load_tokenizer(str(other)))
    first = next(i for i in range(len(blocks)) if (blocks.tokens([i]) == 2).any())
    refused = str(refusal.value)
    assert f"block {first} of the train split of " in refused
    assert "holds token 2, which was '<SPECIAL_11>' and is '<|im_end|>' to the" in refused


def drop_last_merge(described: dict[str, Any]) -> None:
    described["model"]["merges"].pop()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (drop_last_merge, r"the text .* is \[.*\] to the tokenizer of the blocks and \[.*\] to"),
        (rename("q", "Ġqq"), r"token \d+ is 'q' to .* and 'Ġqq' to the model's, and it is not a"),
        (rename("</s>", "<|im_end|>"), r"holds token 0, which was '</s>' and is '<\|im_end\|>' to"),
    ],
)
def test_every_other_difference_is_refused(change, sentence, plain, original, tmp_path):
    other = copied(original, tmp_path / "other", change)
    with pytest.raises(ValueError, match=sentence):
        check_renamed(plain, load_tokenizer(str(original)), load_tokenizer(str(other), eod=0))


def test_both_end_documents_with_a_token(plain, original, tmp_path):
    other = load_tokenizer(str(original), eod=1)
    with pytest.raises(ValueError, match=r"end documents with token 0, .* set domain\.eod to 0"):
        check_renamed(plain, load_tokenizer(str(original)), other)
    foreign = load_tokenizer(str(train_bpe(tmp_path / "foreign", vocabulary=280)))
    with pytest.raises(ValueError, match="made by a different tokenizer"):
        check_renamed(plain, foreign, other)
