"""Packing loses nothing but the counted rest and keeps the order, however it is called."""

import pytest
from corpus_cases import manifest, run, web, write
from hypothesis import strategies as st

from nemo_rod.corpus import load_tokenizer
from nemo_rod.corpus.pack import Packer

EOD = 0
documents = st.lists(st.lists(st.integers(1, 99), max_size=30), max_size=20)


@pytest.mark.parametrize("document_holdout", [False, True])
@pytest.mark.parametrize(
    ("texts", "cap", "stream"),
    [  # | is the name of the EOD, whose id is 0
        (["ab|", "cd"], {}, b"ab\0cd\0"),
        (["ab||", "|cd"], {}, b"ab\0cd\0"),
        (["|", "ab", "||"], {}, b"ab\0"),
        (["a|b", "a||b|"], {}, b"a\0b\0a\0\0b\0"),
        (["abc|", "def"], {"max_tokens": 6}, b"abc\0de"),
        (["abc", "def"], {"max_tokens": 6}, b"abc\0de"),
        (["abc", "def"], {"max_tokens": 7}, b"abc\0def"),
        (["abc", "def", "ghi"], {"max_tokens": 8}, b"abc\0def\0"),
        (["abc", "d\U0001f642", "ghi"], {"max_tokens": 7}, b"abc\0d"),
        (["abc", "d\U0001f642", "ghi"], {"max_tokens": 9}, b"abc\0d" + "\U0001f642".encode()),
        (["abc", "def"], {"max_bytes": 5}, b"abc\0de"),
        (["abc", "def"], {"max_bytes": 6}, b"abc\0def\0"),
        (["abc", "dü"], {"max_bytes": 5}, b"abc\0d"),
    ],
)
def test_ends_are_those_of_the_documents(tmp_path, texts, cap, stream, document_holdout):
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


def test_a_block_without_a_target_is_refused():
    with pytest.raises(ValueError, match="block_size must be at least 2"):
        Packer(1, EOD)
