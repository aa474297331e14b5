"""Plain PyTorch chooses what the Megatron road chooses, in one process, under DDP and FSDP2."""

import copy
import json
import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from places import ROOT, WORKERS
from tiny import STEPS, Setting, metric
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import nemo_rod
from nemo_rod.corpus.store import BlockStore
from nemo_rod.files import read_json, read_lines
from nemo_rod.hosts.plain_torch import RoDBatches, TorchScorer, write_references
from nemo_rod.hosts.plain_torch import scorer as scoring
from nemo_rod.hosts.plain_torch.write_references import weights_digest
from nemo_rod.selection import (
    Candidates,
    Curriculum,
    References,
    ReferenceWriter,
    SourceRow,
    TakeAll,
)
from nemo_rod.selection.held_out import START_FILE
from nemo_rod.selection.policies import SCORES
from nemo_rod.selection.references.folder import role_manifest
from nemo_rod.selection.schedule import Schedule

pytestmark = pytest.mark.filterwarnings("ignore")
WORKER = WORKERS / "plain_torch_worker.py"
EXAMPLES = ROOT / "docs" / "examples" / "plain_torch"
BLEND = {"policy": "mix"}


class Runs:
    """The Megatron road's run, and runs of the worker with its learning rates."""

    def __init__(self, root: Path, tiny: Setting, torchrun: Callable[..., list[str]]) -> None:
        self.root, self.tiny, self.torchrun = root, tiny, torchrun
        self.megatron = tiny.single()
        self.lrs = metric(tiny.root / "single", "train/lr")

    def run(self, processes: int, *runs: dict[str, Any]) -> None:
        common = {"model": str(self.tiny.base), "kind": "one"}
        training = {"references": list(map(str, self.tiny.references)), "lrs": self.lrs}
        every = [
            {**common, **({} if "role" in run else training), **run, "out": str(self.root / name)}
            for run in runs
            if (name := run["out"])
        ]
        spec = self.root / f"{runs[0]['out']}.json"
        spec.write_text(json.dumps({"blocks": str(self.tiny.blocks), "runs": every}))
        self.torchrun(processes, WORKER, spec)

    def records(self, name: str) -> list[Any]:
        return list(Curriculum.open(self.root / name / "curriculum.rod", read_only=True))

    def references(self, *names: str) -> References:
        return References.open([self.root / name for name in names], self.tiny.store)

    def assert_same_choices(self, name: str, expected: list[Any], steps: int = STEPS) -> None:
        actual, expected = self.records(name), expected[:steps]
        assert len(actual) == len(expected) == steps
        for ours, theirs in zip(actual, expected, strict=True):
            assert ours.block_ids.tolist() == theirs.block_ids.tolist()
            assert ours.chosen.tolist() == theirs.chosen.tolist(), ours.step
            np.testing.assert_allclose(ours.loss, theirs.loss, rtol=0, atol=2e-4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny, torchrun):
    runs = Runs(tmp_path_factory.mktemp("plain_torch"), tiny, torchrun)
    specialist = {"model": str(tiny.specialist), "role": "adaptation"}
    own = [str(runs.root / name) for name in ("specialist", "base")]
    inputs = (tiny.base, tiny.blocks, "replay", runs.root / "base")
    torchrun(0, EXAMPLES / "references.py", *inputs)
    runs.run(
        0, {"out": "specialist", **specialist}, {"out": "one"}, {"out": "resumed", "stop": 7},
        {"out": "resumed"}, {"out": "own_references", "references": own, "stop": 5},
        {"out": "mix", **BLEND, "references": own[1:]},
    )  # fmt: skip
    runs.run(
        2, {"out": "ddp", "kind": "ddp"}, {"out": "fsdp2", "kind": "fsdp2"},
        {"out": "mix_ddp", "kind": "ddp", **BLEND, "references": own[1:]},
        {"out": "fsdp2_base", "kind": "fsdp2", "role": "replay"},
    )  # fmt: skip
    return runs


@pytest.mark.parametrize("name", ["one", "resumed", "ddp", "fsdp2"])
def test_it_chooses_what_megatron_chooses_in_one_process_and_in_several(name, runs):
    runs.assert_same_choices(name, runs.megatron if name == "one" else runs.records("one"))
    assert metric(runs.root / name, "step") == list(range(STEPS))


@pytest.mark.parametrize("name", ["mix", "mix_ddp"])
def test_a_blend_follows_the_model_as_under_megatron(name, runs):
    runs.assert_same_choices(name, runs.tiny.single(policy_name="mix"))


def test_it_trains_as_megatron_does(runs):
    ours, theirs = (
        metric(folder, "train/loss") for folder in (runs.root / "one", runs.tiny.root / "single")
    )
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4)


def test_its_references_are_those_of_megatron(runs):
    """Those of the base itself leave replay a score of zero."""
    ids = np.arange(len(runs.tiny.store))
    ours, sharded = (runs.references("specialist", base) for base in ("base", "fsdp2_base"))
    theirs = References.open(runs.tiny.references, runs.tiny.store)
    np.testing.assert_allclose(ours[ids], theirs[ids], rtol=0, atol=2e-6)
    np.testing.assert_allclose(sharded[ids], ours[ids], rtol=0, atol=2e-6)
    assert sharded.manifests[1] == ours.manifests[1]  # the same weights, however they are split
    runs.assert_same_choices("own_references", runs.records("one"), steps=5)
    (first, *_) = runs.records("own_references")
    is_replay = first.block_ids >= runs.tiny.store.num_adaptation
    np.testing.assert_allclose(first.score[is_replay], 0, atol=1e-6)


def test_held_out_losses_of_replicas_and_of_a_resumed_run(runs):
    """Those of whoever measures the same weights; at the start, every 5 steps, and at the end."""
    from transformers import AutoModelForCausalLM

    folders = {name: runs.root / name for name in ("one", "resumed", "ddp", "fsdp2")}
    rows = {name: read_lines(folder / "metrics.jsonl") for name, folder in folders.items()}
    start = {name: read_json(folder / START_FILE) for name, folder in folders.items()}
    held_out = BlockStore(runs.tiny.blocks, split="holdout")
    model = AutoModelForCausalLM.from_pretrained(runs.tiny.base, dtype=torch.float32)
    losses = TorchScorer(model, held_out, micro_batch_size=1).losses(np.arange(len(held_out)))
    expected = {
        f"validation/{row.role}/{row.name}/loss": losses[row.start :][: min(row.count, 64)].mean()
        for row in held_out.sources
    }
    assert start["one"] == pytest.approx(expected, abs=1e-6)
    for name in start:
        assert start[name] == pytest.approx(start["one"], abs=2e-6)
        measured = [row for row in rows[name] if "validation/forgetting" in row]
        steps = [row["step"] + 1 for row in measured]
        assert steps == sorted({5, 10, 15, STEPS, *([7] if name == "resumed" else [])})
        assert measured[-1]["validation/forgetting"] == pytest.approx(
            rows["one"][-1]["validation/forgetting"], abs=2e-4
        )


@pytest.mark.parametrize("script", ["loop.py", pytest.param("trainer.py", marks=pytest.mark.slow)])
def test_examples_train_and_resume(script, runs, tmp_path):
    """The second call continues from the checkpoint of the first, the loop's in two processes."""
    inputs = (runs.tiny.base, runs.tiny.blocks, *runs.tiny.references)
    options = ["--steps", "{}", "--save-every", "2"] if script == "loop.py" else ["{}"]

    def run(processes: int, steps: int, out: Path) -> list[str]:
        words = [option.format(steps) for option in options]
        return runs.torchrun(processes, EXAMPLES / script, *inputs, out, *words, timeout=280)

    run(0, 4, tmp_path)
    # without GPUs, transformers' Trainer resumes in one process alone: torch.load knows no "cpu:0"
    run(0 if script == "trainer.py" else 2, 6, tmp_path)
    assert metric(tmp_path / "rod", "step") == list(range(6))
    assert all(loss > 0 for loss in metric(tmp_path / "rod", "train/loss"))
    records = list(Curriculum.open(tmp_path / "rod" / "curriculum.rod", read_only=True))
    assert len(records) == 6 and len(records[0].chosen) == 8
    assert (tmp_path / "hf" / "model.safetensors").exists()
    if script == "trainer.py":
        page = (tmp_path / "rod" / "report" / "index.html").read_text()
        assert "Held-out loss by source" in page
        assert json.loads((tmp_path / "rod" / "job.json").read_text())["steps"] == 6
        told = ["train_loss" in output for output in run(2, 2, tmp_path / "two")]
        assert told == [True, False], "each rank trained a model of its own"


class RandomBlocks:
    """A store of random tokens."""

    root, block_size, vocab_size = Path("made_up"), 24, 64
    num_adaptation = num_replay = 32
    digest = tokenizer_fingerprint = "made up"
    sources = (SourceRow("new", "adaptation", 0, 32), SourceRow("old", "replay", 32, 32))

    def tokens(self, block_ids: np.ndarray) -> np.ndarray:
        every = np.random.default_rng(0).integers(0, 64, (64, self.block_size))
        return every[block_ids].astype(np.int32)

    def source_index(self, block_ids: np.ndarray) -> np.ndarray:
        return block_ids // 32

    checked_tokens = tokens


def model(kind: str, **options: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
    }  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**sizes, **options}))


GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}


class Wrapped(torch.nn.Module):
    """A model of somebody's own around a causal one; `output` is what it returns."""

    def __init__(self, output: Callable[..., Any] = lambda model, ids: model(ids)) -> None:
        super().__init__()
        self.inner, self.output = model("llama"), output
        self.config = self.inner.config

    def get_output_embeddings(self) -> Any:
        return self.inner.lm_head

    def forward(self, input_ids: torch.Tensor, labels: Any = None) -> Any:
        return self.output(self.inner, input_ids)


def flattened(inner: Any, ids: torch.Tensor) -> Any:
    hidden = inner.model(ids).last_hidden_state
    return SimpleNamespace(logits=inner.lm_head(hidden.flatten(0, 1)).unflatten(0, ids.shape))


def noisy(inner: Any, ids: torch.Tensor) -> Any:
    return SimpleNamespace(logits=torch.dropout(inner(ids).logits, 0.5, True))


def in_place(scored: Any) -> Any:
    scored.compile(backend="eager")
    return scored


COMPILED = partial(torch.compile, backend="eager")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda: COMPILED(model("llama")),
        lambda: COMPILED(in_ddp(model("llama"))),
        lambda: in_ddp(COMPILED(model("llama"))),
        lambda: in_place(model("llama")),
        Wrapped,
        partial(Wrapped, flattened),
    ],
)
def test_whatever_is_around_a_model_its_losses_are_the_same(wrap):
    store: Any = RandomBlocks()
    actual, expected = (
        TorchScorer(each, store, micro_batch_size=2).losses(np.arange(5))
        for each in (wrap(), model("llama"))
    )
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)


def in_ddp(inner: Any) -> Any:
    """As `DistributedDataParallel` holds a model, without its process group."""
    wrapper = torch.nn.parallel.DistributedDataParallel.__new__(
        torch.nn.parallel.DistributedDataParallel
    )
    torch.nn.Module.__init__(wrapper)
    wrapper.module = inner
    return wrapper


def with_config(config: Any) -> Any:
    wrapped = Wrapped()
    wrapped.config = config
    return wrapped


NOT_CAUSAL, NO_LOGITS = "is not causal, or random in evaluation", "which returns an object with log"


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: model("bert"), f"BertLMHeadModel {NOT_CAUSAL}"),
        (lambda: model("roberta"), f"RobertaForCausalLM {NOT_CAUSAL}"),
        (lambda: Wrapped(noisy), f"Wrapped {NOT_CAUSAL}"),
        (
            lambda: seq2seq(),
            "T5ForConditionalGeneration has no .* or has an encoder: give a causal",
        ),
        (lambda: Wrapped(lambda inner, ids: inner(ids).logits), f"logits None .*{NO_LOGITS}"),
        (
            lambda: Wrapped(lambda inner, ids: inner(ids, logits_to_keep=1)),
            r"\[2, 1, 64\] of token",
        ),
        (lambda: model("gpt2", **GPT2), "has 16 positions, but 24 tokens of the blocks in made_up"),
        (lambda: model("llama").to("meta"), "weights of LlamaForCausalLM are on the device 'meta'"),
        (lambda: torch.nn.DataParallel(model("llama")), "DataParallel has no config or no get_out"),
        (lambda: with_config(SimpleNamespace(vocab_size=64)), "Wrapped has no config"),
    ],
)
def test_models_that_it_cannot_score_are_refused(build, sentence):
    store: Any = RandomBlocks()
    with pytest.raises(ValueError, match=sentence):
        TorchScorer(build(), store, micro_batch_size=2).losses(np.arange(5))


def seq2seq() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(num_layers=1, **sizes))


def test_processes_of_torchrun_without_a_process_group_are_refused(monkeypatch):
    """What is left over of a launcher's variables alone means nothing."""
    store: Any = RandomBlocks()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert TorchScorer(model("llama"), store, micro_batch_size=2).replicas == 1
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(ValueError, match="started 2 processes, but there is no process group"):
        TorchScorer(model("llama"), store, micro_batch_size=2)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ValueError, match="micro_batch_size is 0, expected at least 1"):
        TorchScorer(model("llama"), store, micro_batch_size=0)


@pytest.mark.parametrize("length", [-1, 0, 25])
def test_a_length_that_no_block_has_is_refused(length):
    store: Any = RandomBlocks()
    with pytest.raises(ValueError, match=f"length is {length}, expected 1 to 24 tokens"):
        TorchScorer(model("llama"), store, micro_batch_size=2, length=length)


@pytest.mark.parametrize(
    ("kind", "options", "in_slices", "length"),
    [
        ("llama", {}, True, None),
        *(("llama", {}, True, length) for length in (6, 23, 24)),
        ("llama", {"tie_word_embeddings": True, "attention_dropout": 0.5}, True, None),
        ("gemma2", {"final_logit_softcapping": 2.0}, False, None),
        ("cohere", {"logit_scale": 0.25}, False, None),
        ("granite", {"logits_scaling": 4.0}, False, None),
        # experts; positions that are looked up; no argument use_cache; of an encoder, made causal
        ("mixtral", {"num_local_experts": 4}, True, None),
        ("gpt2", GPT2, True, 15),
        ("openai-gpt", {"n_embd": 16, "n_layer": 2, "n_head": 2}, True, None),
        ("bert", {"is_decoder": True}, True, None),
    ],
)
def test_losses_are_those_of_transformers(kind, options, in_slices, length, monkeypatch):
    """In slices of five positions; a cap or a scale on the logits makes it keep them whole.

    A prefix has the losses of its own targets.
    """
    monkeypatch.setattr(scoring, "MAX_LOGITS_BYTES", 5 * 4 * 2 * 64)
    store: Any = RandomBlocks()
    scored = model(kind, **options).train()
    for parameter in scored.parameters():
        parameter.data.mul_(3)  # losses far from uniform
    scorer = TorchScorer(scored, store, micro_batch_size=2, length=length)
    ids = np.array([4, 0, 2, 2, 1])
    actual = scorer.losses(ids)
    assert scored.training and scorer.precision == "fp32"
    tokens = torch.from_numpy(store.tokens(ids)[:, : (length or 24) + 1]).long()
    logits = scored.eval()(tokens).logits[:, :-1]
    loss = cross_entropy(logits.mT.double(), tokens[:, 1:], reduction="none")[:, :length]
    np.testing.assert_allclose(actual, loss.mean(1).detach(), rtol=0, atol=1e-6)
    assert scorer._in_slices == in_slices
    assert "forward" not in vars(scored.get_output_embeddings())


@pytest.mark.parametrize(
    ("cast", "autocast", "precision"),
    [(torch.bfloat16, False, "bf16"), (torch.float32, True, "bf16 over fp32")],
)
def test_the_precision_is_of_the_pass(cast, autocast, precision):
    scored = model("llama").to(cast)
    scorer = TorchScorer(scored, RandomBlocks(), micro_batch_size=4)  # type: ignore[arg-type]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        scorer.losses(np.arange(4))
        assert scorer.precision == precision
        tokens = torch.zeros(1, 8, dtype=torch.long)
        scored(input_ids=tokens, labels=tokens).loss.backward()  # casts have gradients again
        for parameter in scored.parameters():
            parameter.data.mul_(3)  # an optimizer's step
        actual = scorer.losses(np.arange(4))
    assert all(parameter.grad is not None for parameter in scored.parameters())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        np.testing.assert_array_equal(actual, scorer.losses(np.arange(4)))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"batch_size": 9, "micro_batch_size": 2}, "batch_size is 9, expected a multiple of micr"),
        ({"model": torch.nn.Linear(1, 1)}, "Linear has no config or no get_output_embeddings()"),
        ({"micro_batch_size": 0}, "batch_size is 8, expected a multiple of micro_batch_size=0 x 1"),
        ({"steps": -1}, "steps is -1, expected at least 1 optimizer step"),
        ({"scoring_micro_batch_size": 0}, "scoring_micro_batch_size is 0, expected at least 1"),
        ({"validation_every": -1}, "validation_every=-1 is not valid: expected a number of steps"),
        ({"on_nonfinite": "exclud"}, "on_nonfinite='exclud' is not valid: expected 'refuse' or"),
        ({"pools": "other"}, "the pools are of other blocks or batches: expected Candidates with"),
        ({"pools": "negative"}, "the pools have the seed -1, expected a whole number in [0, 2**48"),
        ({"pools": "few"}, "the pools have 2 candidates, expected at least the 8 blocks"),
        ({"pools": "nameless"}, "has no __repr__, by which a resumed job recognises its pools"),
        ({"policy": "nameless"}, "has no __repr__, by which a resumed job recognises its policy"),
        ({"store": "other"}, "the references are of other blocks than those in"),
        ({"held_out": "same"}, "that are trained on: give BlockStore(..., split='holdout')"),
        ({"held_out": ["a", "b"]}, "held_out is a list, expected one BlockStore: each of its"),
        ({"held_out": "foreign"}, "are of another tokenizer than those in"),
        ({"model": "small"}, "has 64 tokens, but the blocks in"),
        ({"model": "bf16"}, "of precision 'fp32', but candidates are scored in 'bf16'"),
        ({"references": None}, "with reference losses: give them"),
    ],
)
def test_what_does_not_fit_is_refused(change, sentence, runs):
    store, fits = runs.tiny.store, model("llama", vocab_size=256)
    roles = {"num_adaptation": store.num_adaptation, "num_replay": store.num_replay}
    own = {
        "small": model("llama"),
        "bf16": copy.deepcopy(fits).bfloat16(),
        "other": {
            "pools": Candidates(**roles, batch_size=4),
            "store": BlockStore(store.root, split="holdout"),
        },
        "negative": Candidates(**roles, batch_size=8, seed=-1),
        "few": type("Pools", (), {"size": 2})(),
        "same": store,
        "foreign": type(
            "Blocks", (), {"tokenizer_fingerprint": "x", "root": "other", "digest": "x"}
        )(),
        "nameless": type("Part", (), {"size": 16, "needs": SCORES, "select": print})(),
    }
    references = References.open(runs.tiny.references, store)
    options: dict[str, Any] = {
        "model": fits, "store": store, "references": references, "batch_size": 8, "steps": 2,
    }  # fmt: skip
    for key, value in change.items():
        given = own.get(value, value) if isinstance(value, str) else value
        options[key] = given[key] if isinstance(given, dict) else given
    with pytest.raises(ValueError, match=re.escape(sentence)):
        next(iter(RoDBatches(**options)))


def test_a_watched_loop_is_the_stock_loop(tmp_path):
    """One that reads the same blocks itself; losses are recorded by source."""
    store, held_out = RandomBlocks(), RandomBlocks()
    held_out.digest = "held out"
    stock, watched = model("llama"), model("llama")
    batches = nemo_rod.watch(
        "plain_torch", watched, store, steps=4, batch_size=8, out=tmp_path, held_out=held_out,
        validation_every=2,
    )  # fmt: skip
    pools = Candidates(num_adaptation=32, num_replay=32, batch_size=8, multiplier=1)
    ids = [pools.pool(step).block_ids for step in range(4)]
    own = ({"input_ids": t, "labels": t} for t in map(torch.from_numpy, map(store.tokens, ids)))
    losses: list[list[float]] = [[], []]
    for trained, data, noted in ((stock, own, losses[0]), (watched, batches, losses[1])):
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
        for batch in data:
            loss = trained(**{name: tokens.long() for name, tokens in batch.items()}).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            noted.append(loss.item())
    assert losses[0] == losses[1]
    assert all(map(torch.equal, stock.parameters(), watched.parameters()))
    rows = read_lines(tmp_path / "metrics.jsonl")
    for row, block_ids, loss in zip(rows, ids, losses[1], strict=True):
        share = (block_ids < 32).mean()
        mean = share * row["rod/loss/new"] + (1 - share) * row["rod/loss/old"]
        assert mean == pytest.approx(loss, rel=1e-6)
    assert [row["step"] for row in rows if "validation/forgetting" in row] == [1, 3]
    with pytest.raises(ValueError, match="chooses nothing, so policy= has no effect"):
        nemo_rod.watch("plain_torch", watched, store, policy="mix")


class Raw(torch.optim.Optimizer):
    """An optimizer that writes past PyTorch's counters, as one of CUDA kernels may."""

    def __init__(self, weights: Any, lr: float) -> None:
        super().__init__(weights, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.data.sub_(group["lr"] * weight.grad)


ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def taken_from(
    scored: Any, steps: int = 4, seed: int = 42, multiplier: int = 1, **options: Any
) -> RoDBatches:
    """Batches of 4 micro-batches a step, which need no scores."""
    counts = {"num_adaptation": 32, "num_replay": 32, "batch_size": 8}
    pools = Candidates(**counts, multiplier=multiplier, seed=seed)
    store: Any = RandomBlocks()
    return RoDBatches(
        scored, store, None, steps=steps, batch_size=8, micro_batch_size=2, pools=pools,
        **{"policy": TakeAll(), **options},
    )  # fmt: skip


def train(
    groups: list[int],
    *,
    ahead: bool = True,  # reads the batches of an update before it, as Trainer does
    optimizer: Any = ADAMW,
    zeroes_first: bool = False,
    each: int = 0,  # batches that are taken of an iterator; 0 for all
    skipped: int = -1,  # the update that is left out
    overflows: bool = False,
    moves: Callable[[Any], Any] | None = None,  # what weights become in each batch after step 0
) -> int:
    """A loop that updates the weights once for each number of batches; returns its updates."""
    scored = model("llama")
    batches: Any = taken_from(scored) if each else iter(taken_from(scored))
    updater = optimizer(scored.parameters())
    for update, size in enumerate(groups):
        if zeroes_first:
            updater.zero_grad()
        part = each or size
        taken = chain.from_iterable(islice(batches, part) for _ in range(size // part))
        for batch in list(taken) if ahead else taken:
            scored(**batch).loss.backward()
            for weight in scored.parameters() if moves and update else ():
                weight.data = moves(weight.data)
        if overflows:
            next(scored.parameters()).grad.fill_(math.inf)
        if update != skipped:
            updater.step()
        if not zeroes_first:
            updater.zero_grad()
    assert each or next(batches, None) is None
    return len(groups)


WITHIN, BETWEEN = "changed after {} of the 4 batches of step {}", "step {}.* have not changed"


@pytest.mark.parametrize(
    ("groups", "options", "sentence"),
    [
        ([4] * 4, {}, None),
        ([4] * 4, {"ahead": False, "zeroes_first": True}, None),
        ([4] * 4, {"optimizer": partial(torch.optim.SGD, lr=0.0)}, None),
        ([4] * 4, {"optimizer": partial(Raw, lr=1e-2)}, None),
        ([4] * 4, {"optimizer": partial(Raw, lr=0.0)}, None),
        ([4] * 4, {"optimizer": partial(Raw, lr=1e-2), "zeroes_first": True}, None),
        ([4] * 4, {"optimizer": partial(Raw, lr=0.0), "zeroes_first": True}, None),
        ([4] * 4, {"skipped": 0}, None),
        ([4] * 4, {"skipped": 0, "zeroes_first": True, "overflows": True}, None),
        *(([size] * 16, {}, WITHIN.format(size, 0)) for size in (1, 2, 3)),
        ([1] * 16, {"optimizer": partial(Raw, lr=1e-2)}, WITHIN.format(1, 0)),
        ([4, 4, 2, 2, 4], {}, WITHIN.format(2, 2)),
        ([4, 4, 2, 2, 4], {"optimizer": partial(Raw, lr=1e-2)}, WITHIN.format(2, 2)),
        ([4] * 4, {"moves": torch.clone, "ahead": False}, None),
        ([4] * 4, {"moves": torch.ones_like, "ahead": False}, WITHIN.format(1, 1)),
        ([5] * 3, {}, BETWEEN.format(1)),
        ([8] * 2, {}, BETWEEN.format(1)),
        ([8] * 2, {"ahead": False}, BETWEEN.format(1)),
        ([16], {"ahead": False, "zeroes_first": True}, BETWEEN.format(1)),
        ([6, 6, 4], {"ahead": False}, BETWEEN.format(1)),
        ([4] * 4, {"each": 4}, None),
        ([8] * 2, {"each": 4}, BETWEEN.format(1)),
        ([2] * 8, {"each": 2}, WITHIN.format(2, 0)),
        ([4] * 4, {"each": 1}, WITHIN.format(1, 0)),
    ],
)
def test_updates_that_do_not_fall_between_steps_are_refused(groups, options, sentence, capsys):
    with pytest.raises(ValueError, match=sentence) if sentence else nullcontext():
        assert train(groups, **options) == len(groups)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("groups", "options", "step"),
    [([4, 4, 8], {}, 3), ([4] * 4, {"skipped": 3, "zeroes_first": True}, 4)],
)
def test_a_loop_that_has_proved_right_and_changes_is_told(groups, options, step, capsys):
    """It may only have skipped updates of its own, so it goes on."""
    train(groups, **options)
    assert re.search(BETWEEN.format(step), capsys.readouterr().err)


def test_workers_of_a_data_loader_are_refused():
    batches = DataLoader(taken_from(model("llama")).dataset, batch_size=None, num_workers=1)
    with pytest.raises(ValueError, match="in a worker process of a DataLoader, whose copy"):
        next(iter(batches))
    with pytest.raises(TypeError, match="without a DataLoader"):
        next(iter(DataLoader(taken_from(model("llama")))))


def test_a_model_that_is_not_trained_may_be_read_through_once(tmp_path, capsys):
    number: Any = np.int64(4)
    untrained = model("llama").requires_grad_(False)
    batches = taken_from(untrained, number, seed=number, out=tmp_path)
    assert len(list(batches)) == 16
    assert not [*batches, *batches]
    said = capsys.readouterr().err
    assert re.fullmatch(r"nemo-rod: all 4 steps .* done, .* to 4 \(Trainer's max_steps\).*\n", said)


def learning(stop: int = 0, start: int = 0, **options: Any) -> RoDBatches:
    """Trains with a policy that learns, from a checkpoint on, to a step or to the end."""
    scored = model("llama")
    batches = taken_from(scored, **{"policy": "odm", **options})
    batches.load_state_dict({"step": start})
    return go_on(batches, stop)


def go_on(batches: RoDBatches, stop: int = 0) -> RoDBatches:
    scored = batches.scorer.model
    optimizer = ADAMW(scored.parameters())
    for number, batch in enumerate(batches, start=1):
        scored(**batch).loss.backward()
        if number % 4 == 0:
            optimizer.step()
            if batches.next_step == stop:
                break
    batches.end_step()
    return batches


def updates(batches: RoDBatches) -> int:
    return int(batches.selector.policy.state["updates"])  # type: ignore[attr-defined]


def test_a_policy_that_learns_resumes_with_all_that_it_learned(tmp_path):
    """In a new process, in the same loop that goes back, and with other batches."""
    assert updates(learning(3, out=tmp_path)) == 3
    batches = learning(3, 2, out=tmp_path)
    assert updates(batches) == 3
    batches.load_state_dict({"step": 1})
    assert updates(go_on(batches)) == 4
    assert updates(learning(0, 3, out=tmp_path, multiplier=2)) == 4
    assert updates(learning(0, 3, out=tmp_path, multiplier=3)) == 4
    assert [*tmp_path.glob("curriculum.rod.2")]


def test_a_policy_that_learns_needs_the_record_of_the_steps_before(tmp_path):
    batches = learning(2)
    assert updates(go_on(batches)) == 4  # the same loop
    learning(2, out=tmp_path / "a")
    for out in (None, tmp_path / "b"):
        with pytest.raises(ValueError, match=r"ODM learns from every step, .* step 2 are not reco"):
            learning(0, 2, out=out)
    batches.load_state_dict({"step": 1})
    for _ in range(2):  # asked again
        with pytest.raises(ValueError, match="step 1 are not recorded in out=None"):
            next(iter(batches))
    batches.load_state_dict({"step": 0})
    assert updates(go_on(batches)) == 4
    learning(0, 2, policy=TakeAll())


@pytest.mark.parametrize("kind", ["file", "schedule"])
def test_a_policy_whose_file_was_edited_is_refused(kind, tmp_path):
    file = tmp_path / ("mine.py" if kind == "file" else "plan.csv")
    content = {
        "file": "from nemo_rod.selection import TakeAll as Mine  # {}\n",
        "schedule": "step,replay\n0,0.{}\n",
    }[kind]
    make = {"file": lambda: f"{file}:Mine", "schedule": lambda: Schedule(file=str(file))}[kind]
    for start, text in ((0, 5), (1, 5), (2, 6)):
        file.write_text(content.format(text))
        changed = pytest.raises(ValueError, match=r"was recorded with config .*\(this run: ")
        with changed if text == 6 else nullcontext():
            learning(start + 1, start, out=tmp_path / "rod", policy=make())


@pytest.mark.parametrize("done", [0, 1, 3])
def test_libraries_may_skip_the_batches_of_steps_done(done):
    """As Trainer does when it resumes with ignore_data_skip=False."""
    from accelerate import skip_first_batches

    scored = model("llama").requires_grad_(False)
    first = [batch["input_ids"] for batch in taken_from(scored)]
    batches = taken_from(scored)
    batches.load_state_dict({"step": done})
    rest = [batch["input_ids"] for batch in skip_first_batches(batches, 4 * done)]
    assert len(rest) == 16 - 4 * done
    assert all(torch.equal(*pair) for pair in zip(rest, first[4 * done :], strict=True))
    if done:  # with another accumulation than the checkpoint's
        with pytest.raises(ValueError, match=r"was not skipped: .* than the 4 of a step"):
            scored(**next(iter(skip_first_batches(batches, 2 * done))))


@pytest.mark.parametrize(
    "state", [{"step": -1}, {"step": 2.0}, {"step": 5}, {}, {"step": True}, [3]]
)
def test_a_state_of_no_step_is_refused(state):
    with pytest.raises(ValueError, match=r"^the state .* is of no step of these 4: give what "):
        taken_from(model("llama")).load_state_dict(state)


def test_a_model_is_known_by_all_that_is_saved_of_it():
    one, other = model("llama"), model("llama")
    assert weights_digest(one) == weights_digest(other)
    for number, each in enumerate((one, other)):  # such as an expert's bias
        each.model.register_buffer("bias", torch.full((2,), float(number)))
    assert weights_digest(one) != weights_digest(other)


def test_references_of_another_model_are_not_filled_in(runs):
    folder = runs.tiny.references[1]
    with pytest.raises(ValueError, match="holds references with model"):
        write_references(
            model("llama", vocab_size=256), runs.tiny.store, folder, role="replay",
            micro_batch_size=8,
        )  # fmt: skip


def test_references_of_further_lengths_are_filled_in(runs, tmp_path):
    store, scored = runs.tiny.store, model("llama", vocab_size=256)
    lengths = [store.block_size, store.block_size // 2]
    manifest = role_manifest(
        store, "replay", model=weights_digest(scored), lengths=lengths, precision="fp32"
    )
    ReferenceWriter(tmp_path, manifest, store.hashes)
    write_references(scored, store, tmp_path, role="replay", micro_batch_size=8)
    ids = store.num_adaptation + np.arange(16)
    for length in lengths:
        expected = TorchScorer(scored, store, micro_batch_size=8, length=length).losses(ids)
        written = References.open([tmp_path], length=length).losses(ids)
        np.testing.assert_allclose(written, expected, rtol=0, atol=1e-6)


def untrained() -> Any:
    """A model whose loop does not train it."""
    return model("llama", vocab_size=256).requires_grad_(False)


@pytest.mark.parametrize("taken", [1, 3])
def test_a_step_that_is_left_in_the_middle_is_done_again(taken, runs, tmp_path):
    """As by a loop that looks at the first batch, or breaks, and goes on with the same object."""
    references = References.open(runs.tiny.references, runs.tiny.store)
    batches = RoDBatches(
        untrained(), runs.tiny.store, references, steps=3, batch_size=8,
        micro_batch_size=4, out=tmp_path,
    )  # fmt: skip
    for _ in zip(range(taken), batches, strict=False):
        pass
    assert len(list(batches)) == 6 - taken // 2 * 2
    assert metric(tmp_path, "step") == [0, 1, 2]
    records = Curriculum.open(tmp_path / "curriculum.rod", read_only=True)
    assert [record.step for record in records] == [0, 1, 2]


def test_a_run_that_goes_on_with_other_batches_or_pools_begins_a_segment(runs, tmp_path):
    store, fits = runs.tiny.store, untrained()
    counts = {"num_adaptation": store.num_adaptation, "num_replay": store.num_replay}
    references = References.open(runs.tiny.references, store)
    options: dict[str, Any]
    for number, (size, options) in enumerate(
        ((8, {}), (16, {"on_nonfinite": "exclude"}), (8, {"multiplier": 1.5}), (8, {"seed": 9}))
    ):
        drawn = {name: options.pop(name) for name in ("multiplier", "seed") if name in options}
        batches = RoDBatches(
            fits, store, references, steps=2 * number + 2, batch_size=size, out=tmp_path,
            pools=Candidates(**counts, batch_size=size, **drawn), **options,
        )  # fmt: skip
        batches.load_state_dict({"step": 2 * number})
        assert len(list(batches)) == 2
        assert (tmp_path / f"curriculum.rod.{number}").exists() == (number > 0)
    assert metric(tmp_path, "step") == list(range(8))
    other = Candidates(**counts, batch_size=8, balance="exact")
    with pytest.raises(
        ValueError, match=r"was recorded with config .*'expected'.*this run: .*'exact'"
    ):
        batches = RoDBatches(
            fits, store, references, steps=9, batch_size=8, out=tmp_path, pools=other
        )
        batches.load_state_dict({"step": 8})
        next(iter(batches))
