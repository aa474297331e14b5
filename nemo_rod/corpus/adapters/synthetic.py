"""Synthetic text: Markov chains over printable characters, a toy corpus without any downloads.

A source of kind ``synthetic`` names its generators in `files`: ``markov:3`` is chain number 3, and
``dialect:3:0.25`` the same chain with different successors for a quarter of its states. An
adaptation source that is a dialect of a replay source overwrites what the base model knew about
that source and leaves the other chains alone: forgetting and the effect of replay thus differ
between sources.

Everything is drawn, with integer arithmetic, from the raw 64-bit stream of a bit generator, the
only stream that numpy guarantees to keep stable.

Shape suffixes: V = states (a chain's letters), T = slots of a row of the transition table,
D = documents.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from nemo_rod.corpus.adapters.text_list import TextList
from nemo_rod.corpus.formats import Input
from nemo_rod.corpus.sources import SourceSpec, takes

ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127))
NUM_LETTERS = 48  # size of a chain's alphabet
DOCUMENT_LENGTH = 512  # characters
NUM_DOCUMENTS = 8192  # per generator; a source's caps may take fewer
_BATCH = 256
# Probabilities of a state's successors, in 64ths. Chains differ in how much there is to learn.
_PROFILES = (
    (40, 12, 6, 3, 2, 1),
    (24, 16, 8, 6, 4, 2, 2, 1, 1),
    (16, 12, 8, 8, 6, 4, 4, 2, 2, 1, 1),
)


@takes("files", "max_bytes")
def read_generators(spec: SourceSpec) -> list[Input]:
    """Returns the generators of a source of kind ``synthetic``, one input each."""
    return [synthetic_input(generator) for generator in spec.files]


def synthetic_input(generator: str) -> TextList:
    """Returns the documents of one generator as an input.

    Raises:
        ValueError: it is neither ``markov:<number>`` nor ``dialect:<number>:<share>``.
    """
    match = re.fullmatch(r"markov:(\d{1,6})|dialect:(\d{1,6}):(0?\.\d+|[01](?:\.0*)?)", generator)
    if match is None:
        raise ValueError(
            f"synthetic generator {generator!r} is unknown: "
            "write markov:<number> or dialect:<number>:<share>, such as dialect:3:0.25"
        )
    chain, share = int(match[1] or match[2]), float(match[3] or 0)
    return TextList(generator, None, lambda: synthetic_documents(chain, dialect=share))


def synthetic_documents(chain: int, *, dialect: float = 0.0) -> Iterator[str]:
    """Generates the documents of a Markov chain.

    A dialect has other successors for that share of the letters.

    Yields:
        Texts of `DOCUMENT_LENGTH` characters, the same on every machine.
    """
    # chains share some characters, as languages do
    order = np.argsort(np.random.Philox(key=_key("letters", chain, 0)).random_raw(len(ALPHABET)))
    letters = np.frombuffer(ALPHABET.encode("ascii"), dtype=np.uint8)[order[:NUM_LETTERS]]
    table_VT = _table(chain, "chain")
    order = np.argsort(np.random.Philox(key=_key("order", chain, 0)).random_raw(NUM_LETTERS))
    changed = order[: round(dialect * NUM_LETTERS)]
    table_VT[changed] = _table(chain, "dialect")[changed]
    raw = np.random.Philox(key=_key("text", chain, round(dialect * 10**6)))
    for _ in range(0, NUM_DOCUMENTS, _BATCH):
        state_D = raw.random_raw(_BATCH) % np.uint64(NUM_LETTERS)
        text = np.empty((_BATCH, DOCUMENT_LENGTH), dtype=np.uint8)
        for position in range(DOCUMENT_LENGTH):
            text[:, position] = letters[state_D]
            slot_D = raw.random_raw(_BATCH) % np.uint64(table_VT.shape[1])
            state_D = table_VT[state_D, slot_D]
        for row in text:
            yield row.tobytes().decode("ascii")


def _table(chain: int, purpose: str) -> NDArray[np.uint64]:
    """Returns the next states [V, T]; a state's probability is its share of a row's slots."""
    profile = _PROFILES[chain % len(_PROFILES)]
    raw = np.random.Philox(key=_key(purpose, chain, 0)).random_raw((NUM_LETTERS, NUM_LETTERS))
    successors = np.argsort(raw, axis=1)[:, : len(profile)].astype(np.uint64)
    return np.repeat(successors, profile, axis=1)


def _key(purpose: str, chain: int, variant: int) -> int:
    return int.from_bytes(purpose.encode()[:8].ljust(8), "little") << 64 | chain << 32 | variant
