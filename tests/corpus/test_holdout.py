"""Which blocks are held out: the rule, written once more over all blocks of made stores."""

import hashlib
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest
from corpus_cases import manifest, run, source, tree, write

from nemo_rod.corpus import BlockStore, SourceSpec

LENGTH = 8  # tokens of a block: those of a text and the end of the document
Texts = Mapping[str, Sequence[str]]


def specs(folder: Path, sources: Texts, **fields: bool) -> list[SourceSpec]:
    """Sources whose documents are a block each; those with a capital letter are adaptation."""
    return [
        source(name, [write(folder / f"{name}.jsonl", blocks)],
               role="adaptation" if name.isupper() else "replay", **fields)
        for name, blocks in sources.items()
    ]  # fmt: skip


def sides(root: Path) -> tuple[dict[str, Counter[str]], dict[str, Counter[str]]]:
    """The blocks of every source, trained on and held out."""
    both: tuple[dict[str, Counter[str]], dict[str, Counter[str]]] = {}, {}
    for split, blocks in zip(("train", "holdout"), both, strict=True):
        store = BlockStore(root, split)
        store.verify()
        for s in store.sources:
            rows = store.tokens(range(s.start, s.start + s.count))
            blocks[s.name] = Counter(bytes(row[:-1].tolist()).decode() for row in rows)
    return both


def value(text: str) -> int:
    data = b"".join(byte.to_bytes(4, "little") for byte in (*text.encode(), 0))
    salt = (42).to_bytes(16, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, salt=salt).digest(), "little")


def by_hand(sources: Texts, *, fraction: float, floor: int | None) -> set[str] | None:
    """The texts that are held out, in all sources alike; None if a source is refused."""
    floor = int(fraction > 0) if floor is None else floor
    counts = {name: Counter(texts) for name, texts in sources.items()}
    every = {text for texts in sources.values() for text in texts}
    held = {text for text in every if value(text) < fraction * 2.0**64}

    def number(name: str, texts: Iterable[str]) -> int:
        return sum(counts[name][text] for text in texts)

    for name in sorted(sources, key=lambda name: (len(sources[name]), name)):
        fifth = max(1, len(sources[name]) // 5)
        for text in sorted(counts[name], key=lambda text: value(text)):
            if number(name, held) >= min(floor, fifth):
                break
            with_it = held | {text}
            if all(
                number(other, with_it) <= max(1, len(texts) // 5) and len(texts) > 1
                for other, texts in sources.items()
                if text in texts
            ):
                held = with_it
    for name, texts in sources.items():
        least = int(floor > 0 or fraction > 0)
        if not least <= number(name, held) < len(texts):
            return None
    return held


def made_store(dice: random.Random) -> Texts:
    """Sources of two blocks to eighty, with repeated ones, within a source and between sources."""
    shared = [f"{dice.randrange(10**7):07d}" for _ in range(dice.randint(1, 30))]
    sources = {}
    for name in dice.sample(["A", "B", "c", "d", "e"], dice.randint(1, 4)):
        own = [f"{name}{dice.randrange(10**6):06d}" for _ in range(dice.randint(0, 40))]
        often = dice.choices(own + shared, k=dice.randint(1, 3)) * dice.choice([0, 0, 1, 20])
        blocks = own + dice.choices(shared, k=dice.randint(0, 30)) + often
        blocks += [dice.choice(shared), f"{name}{dice.randrange(10**6):06d}"]
        dice.shuffle(blocks)
        sources[name] = blocks
    return sources


@pytest.mark.parametrize(
    "stores", [range(30), pytest.param(range(30, 210), marks=pytest.mark.slow)]
)
def test_the_holdout_is_what_the_rule_gives_by_hand(stores, tmp_path, monkeypatch):
    monkeypatch.setattr("nemo_rod.corpus.resplit._BYTES_AT_ONCE", 200)  # 6 blocks
    monkeypatch.setattr("nemo_rod.corpus.resplit._HASHES_AT_ONCE", 10)
    seen = Counter[str]()
    for number in stores:
        dice = random.Random(number)
        sources = made_store(dice)
        fraction, floor = dice.choice([0, 0.01, 0.05, 0.2]), dice.choice([None, 1, 2, 5, 1000])
        expected = by_hand(sources, fraction=fraction, floor=floor)
        corpus = specs(tmp_path / str(number), sources)
        options = {"block_size": LENGTH, "holdout_fraction": fraction, "holdout_floor": floor,
                   "blocks_per_shard": dice.choice([9, 1000])}  # fmt: skip
        root = tmp_path / f"{number}.blocks"
        if expected is None:
            with pytest.raises(ValueError, match=r"\w has \d+ blocks and (none|all) of them"):
                run(root, corpus, **options)
            seen["refused"] += 1
            continue
        run(root, corpus, **options)
        train, held = sides(root)
        for name, blocks in sources.items():
            assert held[name] == Counter(b for b in blocks if b in expected), (number, name)
            assert train[name] == Counter(b for b in blocks if b not in expected), (number, name)
            seen["beyond the threshold"] += any(value(b) >= fraction * 2.0**64 for b in held[name])
    assert seen["beyond the threshold"] > len(stores) > 3 * seen["refused"], seen


@pytest.mark.parametrize("stores", [8, pytest.param(60, marks=pytest.mark.slow)])
def test_whole_documents_and_blocks_agree_on_what_is_held_out(stores, tmp_path):
    moved = 0
    for number in range(stores):
        dice = random.Random(number)
        texts = ["".join(dice.choices("ab", k=dice.randint(1, 7))) for _ in range(200)]
        corpus = [
            *specs(tmp_path / str(number), {"A": texts, "b": texts[50:] + texts[:20]}),
            *specs(tmp_path / str(number), {"c": texts[::-1]}, document_holdout=True),
        ]
        root = tmp_path / f"{number}.b"
        run(root, corpus, block_size=4, holdout_fraction=0.02)
        train, held = (BlockStore(root, split) for split in ("train", "holdout"))
        rows = [{row.tobytes() for row in s.tokens(range(len(s)))} for s in (train, held)]
        assert not rows[0] & rows[1] and all(s.count for s in (*train.sources, *held.sources))
        moved += "raised" in manifest(root, "replay/c")
    assert moved > stores // 2


def test_another_source_changes_what_is_moved(tmp_path):
    """Its blocks, of which a fifth may be held out, keep others from being moved with them."""
    blocks = sorted((f"{i:07d}" for i in range(40)), key=value)
    first = specs(tmp_path, {"A": blocks[20:], "b": blocks[:20]})
    more = {"c": [*blocks[:4] * 2, "another"]}
    both = [*first, *specs(tmp_path, more)]
    options = {"block_size": LENGTH, "holdout_fraction": 0.0, "holdout_floor": 2}
    run(tmp_path / "one", first, **options)
    assert set(sides(tmp_path / "one")[1]["b"]) == set(blocks[:2])
    with pytest.raises(ValueError, match=r"b holds out other blocks .* set rebuild=\[prepare\]"):
        run(tmp_path / "one", both, **options)
    run(tmp_path / "one", both, rebuild=True, **options)
    run(tmp_path / "new", both, **options)
    assert tree(tmp_path / "one") == tree(tmp_path / "new")
    held = sides(tmp_path / "one")[1]
    assert (set(held["c"]), set(held["b"])) == ({"another"}, set(blocks[4:6]))
