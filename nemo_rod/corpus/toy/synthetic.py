"""Made-up text: Markov chains over printable characters, the toy corpus that needs nothing at all.

A source of kind ``synthetic`` names its generators in `files`: ``markov:3`` is chain number 3, and
``dialect:3:0.25`` the same chain with a quarter of its states given other successors. An adaptation
source that is a dialect of a replay source overwrites what the base model knew of that one, and
leaves the other chains alone: what is forgotten, and what replay brings back, differs from source
to source.

Everything is drawn from the raw 64-bit stream of a bit generator, the only stream that numpy
promises to keep, by integer arithmetic.

Shape suffixes: V = states (a chain's letters), T = slots of a row of the transition table,
D = documents.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from nemo_rod.corpus.formats import TextList

ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127))
NUM_LETTERS = 48  # that a chain uses, of the alphabet
DOCUMENT_LENGTH = 512  # characters
NUM_DOCUMENTS = 8192  # of a generator; a source's caps take what they want
_BATCH = 256
# How often a state's successors follow it, in 64ths. Chains differ in how much there is to learn.
_PROFILES = (
    (40, 12, 6, 3, 2, 1),
    (24, 16, 8, 6, 4, 2, 2, 1, 1),
    (16, 12, 8, 8, 6, 4, 4, 2, 2, 1, 1),
)


def synthetic_input(generator: str) -> TextList:
    """Documents of one generator, as an input.

    Args:
        generator: ``markov:<number>`` or ``dialect:<number>:<share>``.

    Raises:
        ValueError: When it is neither.
    """
    match = re.fullmatch(r"markov:(\d{1,6})|dialect:(\d{1,6}):(0?\.\d+|[01](?:\.0*)?)", generator)
    if match is None:
        raise ValueError(
            f"synthetic generator {generator!r} is unknown: "
            "write markov:<number> or dialect:<number>:<share>, such as dialect:3:0.25"
        )
    if match[1] is not None:
        chain, share = int(match[1]), 0.0
    else:
        chain, share = int(match[2]), float(match[3])
    return TextList(generator, None, lambda: synthetic_documents(chain, dialect=share))


def synthetic_documents(chain: int, *, dialect: float = 0.0) -> Iterator[str]:
    """Documents of a Markov chain.

    Args:
        chain: Number of the chain, which decides its letters and its transition table.
        dialect: Share of the letters whose successors are others than the chain's.

    Yields:
        Texts of `DOCUMENT_LENGTH` characters, the same on every machine.
    """
    letters, table_VT = _letters(chain), _transitions(chain, dialect)
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


def _letters(chain: int) -> NDArray[np.uint8]:
    """The characters of a chain, uint8 [V]: chains share some, as languages do."""
    order = np.argsort(np.random.Philox(key=_key("letters", chain, 0)).random_raw(len(ALPHABET)))
    return np.frombuffer(ALPHABET.encode("ascii"), dtype=np.uint8)[order[:NUM_LETTERS]]


def _transitions(chain: int, dialect: float) -> NDArray[np.uint64]:
    """Next states [V, T]: a slot is drawn evenly, so a state in many slots is a likely one."""
    table = _table(chain, "chain")
    order = np.argsort(np.random.Philox(key=_key("order", chain, 0)).random_raw(NUM_LETTERS))
    changed = order[: round(dialect * NUM_LETTERS)]
    table[changed] = _table(chain, "dialect")[changed]
    return table


def _table(chain: int, purpose: str) -> NDArray[np.uint64]:
    profile = _PROFILES[chain % len(_PROFILES)]
    raw = np.random.Philox(key=_key(purpose, chain, 0)).random_raw((NUM_LETTERS, NUM_LETTERS))
    successors = np.argsort(raw, axis=1)[:, : len(profile)].astype(np.uint64)
    return np.repeat(successors, profile, axis=1)


def _key(purpose: str, chain: int, variant: int) -> int:
    return int.from_bytes(purpose.encode()[:8].ljust(8), "little") << 64 | chain << 32 | variant
