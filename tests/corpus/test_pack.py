"""Packing loses nothing but the counted rest and keeps the order, however it is called."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rod.corpus.pack import Packer, pack

EOD = 0
documents = st.lists(st.lists(st.integers(1, 99), max_size=30), max_size=20)


@given(documents, st.integers(2, 9))
def test_no_token_is_lost_but_the_rest(docs: list[list[int]], size: int) -> None:
    packer = Packer(size, EOD)
    blocks = packer.add(docs)
    stream = [token for document in docs for token in [*document, EOD]]
    assert [*blocks.ravel().tolist(), *packer.rest.tolist()] == stream
    assert (blocks.shape, blocks.dtype) == ((len(stream) // size, size), np.int32)
    assert [block.tolist() for block in pack(docs, size, EOD)] == blocks.tolist()


@given(documents, st.integers(2, 9), st.data())
def test_packing_goes_on_where_it_was(
    docs: list[list[int]], size: int, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(docs)))
    first = Packer(size, EOD)
    blocks = [first.add(docs[:cut])]
    second = Packer(size, EOD, rest=first.rest.tolist())
    blocks.append(second.add(docs[cut:]))
    whole = Packer(size, EOD)
    assert np.concatenate(blocks).tolist() == whole.add(docs).tolist()
    assert second.rest.tolist() == whole.rest.tolist()


def test_a_block_without_a_target_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size must be at least 2"):
        Packer(1, EOD)
