"""A rehearsal's recipe is derived from the real one: only sizes and places change."""

import dataclasses
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import OF_THE_PAPER, composed
from omegaconf import OmegaConf

from nemo_rod import parts
from nemo_rod.config import Config, Parallel
from nemo_rod.corpus.sources import takes
from nemo_rod.files import flat, write_json
from nemo_rod.installation import config_folder
from nemo_rod.lab.rehearsal import command, derive
from nemo_rod.lab.rehearsal.command import TABLE, rehearsal_folder, rehearse, small_model
from nemo_rod.lab.rehearsal.forms import SIZES, small_form
from nemo_rod.lab.rehearsal.table import FAILED, LEFT_OUT, as_dict
from nemo_rod.run.checks import check

pytest.importorskip("transformers")
LAYOUTS = sorted((config_folder() / "parallel").glob("*/*.yaml"))
needs_qwen3_5 = pytest.mark.skipif(
    find_spec("transformers.models.qwen3_5") is None,
    reason="this transformers has no Qwen3.5 and no Nemotron-H",
)
LAYERS = ("num_hidden_layers", "hybrid_override_pattern")
# keys that may differ, besides those of sources and variants
CHANGED = {
    *("run_dir", "arm", "rebuild", "parallel", "model.hf", "model.shape"),
    *("domain.tokenizer", "domain.eod", "domain.block_size"),
    *("domain.workers", "domain.sources", "train.steps", "train.batch_size"),
    *("train.warmup_steps", "train.decay_steps"),
    *("train.micro_batch_size", "scoring.micro_batch_size", "checkpoint.every"),
    *("validation.every", "validation.blocks", "variants", "cluster.gpu_memory_gib"),
    *("cluster.gpus_per_node", "cluster.node_memory_gib", "report", "tasks.limit", "plan"),
}


def derived(recipe: str, *overrides: str, processes: int | None = None) -> tuple[Config, Config]:
    config = composed(f"recipe={recipe}", *overrides)
    parallel, _ = derive.small_layout(config.parallel, processes)
    small = derive.cut_short(config, Path("somewhere") / "else", scale=8 / config.train.steps)
    derive.shrink(small, parallel, tokenizer=None)
    derive.cap_sources(small)
    return config, small


@pytest.mark.parametrize("recipe", OF_THE_PAPER[::3])
def test_only_sizes_and_places_change(recipe):
    config, small = derived(recipe)
    check(small)
    before, after = (flat(dataclasses.asdict(c)) for c in (config, small))
    different = {key for key in {*before, *after} if before.get(key) != after.get(key)}
    wrong = [key for key in different if not any(key.startswith(name) for name in CHANGED)]
    assert not wrong
    assert small.arms == config.arms
    assert small.plan.adaptation_tokens is small.plan.replay_tokens is None
    assert small.train.steps == 8 and small.train.batch_size == derive.BATCH_SIZE
    assert small.model.precision == config.model.precision
    for name, source in config.domain.sources.items():
        rehearsed = small.domain.sources[name]
        changed = {key for key in source if source[key] != rehearsed[key]}
        assert changed <= {"max_tokens", "dedup"}, name
        assert rehearsed["max_tokens"] < 400 * small.domain.block_size
    for name, variant in config.variants.items():
        changed = {k for k in variant if variant[k] != small.variants[name][k]}
        assert changed <= {"steps", "curriculum", "reference", "train"}, name


def test_steps_keep_their_proportion():
    config, small = derived("german_qwen3_5_4b")
    train, shrunk = config.train, small.train
    assert (train.steps, train.warmup_steps, train.decay_steps) == (2862, 50, 588)
    assert (shrunk.steps, shrunk.warmup_steps, shrunk.decay_steps) == (8, 0, 2)
    longer, shorter = (c.variants["max_replay"] for c in (config, small))
    assert (longer["steps"], longer["train"]) == (6487, {"warmup_steps": 25, "decay_steps": 1298})
    assert (shorter["steps"], shorter["train"]) == (18, {"warmup_steps": 0, "decay_steps": 4})


@pytest.mark.parametrize("file", LAYOUTS, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_axis_above_one_stays_above_one(file):
    layout = Parallel(**OmegaConf.load(file).parallel)
    small, lost = derive.small_layout(layout, None)
    for axis in ("data", "tensor", "pipeline", "context", "virtual_pipeline", "expert"):
        assert getattr(small, axis) == min(2, getattr(layout, axis)), axis
    assert small.sequence == layout.sequence
    assert not lost


@pytest.mark.parametrize(
    ("parallel", "processes", "expected", "lost"),
    [
        (Parallel(data=8), 1, Parallel(), ["data"]),
        (Parallel(data=4, tensor=4, sequence=True), 2, Parallel(tensor=2, sequence=True), ["data"]),
        (Parallel(data=4, tensor=4, sequence=True), 1, Parallel(), ["data", "tensor"]),
        (Parallel(data=16, pipeline=2, expert=8), 2, Parallel(pipeline=2), ["data", "expert"]),
    ],
)  # fmt: skip
def test_what_too_few_processes_cannot_keep_is_named(parallel, processes, expected, lost):
    assert derive.small_layout(parallel, processes) == (expected, lost)


@needs_qwen3_5
@pytest.mark.parametrize(
    ("recipe", "class_name", "pattern", "tied"),
    [
        ("german_qwen3_5_4b", "Qwen3_5ForConditionalGeneration", "linear", True),
        ("german_qwen3_5_9b", "Qwen3_5ForConditionalGeneration", "linear", False),
        ("german_qwen3_5_35b_a3b", "Qwen3_5MoeForConditionalGeneration", "linear", False),
        ("german_nemotron_nano_12b_v2", "NemotronHForCausalLM", "M-M-M-M*", False),
        ("german_nemotron_3_nano_30b_a3b", "NemotronHForCausalLM", "MEMEM*", False),
    ],
)
def test_a_model_in_small_keeps_what_decides_which_code_runs(recipe, class_name, pattern, tied):
    config = composed(f"recipe={recipe}")
    small = small_model(config, stages=2)
    assert config.model.shape is not None
    assert small.class_name == class_name
    text = small.values.get("text_config", small.values)
    assert text["tie_word_embeddings"] is small.values["tie_word_embeddings"] is tied
    if "nemotron" in recipe:
        assert text["hybrid_override_pattern"] == 2 * pattern
        assert text["num_hidden_layers"] == 2 * len(pattern)
        assert small.predictors == 0
    else:
        assert text["num_hidden_layers"] == 2 * config.model.shape["full_attention_interval"]
        assert text["mtp_num_hidden_layers"] == small.predictors == 1
        assert "vision_config" in small.values
    for key, value in config.model.shape.items():
        if key not in {*SIZES, "model_type", "architectures", *LAYERS}:
            assert text[key] == value, key


@needs_qwen3_5
def test_experts_in_small_are_stored_as_they_are_published(tmp_path):
    """All of a layer in one tensor, but those of the head for further tokens one by one."""
    from safetensors.torch import load_file

    from nemo_rod.lab.rehearsal.small_checkpoint import write_checkpoint

    small = small_model(composed("recipe=german_qwen3_5_35b_a3b"))
    write_checkpoint(small, tmp_path / "checkpoint", precision="bf16")
    text = small.values["text_config"]
    layers, experts = range(text["num_hidden_layers"]), range(text["num_experts"])
    stored = load_file(tmp_path / "checkpoint" / "model.safetensors")
    whole, alone = ("gate_up_proj", "down_proj"), ("gate_proj", "up_proj", "down_proj")
    assert {name for name in stored if ".experts." in name} == {
        *(f"model.language_model.layers.{n}.mlp.experts.{p}" for n in layers for p in whole),
        *(f"mtp.layers.0.mlp.experts.{n}.{p}.weight" for n in experts for p in alone),
    }


@pytest.mark.parametrize(
    ("described", "stages", "expected"),
    [
        # sizes of the published model that are smaller stay
        ({"model_type": "llama", "num_key_value_heads": 1}, 1, {"num_key_value_heads": 1}),
        ({"model_type": "llama", "num_key_value_heads": 32}, 2,
         {"num_key_value_heads": 4, "num_hidden_layers": 4}),
        # without the head for further tokens, and the images, of the published one
        pytest.param(
            {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"],
             "layer_types": ["linear_attention", "full_attention"] * 8, "num_hidden_layers": 16,
             "mtp_num_hidden_layers": 0, "rms_norm_eps": 0.5}, 1,
            {"layer_types": ["linear_attention", "full_attention"], "rms_norm_eps": 0.5},
            marks=needs_qwen3_5,
        ),
        # five layers with a window and one without, for every stage
        ({"model_type": "gemma3_text"}, 2, {"num_hidden_layers": 12, "sliding_window": 32}),
        # a dense layer, and one with experts
        ({"model_type": "deepseek_v3"}, 1, {"first_k_dense_replace": 1, "num_hidden_layers": 2}),
        # as transformers saves it: heads of 8 channels, 64 in all
        ({"model_type": "falcon_h1", "mamba_d_ssm": 1024, "mamba_d_head": 8, "mamba_n_heads": 128,
          "time_step_limit": [0.0, {"__float__": "Infinity"}]}, 1,
         {"mamba_d_ssm": 64, "time_step_limit": [0.0, float("inf")]}),
    ],
)  # fmt: skip
def test_any_model_that_transformers_builds_is_shrunk_by_its_keys(described, stages, expected):
    small = small_form(described, where="some/model", stages=stages)
    assert {key: small.values[key] for key in expected} == expected
    assert small.values["hidden_size"] == SIZES["hidden_size"] and small.predictors == 0


def test_transfers_name_the_runs_that_are_rehearsed_first():
    run, others = "runs/german_qwen3_5_4b", Path.cwd() / "somewhere/else/others"
    config, small = derived("german_qwen3_5_9b")
    assert derive.other_runs(config) == {run: ["no_replay", "rod"]}
    other = others / "runs--german_qwen3_5_4b"
    assert small.variants["rod_small_reference"]["reference"] == str(other)
    assert small.variants["rod_transfer"]["curriculum"] == str(other / "arms" / "rod")
    assert derive.other_runs(composed("recipe=german_qwen3_5_35b_a3b")) == {run: ["rod"]}
    assert derive.other_runs(composed("recipe=german_qwen3_5_4b")) == {}
    config, small = derived("german_nemotron_3_nano_30b_a3b")
    assert derive.other_runs(config) == {"runs/german_nemotron_nano_12b_v2": ["rod_beyond"]}
    recorded = others / "runs--german_nemotron_nano_12b_v2" / "arms" / "rod_beyond"
    assert small.variants["rod_transfer"]["curriculum"] == str(recorded)
    assert small.domain.eod == 2 and small.domain.tokenizer == config.domain.tokenizer


def test_a_run_on_several_nodes_is_rehearsed_on_two():
    _, small = derived("german_nemotron_nano_12b_v2", "cluster=h100_8",
                       "parallel=nemotron_nano_12b_v2/h100_8")  # fmt: skip
    assert (small.parallel.world_size, small.cluster.gpus_per_node) == (4, 2)
    _, small = derived("german_qwen3_5_4b")  # on one
    assert (small.parallel.world_size, small.cluster.gpus_per_node) == (2, 8)


def test_text_is_made_up_only_where_the_users_cannot_be_read(monkeypatch):
    reader = SimpleNamespace(
        value="own:read", load=lambda: takes("files")(lambda spec: [])
    )  # no max_bytes
    monkeypatch.setattr(parts, "all_entry_points", lambda: ({}, {"readers": {"own": reader}}))
    config, small = derived("german_qwen3_5_4b")
    mine = {
        "new": {"role": "adaptation", "kind": "jsonl", "files": ["new/*.jsonl"], "dedup": True},
        "rows": {"role": "replay", "kind": "own", "files": ["here.db"]},
        "ids": {"role": "replay", "kind": "megatron", "files": ["a"], "max_tokens": 70},
        "blend": {"role": "replay", "kind": "megatron", "files": [0.3, "a", 0.7, "b"]},
        "web": {"role": "replay", "kind": "huggingface", "path": "some/web"},
        "news": {"role": "replay", "kind": "huggingface", "path": "some/news"},
    }
    config.domain = dataclasses.replace(config.domain, sources=mine)
    small.domain = dataclasses.replace(small.domain, sources=mine)
    unread = derive.sources_out_of_reach(config, {"domain.sources.web.path"})
    assert [*unread] == ["blend", "web"]
    assert {"ids", "blend"} <= {*derive.sources_out_of_reach(config, {"domain.tokenizer"})}
    derive.cap_sources(small, unread)
    read = small.domain.sources
    cap = read["rows"]["max_tokens"]
    assert read["rows"] == mine["rows"] | {"max_tokens": cap, "dedup": False}
    assert (read["new"]["files"], read["new"]["dedup"]) == (["new/*.jsonl"], False)
    assert (read["ids"]["max_tokens"], read["news"]["path"]) == (70, "some/news")
    assert {read[name]["kind"] for name in unread} == {"synthetic"}
    assert read["web"]["files"] != read["blend"]["files"] and read["web"]["max_tokens"] == cap


@pytest.fixture
def config(tmp_path):
    return composed("recipe=german_qwen3_5_4b", f"run_dir={tmp_path}/real")


def test_runs_that_use_each_other_are_rehearsed_on_as_much_text(tmp_path, monkeypatch):
    asked = {}

    def made(config, folder, scale, notes, least):
        asked[config.recipe] = least
        raise ValueError("enough")

    monkeypatch.setattr(command, "make_rehearsal", made)
    monkeypatch.setattr(command, "_recipe_for", lambda run: composed(f"recipe={run[5:]}"))
    command._rehearse(composed("recipe=german_qwen3_5_9b"), tmp_path, scale=0.003)
    assert asked["german_qwen3_5_4b"] == asked["german_qwen3_5_9b"] > 2 * 8


def test_a_job_that_ends_before_its_stage_begins_has_failed(config, monkeypatch):
    monkeypatch.setattr(command, "execute", lambda *_, **__: None)
    first, *others = command._run(config)
    assert first.state == FAILED and first.note.endswith("/logs/slurm")
    assert {row.state for row in others} == {LEFT_OUT}


@pytest.mark.parametrize("folder", ["real", "real/inside", "."])
def test_a_rehearsal_keeps_to_a_folder_of_its_own(config, folder, tmp_path):
    config.rehearsal.run_dir = str(tmp_path / folder)
    with pytest.raises(ValueError, match="never writes into the folder of the real run"):
        rehearse(config)
    assert not (tmp_path / "real").exists()


def test_a_rehearsal_is_recognised(config, tmp_path):
    folder = tmp_path / "real_rehearsal"
    folder.mkdir()
    assert rehearsal_folder(config) == folder
    (folder / "thesis.tex").touch()
    with pytest.raises(ValueError, match="holds files, and no rehearsal"):
        rehearsal_folder(config)
    write_json(folder / TABLE, as_dict("german_qwen3_5_4b", [], None))  # as at its beginning
    assert rehearsal_folder(config) == folder


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"recipe": "Pflaumenmus", "rows": []}', "no JSON", "\xff"]
)
def test_a_file_of_the_tables_name_is_not_yet_a_rehearsal(config, content, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    (folder / TABLE).write_bytes(content.encode("latin-1"))
    config.rehearsal.run_dir = str(folder)
    with pytest.raises(ValueError, match="holds files, and no rehearsal"):
        rehearse(config)
    assert {file.name for file in folder.iterdir()} == {"thesis.tex", TABLE}
