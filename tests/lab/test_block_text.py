"""Blocks as text: what was written, ends of documents, and whose tokenizer and store it is."""

from pathlib import Path

import pytest

from nemo_rod.corpus import BlockStore, SourceSpec, load_tokenizer, prepare
from nemo_rod.lab.block_text import END_OF_DOCUMENT, block_text, block_texts, find_tokenizer


@pytest.fixture
def store(tmp_path: Path) -> BlockStore:
    """Two documents of 21 and 42 bytes: four blocks of 16 bytes with an end in the second."""
    (tmp_path / "a.txt").write_text("The first of the two.")
    (tmp_path / "b.txt").write_text("And the second, which is twice as long, is")
    spec = SourceSpec(
        name="both", role="replay", kind="text",
        files=[str(tmp_path / "a.txt"), str(tmp_path / "b.txt")],
    )  # fmt: skip
    prepare(
        tmp_path / "blocks", [spec], tokenizer=load_tokenizer("byte"), block_size=16,
        holdout_fraction=0.0, holdout_seed=42,
    )  # fmt: skip
    return BlockStore(tmp_path / "blocks")


def test_blocks_read_as_the_documents_did(store: BlockStore) -> None:
    tokenizer = find_tokenizer(store)
    texts = [block_text(store, tokenizer, number) for number in range(len(store))]
    whole = "".join(texts).split(END_OF_DOCUMENT)
    assert whole[0] == "The first of the two."
    assert "And the second, which is twice as long, is".startswith(whole[1])
    assert block_text(store, tokenizer, 0, length=3) == "The"


def test_a_report_has_texts_of_the_store_of_its_curriculum_alone(store: BlockStore) -> None:
    blocks = Path(store.root)
    assert block_texts(blocks, store.digest, [0]) == ["The first of the"]
    with pytest.raises(ValueError, match="is not the store that the curriculum was recorded with"):
        block_texts(blocks, "another", [0])
    with pytest.raises(ValueError):
        block_texts(blocks.parent / "nowhere", store.digest, [0])
