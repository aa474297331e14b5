"""Replay that the base writes: the same text after any interruption, and a rule for drops."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_line import composed
from tiny import ARCHITECTURE

from nemo_rod.corpus import SourceSpec, load_tokenizer, prepare
from nemo_rod.lab.generated.reader import Sampler, Sampling, read_generated
from nemo_rod.lab.smollm2 import known_texts
from nemo_rod.lab.smollm2.package_model import write_model
from nemo_rod.run.base_model import initialise_base


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("model")
    initialise_base(ARCHITECTURE, folder, tokenizer="byte", seed=1)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def source(model: Path, *, options: dict[str, Any] | None = None, **keys: Any) -> SourceSpec:
    given = {"max_tokens": 2_000, **keys}
    return SourceSpec(
        name="own", role="replay", kind="generated", path=str(model),
        options={"batch": 4, "seed": 3, **(options or {})}, **given,
    )  # fmt: skip


def some(spec: SourceSpec, number: int) -> list[str]:
    texts = read_generated(spec)[0].records(None)
    return [str(next(texts)) for _ in range(number)]


def test_an_interrupted_source_goes_on_with_the_same_text(model: Path, cache: Path) -> None:
    whole = some(source(model), 12)
    batches = sorted(cache.rglob("0*.json"))
    assert len(batches) >= 2
    kept = batches[0].read_bytes()
    for file in batches[1:]:
        file.unlink()
    assert some(source(model), 12) == whole
    assert batches[0].read_bytes() == kept
    assert some(source(model, options={"seed": 4}), 12) != whole
    assert some(source(model, options={"temperature": 0.5}), 12) != whole
    about = json.loads((batches[0].parent / "generated.json").read_text())
    assert about["model"] == str(model) and about["seed"] == 3 and about["temperature"] == 1.0
    dropped = sum(about.get(why, 0) for why in ("short", "loops", "far_from_own_loss"))
    assert about["sampled"] == about["kept"] + dropped


def test_it_is_a_source_of_a_store(model: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.txt"
    new.write_text("something new " * 200)
    sources = [
        SourceSpec(name="new", role="adaptation", kind="text", files=[str(new)]), source(model),
    ]  # fmt: skip
    store = prepare(
        tmp_path / "blocks", sources, tokenizer=load_tokenizer(str(model)), block_size=32,
        holdout_fraction=0.1,
    )  # fmt: skip
    read = (tmp_path / "cache").rglob("0*.json")
    assert len(list(read)) <= 2_200 // (4 * 50)  # no further than needed
    own = next(item for item in store.sources if item.name == "own")
    assert own.role == "replay" and 50 <= own.count <= 2_000 // 32


def test_it_goes_on_from_given_texts(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": t * 9}) + "\n" for t in ("Once upon", "a", "It")))
    spec = source(model, files=[str(file)], options={"first": 9})
    sampler = Sampler(spec, Sampling(first=9), model)
    assert [bytes(start) for start in sampler.starts] == [b"Once upon", b"a" * 9, b"ItItItItI"]
    texts = some(spec, 3)
    assert any(text.startswith(("Once upon", "a" * 9, "ItItItItI")) for text in texts)


def test_short_documents_loops_and_strange_ones_are_dropped(model: Path) -> None:
    sampler = Sampler(source(model), Sampling(first=1), model)
    good = list(range(65, 95))
    rows = [
        (good, 2.0), (good[:15], 2.0), ([65, 66] * 15, 2.0), (good[::-1], 0.5), (good[1:], 9.0),
        (good[::-1], 2.0), (good, 2.0), (good, 2.0), (good, 2.0),
    ]  # fmt: skip
    kept = sampler.keep([[0, *ids] for ids, _ in rows], [[loss] * len(ids) for ids, loss in rows])
    assert kept["counts"] == {
        "sampled": 9, "short": 1, "loops": 1, "far_from_own_loss": 2, "kept": 5, "tokens": 150,
    }  # fmt: skip
    assert kept["texts"][:2] == [bytes(good).decode(), bytes(good[::-1]).decode()]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"max_tokens": None}, "own has no end.*set max_tokens"),
        ({"dedup": True}, r"own\.dedup=true"),
        ({"options": {"heat": 1}}, r"options has the unknown key 'heat': expected some of batch"),
        ({"options": {"temperature": 0.0}}, r"options\.temperature=0\.0"),
        ({"options": {"seed": 1.5}}, r"options\.seed=1\.5 is not valid: expected a number"),
        ({"options": {"temperature": "hot"}}, r"options\.temperature='hot' is not valid"),
        ({"options": {"tokens": 65}}, r"options\.tokens=65 is longer than the context of .*, 64"),
    ],
)
def test_what_cannot_be_sampled_is_refused(model: Path, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        some(source(model, **keys), 1)


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no \*\.safetensors"):
        some(source(tmp_path / "empty"), 1)


def test_a_source_is_known_that_gains_little(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_texts, "STEPS", 3)
    sources = ["dialect", "chain_0", "chain_1", "chain_2"]
    rows = zip(sources, ["adaptation", *["replay"] * 3], [1.0, 0.25, 0.26], strict=False)
    file = tmp_path / "known_texts.json"
    file.write_text(json.dumps({name: {"role": role, "gain": gain} for name, role, gain in rows}))
    config = composed("recipe=toy_synthetic")
    kept = [spec for spec in config.domain.specs if spec.name in sources]
    domain = SimpleNamespace(specs=kept, tokenizer="byte", eod=None)
    few = SimpleNamespace(run_dir=tmp_path, domain=domain, train=config.train, recipe="few")
    few.model = SimpleNamespace(hf=model)
    known_texts.measure(few)  # type: ignore[arg-type]
    found = json.loads(file.read_text())
    assert list(found) == sources and found["dialect"]["gain"] == 1.0
    assert [found[name]["known"] for name in sources[:3]] == [False, True, False]
    assert found["chain_2"]["steps"] == 3 and found["chain_2"]["gain"] > 0
    few.model = SimpleNamespace(hf=None)
    with pytest.raises(ValueError, match=r"model\.hf is null: few trains its own base"):
        known_texts.measure(few)  # type: ignore[arg-type]


def test_the_model_of_the_package_needs_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_rod.lab.smollm2 import package_model

    monkeypatch.setattr(package_model, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"run `make demo-llm`"):
        write_model(tmp_path / "model")
    write_model(tmp_path)  # is there, and stays
