"""Tasks through lm-eval: the arithmetic by hand, and the real library on a tiny model."""

import ast
import dataclasses
import importlib.util
import json
import math
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import composed, nemo_rod

from nemo_rod.corpus import BlockStore, SourceSpec, load_tokenizer, prepare
from nemo_rod.lab.tasks.held_out_questions import NUM_CHOICES, questions, write_held_out_tasks
from nemo_rod.lab.tasks.lm_eval_job import (
    TaskJob,
    _definitions,
    capability_accuracy,
    entry_for,
    model_arguments,
    prompts_digest,
    refuse_forgotten_chunks,
    refuse_unknown,
    task_manager,
)
from nemo_rod.lab.tasks.section import Tasks
from nemo_rod.run.base_model import initialise_base

NEEDS_LM_EVAL = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="tasks need lm-eval: make venv"
)
CAPABILITIES = {"knowledge": ["a", "b", "group"], "sense": ["c"]}


def sample(doc: int, prompt: str = "p") -> dict[str, Any]:
    return {"doc_id": doc, "doc_hash": f"d{doc}", "prompt_hash": prompt, "target_hash": "t"}


RESULTS: dict[str, Any] = {
    "samples": {"a": [sample(0), sample(1)], "x": [sample(0)] * 2,
                "y": [sample(i) for i in range(3)]},
    "results": {"a": {"acc,none": 0.5, "acc_norm,none": 1.0}, "x": {"acc,first": 1.0},
                "y": {"acc,none": 1 / 3, "acc_norm,none": 0.0}, "group": {"alias": "group"}},
    "group_subtasks": {"group": ["x", "inner"], "inner": ["y"]},
    "versions": {"a": 1.0, "x": 2},
    "n-shot": {"a": 0, "x": 5, "y": 5},
}  # fmt: skip


def test_normalised_accuracy_where_it_is_defined():
    entry = entry_for("a", RESULTS)
    assert entry["accuracy"] == 1.0 and entry["leaves"]["a"]["metric"] == "acc_norm"
    # x has one question, asked with two choices, and no normalised accuracy; y has three
    entry = entry_for("group", RESULTS)
    assert list(entry["leaves"]) == ["x", "y"] and entry["questions"] == 4
    assert entry["accuracy"] == pytest.approx((1 * 1.0 + 3 * 0.0) / 4)
    assert entry["leaves"]["x"]["metric"] == "acc,first" and entry["leaves"]["x"]["few_shot"] == 5


def test_a_task_without_accuracy_is_refused():
    results = RESULTS | {"results": {"a": {"exact_match,none": 1.0}}}
    with pytest.raises(ValueError, match=r"Task a reports \['exact_match,none'\]"):
        entry_for("a", results)


def test_capabilities_weigh_their_entries_alike():
    accuracy = {"a": 0.5, "b": 0.25, "group": 0.75, "c": 0.1}
    assert capability_accuracy(CAPABILITIES, accuracy) == {"knowledge": 0.5, "sense": 0.1}


def test_digest_of_prompts():
    samples = [sample(0), sample(1)]
    assert prompts_digest(samples) == prompts_digest(samples[::-1])
    assert prompts_digest(samples) != prompts_digest([sample(0), sample(1, "other")])


def source(name: str, role: str, generator: str, max_bytes: int = 20_000) -> SourceSpec:
    return SourceSpec(
        name=name, role=role, kind="synthetic", files=(generator,), max_bytes=max_bytes
    )


def store(folder: Path, sources: list[SourceSpec], holdout_fraction: float) -> None:
    byte = load_tokenizer("byte")
    prepare(folder, sources, tokenizer=byte, block_size=64, holdout_fraction=holdout_fraction)


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks") / "blocks"
    sources = [source("new", "adaptation", "dialect:0:0.25"), source("old", "replay", "markov:0")]
    store(folder, sources, holdout_fraction=0.2)
    return folder


def test_questions_are_what_follows_in_the_block(blocks):
    held, tokenizer = BlockStore(blocks, split="holdout"), load_tokenizer("byte")
    (old,) = [place for place in held.sources if place.role == "replay"]
    made = list(questions(held, old, tokenizer, 20))
    assert made == list(questions(held, old, tokenizer, 20)) and len(made) > 10
    texts = {}
    for tokens_S in held.tokens(np.arange(old.start, old.start + old.count)):
        texts[tokenizer.decode(tokens_S[:32])] = tokenizer.decode(tokens_S[32:36])
    for question in made:
        choices = question["choices"]
        assert choices[question["answer"]] == texts[question["context"]]
        assert len(set(choices)) == NUM_CHOICES and set(choices) <= set(texts.values())
    assert {question["answer"] for question in made} == set(range(NUM_CHOICES))


def test_too_few_held_out_blocks_are_refused(tmp_path):
    store(tmp_path / "b", [source("old", "replay", "markov:0", 2_000)], holdout_fraction=0.06)
    with pytest.raises(ValueError, match="held-out blocks, expected 4 or more"):
        write_held_out_tasks(
            tmp_path / "b", tmp_path / "t", load_tokenizer("byte"), num_questions=5
        )


# ---------------------------------------------------------------- lm-eval itself


def arguments_for(backend: str) -> set[str]:
    """Arguments of lm-eval's model class, read from its source: vLLM need not be installed."""
    spec = importlib.util.find_spec("lm_eval")
    if spec is None:
        pytest.skip("tasks need lm-eval: make venv")
    for file in (Path(spec.submodule_search_locations[0]) / "models").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            registered = [ast.unparse(d) for d in getattr(node, "decorator_list", [])]
            if any(d.startswith("register_model(") and f"'{backend}'" in d for d in registered):
                (init,) = (n for n in node.body if getattr(n, "name", None) == "__init__")
                return {argument.arg for argument in (*init.args.args, *init.args.kwonlyargs)}
    raise AssertionError(f"lm-eval has no model {backend}")


@pytest.mark.parametrize(
    ("backend", "own"),
    [("hf", {"parallelize": True}), ("vllm", {"tensor_parallel_size": 2, "max_model_len": 64})],
)
def test_a_backend_has_every_argument_of_its_job(backend, own, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    arguments = {"dtype": "float32", **own}
    job = job_of(tmp_path, Path("tasks.json"), backend=backend, arguments=arguments)
    passed = {*model_arguments(TaskJob(**job | {"tasks": Tasks(**job["tasks"])}))}
    assert {"pretrained", "dtype", "batch_size", *own} <= passed <= arguments_for(backend)


def job_of(model: str | Path, out: Path, **keys: Any) -> dict[str, Any]:
    tasks = {"arguments": {"dtype": "float32"}, "batch_size": 4, "seed": 1, **keys}
    return {
        "name": "m", "model": str(model), "out": str(out), "inputs": {"model": "0f"},
        "tasks": dataclasses.asdict(Tasks(**tasks)),
    }  # fmt: skip


def run_job(job: dict[str, Any], folder: Path) -> str:
    """Runs a job in its process; returns the output of a failed one."""
    (file := folder / "job.json").write_text(json.dumps(job))
    command = [sys.executable, "-P", "-m", "nemo_rod.lab.tasks.lm_eval_job", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stdout[-2000:] + done.stderr[-2000:]


def job_for(blocks: Path, folder: Path, *, num_questions: int, head_dim: int) -> dict[str, Any]:
    """An untrained model, questions of the held-out blocks, and the job that asks it."""
    architecture = {
        "model_type": "qwen3", "vocab_size": 256, "hidden_size": 2 * head_dim,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": head_dim, "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }  # fmt: skip
    initialise_base(architecture, folder / "hf", tokenizer="byte", seed=3)
    made = write_held_out_tasks(
        blocks, folder / "t", load_tokenizer("byte"), num_questions=num_questions
    )
    out, include = folder / "tasks.json", str(folder / "t")
    return job_of(folder / "hf", out, capabilities=made, include=include)


@pytest.mark.slow
@NEEDS_LM_EVAL
def test_lm_eval_agrees_with_torch(blocks, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    job, tokenizer = job_for(blocks, tmp_path, num_questions=12, head_dim=8), load_tokenizer("byte")
    assert run_job(job, tmp_path) == ""
    result = json.loads((tmp_path / "tasks.json").read_text())
    assert not (tmp_path / "tasks.partial.json").exists()
    rows = [json.loads(line) for line in (tmp_path / "t" / "held_out_old.jsonl").open()]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", torch_dtype=torch.float32)
    right = 0
    for question in rows:
        scores = []
        for choice in question["choices"]:
            context, text = tokenizer.encode_batch([question["context"], choice])
            ids = torch.tensor(np.concatenate([context, text])[None].astype(np.int64))
            with torch.no_grad():
                logs = model(ids).logits[0].log_softmax(-1)
            total = sum(float(logs[len(context) + i - 1, t]) for i, t in enumerate(text))
            scores.append(total / len(choice))
        right += max(range(NUM_CHOICES), key=scores.__getitem__) == question["answer"]
    leaf = result["tasks"]["held_out_old"]["leaves"]["held_out_old"]
    assert leaf["questions"] == len(rows) and leaf["metric"] == "acc_norm"
    assert math.isclose(result["capabilities"]["old"], right / len(rows))
    # an attempt with another configuration does not continue with the answers of this one
    partial, tasks = tmp_path / "tasks.partial.json", job["tasks"]
    kept = {key: result[key] for key in ("configuration", "inputs", "tasks")}
    partial.write_text(json.dumps(kept))
    assert "another task configuration" in run_job(job | {"tasks": tasks | {"limit": 3}}, tmp_path)
    assert "other weights" in run_job(job | {"inputs": {"model": "1e"}}, tmp_path)
    # and with the same one it runs nothing again: the model may even be missing
    again = job | {"model": "nowhere", "tasks": tasks | {"batch_size": 1}}
    assert run_job(again, tmp_path) == ""
    assert json.loads((tmp_path / "tasks.json").read_text()) == result


def test_mamba_without_kernels_refuses_long_texts():
    pytest.importorskip("transformers.models.nemotron_h", reason="this transformers has none")
    from architectures import make, token_losses

    model = make("nemotron_h").eval()
    mixers = [layer for layer in model.modules() if hasattr(layer, "chunk_size")]
    tokens = np.random.default_rng(0).integers(0, 256, (2, 64))

    def losses(chunk_size: int) -> Any:
        for mixer in mixers:
            mixer.chunk_size = chunk_size
        return token_losses(model, tokens)

    assert len(mixers) == 3
    np.testing.assert_allclose(losses(128), losses(64), rtol=0, atol=1e-5)
    several, one_chunk = losses(16), losses(64)
    refuse_forgotten_chunks(model)
    assert np.array_equal(losses(64), one_chunk)
    if any(hasattr(mixer, "torch_forward") for mixer in mixers):  # transformers before 5.15
        assert not np.allclose(several, one_chunk, rtol=0, atol=1e-5)
        with pytest.raises(ValueError, match=r"longer than chunk_size=16 tokens, and one has 64"):
            losses(16)
    else:
        np.testing.assert_allclose(losses(16), one_chunk, rtol=0, atol=1e-5)


@pytest.mark.slow
@NEEDS_LM_EVAL
def test_lm_eval_refuses_texts_that_mamba_would_forget(blocks, tmp_path):
    pytest.importorskip("transformers.models.nemotron_h", reason="this transformers has none")
    from architectures import write

    job = job_for(blocks, tmp_path, num_questions=4, head_dim=8)
    job["model"] = str(write("nemotron_h", tmp_path / "nemotron"))
    assert run_job(job, tmp_path) == ""
    file = tmp_path / "nemotron" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chunk_size": 16}))
    output = run_job(job | {"out": str(tmp_path / "other.json")}, tmp_path)
    assert "wrong for texts longer than chunk_size=16 tokens" in output
    assert "or set tasks.backend=vllm" in output


@pytest.mark.slow
@NEEDS_LM_EVAL
def test_vllm_answers_as_transformers_does(blocks, tmp_path):
    pytest.importorskip("vllm", reason="the other backend needs vLLM: pip install vllm")
    job = job_for(blocks, tmp_path, num_questions=40, head_dim=64)
    eager = {"enforce_eager": True, "max_model_len": 128, "gpu_memory_utilization": 0.3}
    tasks = {}
    for backend, arguments in {"hf": {}, "vllm": eager}.items():
        out = tmp_path / f"{backend}.json"
        options = {"backend": backend, "arguments": {"dtype": "float32", **arguments}}
        assert run_job({**job, "tasks": job["tasks"] | options, "out": str(out)}, tmp_path) == ""
        tasks[backend] = json.loads(out.read_text())["tasks"]
    # accuracies, and the digests of the questions
    assert tasks["hf"] == tasks["vllm"] and tasks["hf"]["held_out_old"]["questions"] > 10


@pytest.mark.slow
@NEEDS_LM_EVAL
def test_of_lm_evals_files_those_are_read_that_names_need():
    """All, for a group of tasks in other folders; for tags, of a template or of several folders."""
    paper = composed("recipe=toy_synthetic", "tasks=paper").tasks.capabilities
    names, whole = [*chain(*paper.values())], task_manager(None)
    for asked in (names, ["kbl_bar_exam_em_criminal", "glue"], ["pythia"]):
        manager = task_manager(None, asked)
        assert _definitions(asked, manager) == _definitions(asked, whole)
        assert {*asked} <= {*manager.all_tasks}
        assert len(manager.all_tasks) < 1_000 or asked is not names
    refuse_unknown(names, whole)
    with pytest.raises(ValueError, match=r"does not know 1 of the 54 tasks .*\(no_such_task\)"):
        refuse_unknown([*names, "no_such_task"], task_manager(None, ["no_such_task"]))


@NEEDS_LM_EVAL
def test_tasks_without_an_accuracy_are_refused_before_they_are_asked(tmp_path):
    for name, text in {
        "chosen": "task: chosen\noutput_type: multiple_choice\nmetric_list: [{metric: acc}]",
        "written": "task: written\noutput_type: generate_until",
        "scored": "task: scored\nmetric_list: [{metric: f1}, {metric: bleu}]",
        "both": "group: both\ntask: [chosen, scored, both]",
        "rolled": "task: rolled\noutput_type: loglikelihood_rolling\ntag: kin",
        "said": "include: written.yaml\ntask: said\nmetric_list: [{metric: acc}]\ntag: kin",
        **{name: f"group: {name}\ntask: [{of}]" for name, of in (("void", ""), ("torn", "gone"))},
    }.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    manager = task_manager(str(tmp_path))
    refuse_unknown(["chosen"], manager)
    with pytest.raises(ValueError, match=r"written \(exact_match\), scored \(f1, bleu\):"):
        refuse_unknown(["chosen", "written", "both"], manager)
    with pytest.raises(ValueError, match=r"void \(no task\), rolled .*said \(acc of generated"):
        refuse_unknown(["kin", "void"], manager)
    with pytest.raises(ValueError, match=r"does not know 1 of the 1 tasks .*\(gone\)"):
        refuse_unknown(["torn"], manager)


@pytest.mark.slow
@NEEDS_LM_EVAL
def test_every_arm_gets_the_same_questions_through_the_command_line(tmp_path):
    """lm-eval reads a trained arm and a merged one as the base."""
    names = ("base", "no_replay", "merge_0.5")
    kept = ("dialect", "chain_0", "chain_1")
    sources = [f"domain.sources.{name}.max_bytes=30000" for name in kept]
    sources += [f"~domain.sources.chain_{i}" for i in range(2, 9)]
    run = (
        "recipe=toy_synthetic", f"run_dir={tmp_path}", f"arms=[{','.join(names)}]",
        "parallel=single", "pretrain.steps=2", "train.steps=2", *sources,
    )  # fmt: skip
    for stage in ("prepare", "pretrain", "train", "merge"):
        assert nemo_rod(stage, *run).returncode == 0
    evaluate = ("evaluate", *run, "tasks=held_out", "tasks.held_out=6")
    done = nemo_rod(*evaluate)
    assert done.returncode == 0 and "tasks of no_replay" in done.stderr, done.stderr[-2000:]
    tasks = {
        name: json.loads((tmp_path / "arms" / name / "tasks.json").read_text()) for name in names
    }
    assert len({json.dumps(result["configuration"]) for result in tasks.values()}) == 1
    assert all({*result["capabilities"]} == {"chain_0", "chain_1"} for result in tasks.values())
    assert nemo_rod("report", *run).returncode == 0
    results = json.loads((tmp_path / "report" / "results.json").read_text())["arms"]["no_replay"]
    lost = [
        max(0.0, value - tasks["no_replay"]["capabilities"][name])
        for name, value in tasks["base"]["capabilities"].items()
    ]
    assert results["task_forgetting"] == pytest.approx(sum(lost) / 2)
    assert "done before" in nemo_rod(*evaluate).stderr
    other = nemo_rod(*evaluate[:-1], "tasks.held_out=7")
    assert other.returncode == 2 and "made with tasks.held_out=6, but now it is 7" in other.stderr
