"""Every recipe has a plan; those of the paper are what the paper says."""

import dataclasses
import json
import math
import re
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from command_line import RECIPES, composed, nemo_rod
from places import ROOT

from nemo_rod.config import PEAK_TFLOPS, Config
from nemo_rod.installation import config_folder
from nemo_rod.lab.plan.command import make_plan
from nemo_rod.lab.plan.command import plan as plan_command
from nemo_rod.lab.plan.costs import PlanResult, StageCost
from nemo_rod.lab.plan.memory import check_memory
from nemo_rod.lab.plan.plan_text import count, format_plan, hours
from nemo_rod.run.model_jobs import ModelJobs
from nemo_rod.run.run_folder import RunFolder
from nemo_rod.run.variants import arm_settings

DOCUMENT = ROOT / "docs" / "recipes.md"
# Trained tokens of the paper's table 3 in G, and of its max-replay arm.
PAPER = {
    "legal_nemotron_nano_12b_v2": (12.41, 24.31),
    "german_nemotron_nano_12b_v2": (12.50, 24.80),
    "german_qwen3_5_9b": (12.42, 24.62),
    "german_qwen3_5_4b": (12.00, 27.21),
    "legal_qwen3_5_9b": (11.84, None),
}
# of the runs that are not as long as the paper's table says, trained tokens in G as they ran
AS_THEY_RAN = {
    ("legal_nemotron_nano_12b_v2", "no_replay"): 12.16,
    ("german_qwen3_5_9b", "no_replay"): 12.31,
}
OPEN = {"german_qwen3_0_6b", "german_qwen3_1_7b"}  # for one GPU
TRANSFERS = ("german_nemotron_3_nano_30b_a3b", "german_qwen3_5_35b_a3b")
LAYOUTS = sorted(
    file.relative_to(config_folder() / "parallel").with_suffix("").as_posix()
    for file in (config_folder() / "parallel").glob("*/*.yaml")
)


def plan_of(recipe: str, *overrides: str, run_dir: Path) -> PlanResult:
    return make_plan(composed(f"recipe={recipe}", f"run_dir={run_dir}", *overrides))


@cache
def as_it_is(recipe: str) -> tuple[Config, PlanResult]:
    """A recipe without any override, and its plan."""
    config = composed(f"recipe={recipe}", "run_dir=runs/that/are/not/there")
    return config, make_plan(config)


def stages(plan: PlanResult) -> dict[str, StageCost]:
    return {stage.name: stage for stage in plan.stages}


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, int | float):
        yield float(value)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_has_a_finite_plan_that_fits(recipe):
    config, plan = as_it_is(recipe)
    assert config.recipe == recipe
    kinds = {arm_settings(config, name).kind for name in config.arms}
    assert kinds <= {"base", "trained", "merged"}
    assert {spec.role for spec in config.domain.specs} == {"adaptation", "replay"}
    values = list(numbers(json.loads(json.dumps(plan.as_dict()))))
    assert len(values) > 50
    assert all(math.isfinite(number) and number >= 0 for number in values)
    check_memory(config, plan.memory)
    text = format_plan(plan)
    assert all(stage.name in text for stage in plan.stages)
    assert max(map(len, text.splitlines())) <= 160


def test_a_stage_whose_time_is_not_counted_shows_none():
    _, plan = as_it_is("german_qwen3_5_4b")
    table = format_plan(plan)
    rows = {row.split()[0]: row.split()[1:] for row in table.splitlines() if row.strip()}
    assert rows["merge_0.2"] == rows["base"] == ["8.41", "GB"]  # of disk, and no "0 s"


@pytest.mark.parametrize("recipe", TRANSFERS)
def test_a_transfer_names_the_run_that_it_follows(recipe):
    _, plan = as_it_is(recipe)
    assert any("the run that records it is not planned here" in note for note in plan.notes)
    assert "process-hours" not in format_plan(plan)


def test_a_plan_names_what_no_commit_pins(tmp_path):
    commit = "a" * 40

    def unpinned(*overrides: str) -> str:
        notes = plan_of("german_qwen3_5_4b", *overrides, run_dir=tmp_path).notes
        return next((note for note in notes if note.startswith("no commit")), "")

    assert "model.hf, domain.tokenizer, domain.sources.web," in unpinned()
    assert "domain.sources.wikipedia" not in unpinned()
    rest = unpinned(f"model.hf=org/model@{commit}", f"+domain.sources.web.revision={commit}")
    assert "model.hf" not in rest and "domain.sources.web," not in rest and "sources.pdf" in rest


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_fits_its_model_on_its_cluster(layout, tmp_path):
    model, cluster = layout.removesuffix("_one_node").split("/")
    recipe = next(recipe for recipe in RECIPES if recipe.endswith(f"_{model}"))
    overrides = (f"cluster={cluster}", f"parallel={layout}", f"run_dir={tmp_path}")
    config = composed(f"recipe={recipe}", *overrides)
    plan = make_plan(config)
    check_memory(config, plan.memory)
    assert plan.layout["processes"] % 8 == 0
    assert plan.layout["nodes"] == 1 or not layout.endswith("_one_node")


def test_every_cluster_has_every_model():
    usual = [layout for layout in LAYOUTS if not layout.endswith("_one_node")]
    clusters = {layout.split("/")[1] for layout in usual}
    models = {layout.split("/")[0] for layout in usual}
    assert set(usual) == {f"{model}/{cluster}" for model in models for cluster in clusters}
    assert {recipe.split("_", 1)[1] for recipe in {*PAPER, *TRANSFERS}} == models


@pytest.mark.parametrize("recipe", PAPER)
def test_the_papers_settings_have_its_budgets(recipe):
    config, plan = as_it_is(recipe)
    planned = stages(plan)
    budget, longer = PAPER[recipe]
    for arm in config.arms:
        if arm == "rod_transfer":  # as much as the smaller model recorded
            assert planned[arm].trained_tokens / 1e9 == pytest.approx(12.00, abs=0.006)
        elif arm.startswith(("fixed", "rod", "no_replay")):
            expected = AS_THEY_RAN.get((recipe, arm), budget)
            assert planned[arm].trained_tokens / 1e9 == pytest.approx(expected, abs=0.006)
    if longer is not None:
        assert planned["max_replay"].trained_tokens / 1e9 == pytest.approx(longer, abs=0.006)
    assert ("max_replay" in config.arms) == (longer is not None)
    assert planned["rod"].scored_tokens == 2 * planned["rod"].trained_tokens
    assert planned["rod"].scoring_share == pytest.approx(2 * 0.84 / (3 + 2 * 0.84))
    train = config.train
    assert (train.lr, train.min_lr_ratio, train.batch_size) == (1.2e-4, 0.1, 1024)
    assert (config.seed, config.domain.block_size, config.domain.holdout_seed) == (42, 4096, 42)


@pytest.mark.parametrize("recipe", [*PAPER, *sorted(TRANSFERS)])
def test_the_papers_corpora_have_its_sources(recipe):
    config, _ = as_it_is(recipe)
    specs = config.domain.specs
    roles = [spec.role for spec in specs]
    german = recipe.startswith("german")
    assert roles.count("replay") == 14
    assert roles.count("adaptation") == (9 if german else 13)
    assert {spec.subsample for spec in specs if spec.role == "replay"} == {0.2}
    largest = max(spec.subsample for spec in specs if spec.role == "adaptation")
    assert largest == (0.25 if german else 1.0)
    tokens = config.plan.adaptation_tokens + config.plan.replay_tokens
    assert tokens == pytest.approx(14.2e9 if german else 9.6e9)
    assert config.plan.replay_tokens / tokens == pytest.approx(0.65 if german else 0.5, abs=0.01)
    # the plan assumes no more than the caps allow
    caps = [spec.max_tokens for spec in specs if spec.role == "replay"]
    if german:
        assert config.plan.replay_tokens <= 1.02 * sum(caps)
        assert (config.domain.holdout_floor, config.domain.replay_ratio) == (1000, None)
    else:  # in natural proportions, as many blocks as of the adaptation corpus
        assert set(caps) == {None}
        assert config.plan.replay_tokens <= config.plan.adaptation_tokens
        assert (config.domain.holdout_floor, config.domain.replay_ratio) == (None, 1.0)
    # the end of documents in the model's pretraining
    assert config.domain.eod == (2 if "nemotron" in recipe else None)


def test_work_that_is_not_counted_is_noted(tmp_path):
    thinned, german = "after prepare has tokenised all of it", as_it_is("german_qwen3_5_9b")[1]
    assert any(thinned in note for note in as_it_is("legal_qwen3_5_9b")[1].notes)
    assert not any(thinned in note or "tasks" in note for note in german.notes)
    with_tasks = plan_of("german_qwen3_5_9b", "tasks=paper", run_dir=tmp_path)
    assert "evaluate is planned without the questions of tasks." in with_tasks.notes
    notes = plan_of("german_qwen3_0_6b", "~cluster", run_dir=tmp_path).notes  # a run takes it, too
    assert any(note.startswith("no cluster is named, so the plan is a CPU's") for note in notes)


def test_a_type_whose_activations_were_not_measured_is_noted(monkeypatch, tmp_path):
    unmeasured = "planned like those of other types, and were never measured"
    assert not any(unmeasured in note for note in as_it_is("german_qwen3_5_9b")[1].notes)
    monkeypatch.setattr("nemo_rod.lab.plan.command.MEASURED", ())
    plan = plan_of("german_qwen3_5_9b", run_dir=tmp_path)
    assert f"activations of 'qwen3_5_text' models are {unmeasured}" in plan.notes[0]


# recipe, arm: steps, warm-up, decay, of the authors' table of runs
RUNS = {
    ("legal_nemotron_nano_12b_v2", "rod"): (2958, 50, 616),
    ("legal_nemotron_nano_12b_v2", "no_replay"): (2898, 25, 580),
    ("legal_nemotron_nano_12b_v2", "fixed_20"): (2958, 25, 615),
    ("legal_nemotron_nano_12b_v2", "max_replay"): (5795, 25, 1159),
    ("legal_nemotron_nano_12b_v2", "rod_beyond"): (3538, 50, 616),
    ("legal_nemotron_nano_12b_v2", "rod_m1.5"): (3538, 38, 616),
    ("legal_nemotron_nano_12b_v2", "rod_m4"): (3840, 100, 616),
    ("legal_nemotron_nano_12b_v2", "rod_m8"): (3538, 200, 616),
    ("legal_nemotron_nano_12b_v2", "rho_rho"): (3538, 100, 616),
    ("german_nemotron_nano_12b_v2", "rod"): (2980, 50, 592),
    ("german_nemotron_nano_12b_v2", "no_replay"): (2980, 25, 591),
    ("german_nemotron_nano_12b_v2", "fixed_65"): (2980, 25, 591),
    ("german_nemotron_nano_12b_v2", "max_replay"): (5913, 25, 1183),
    ("german_nemotron_nano_12b_v2", "rod_beyond"): (3538, 50, 616),
    ("german_qwen3_5_4b", "rod"): (2862, 50, 588),
    ("german_qwen3_5_4b", "no_replay"): (2862, 25, 587),
    ("german_qwen3_5_9b", "no_replay"): (2935, 25, 587),
    ("german_qwen3_5_9b", "rod_small_reference"): (2960, 50, 588),
    ("german_qwen3_5_9b", "rod_transfer"): (2862, 25, 588),
    ("legal_qwen3_5_9b", "rod"): (2824, 50, 550),
    ("legal_qwen3_5_9b", "no_replay"): (2824, 25, 549),
    ("legal_qwen3_5_9b", "fixed_50"): (2824, 25, 299),
    ("german_nemotron_3_nano_30b_a3b", "fixed_32"): (3538, 25, 640),
    ("german_nemotron_3_nano_30b_a3b", "rod_transfer"): (3538, 25, 616),
    ("german_qwen3_5_35b_a3b", "rod_transfer"): (2862, 25, 612),
    # longer ones, with a decay of a fifth
    ("german_nemotron_nano_12b_v2", "fixed_17_long"): (3285, 25, 657),
    ("german_nemotron_nano_12b_v2", "fixed_32_long"): (3695, 25, 739),
    ("german_qwen3_5_9b", "fixed_17_long"): (3261, 25, 652),
    ("german_qwen3_5_9b", "fixed_32_long"): (3668, 25, 734),
    ("german_qwen3_5_4b", "fixed_17_long"): (3551, 25, 710),
    ("german_qwen3_5_4b", "fixed_32_long"): (4323, 25, 865),
    ("legal_nemotron_nano_12b_v2", "fixed_10_long"): (3220, 25, 644),
    ("legal_nemotron_nano_12b_v2", "fixed_20_long"): (3620, 25, 724),
    ("legal_qwen3_5_9b", "max_replay"): (5735, 25, 1147),
}


@pytest.mark.parametrize(("recipe", "arm"), RUNS)
def test_schedules_are_those_that_ran(recipe, arm):
    train = arm_settings(as_it_is(recipe)[0], arm).train
    assert (train.steps, train.warmup, train.decay) == RUNS[recipe, arm]


def test_ablations_hold_the_share_that_the_authors_held():
    config, _ = as_it_is("legal_nemotron_nano_12b_v2")
    for arm in ("random_random", "random_rho", "rho_random", "rho_rho"):
        settings = arm_settings(config, arm)
        assert (settings.variant.share, settings.selection.multiplier) == (0.072, 4)
    retained = {
        arm_settings(as_it_is(r)[0], a).variant.retention
        for r, a in (("legal_qwen3_5_9b", "fixed_10"), ("german_qwen3_5_4b", "fixed_17"))
    }
    assert retained == {0.111}


def test_the_larger_model_trains_on_the_smaller_ones_blocks():
    small, large = (
        as_it_is(f"german_{m}")[0] for m in ("nemotron_nano_12b_v2", "nemotron_3_nano_30b_a3b")
    )
    assert large.domain == small.domain and large.model.special_tokens == "renamed"
    of = ModelJobs(large, RunFolder(Path("runs/large"), "large"))
    file = of.curriculum_file(of.settings("rod_transfer"))
    assert file == Path("runs/german_nemotron_nano_12b_v2/arms/rod_beyond/curriculum.rod")
    steps = arm_settings(small, "rod_beyond").train.steps
    assert of.settings("rod_transfer").train.steps == steps == 3538


@pytest.mark.parametrize("recipe", sorted(OPEN))
def test_a_night_on_one_gpu_is_enough(recipe):
    config, plan = as_it_is(recipe)
    assert plan.layout["processes"] == 1 and plan.memory.limit == 79 * 2**30
    hours = sum(stage.hours for stage in plan.stages)
    controls = sum(stage.hours for stage in plan.stages if stage.name == "controls")
    assert 2 < hours - controls < hours < 10
    assert {"no_replay", "rod"} < {*config.arms}
    assert sum(arm.startswith("fixed") for arm in config.arms) == 3  # one like RoD
    gated = ("nvidia/", "bigcode/")
    paths = [str(spec.path) for spec in config.domain.specs]
    assert not any(path.startswith(gated) for path in paths)


def test_a_plan_by_hand(tmp_path):
    plan = plan_of("legal_qwen3_5_9b", "plan.startup_seconds=0", run_dir=tmp_path)
    per_token = plan.model["forward_flops"]
    share = 819.2 / 2500  # Qwen3.8-27B, the only run of its family
    rate = 16 * 2250e12 * share
    rod = stages(plan)["rod"]
    assert rod.update_seconds == pytest.approx(3 * per_token * 1024 * 4096 / rate)
    assert rod.scoring_seconds == pytest.approx(rod.update_seconds * 2 * 0.84 / 3)
    step = rod.update_seconds + rod.scoring_seconds
    saves = 15 * 14 * plan.model["parameters"] / 5e9  # 25 s each
    assert rod.gpu_hours == pytest.approx((2824 * step + saves) * 16 / 3600)


CLUSTERS = sorted(file.stem for file in (config_folder() / "cluster").glob("*_[18].yaml"))


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_toys_can_be_planned_on_any_cluster(cluster, tmp_path):
    plan = plan_of("toy_synthetic", f"cluster={cluster}", "parallel=single", run_dir=tmp_path)
    gpu = str(plan.layout["gpu"])
    assert plan.memory.fits and plan.assumptions["peak_tflops"] == PEAK_TFLOPS[gpu]["fp32"]


def test_layouts_that_are_shipped_and_fit_are_named(tmp_path):
    recipe = ("recipe=legal_nemotron_nano_12b_v2", "cluster=h100_8", f"run_dir={tmp_path}")
    done = nemo_rod("plan", *recipe)
    assert done.returncode == 2
    assert done.stderr.rstrip().endswith(" parallel=nemotron_nano_12b_v2/h200_8 fits."), done.stderr
    listed = re.findall(r"parallel=(\S+) +(\d+) H100 +.+ GPU-hours", done.stdout)
    assert {name.rpartition("/")[2] for name, _ in listed} == {
        "h100_8",
        "h100_8_one_node",
        "h200_8",
    }
    assert nemo_rod("plan", *recipe, f"parallel={listed[0][0]}").returncode == 0
    refused = nemo_rod("plan", *recipe, "parallel=tp2")
    assert "Key 'scoring.micro_batch_size' has no value" in refused.stderr
    assert "or choose parallel=nemotron_nano_12b_v2/b200_8 or nemotron_nano" in refused.stderr


@pytest.mark.parametrize(
    ("model", "alone"),
    [
        *(("smollm2_135m", True), ("smollm2_360m", True), ("smollm2_1_7b", True)),
        *(("llama3_2_1b", True), ("llama3_2_3b", False), ("gemma3_1b", True), ("gemma3_4b", False)),
        *(("qwen3_4b", False), ("qwen3_8b", False)),
    ],
)
def test_an_open_model_has_layouts_of_one_and_of_eight_gpus(model, alone, tmp_path, capsys):
    at = (f"run_dir={tmp_path}", f"model={model}", "cluster=h100_8")
    config = composed("recipe=german_smollm2_135m", *at, "parallel=single")
    # here and not in a fork: transformers, which knows the shape of a Gemma, is imported once
    with nullcontext() if alone else pytest.raises(ValueError, match="The layout does not fit"):
        plan_command(config)
    rows = re.findall(r"(?m)^    parallel=(\S+) +(\d) H100 ", capsys.readouterr().out)
    assert (("single", "1") in rows) == alone
    assert {("dp8", "8"), ("tp2_dp4", "8")} & {*rows}


def test_a_dry_submission_says_what_it_would_take(tmp_path):
    words = ("launcher=slurm", "cluster.account=a", "cluster.partition=p", "dry_run=true")
    done = nemo_rod("run", "recipe=legal_qwen3_5_9b", f"run_dir={tmp_path / 'run'}", *words)
    assert done.returncode == 0, done.stderr
    *lines, rendered = done.stderr.splitlines()
    # others are on the disk or the memory, where they are small
    (size,) = [line for line in lines if re.match(r"2 nodes of 8 B200 for a job; [\d,.]+ G", line)]
    assert "GPU-hours in all; the longest chain takes" in size
    assert "references_specialist -> rod -> schedule_like_rod -> evaluate -> controls" in size
    assert size.endswith("; no image") and "none submitted" in rendered


def test_existing_blocks_are_counted(tmp_path, capsys):
    overrides = ("domain.sources.dialect.max_bytes=9000", f"run_dir={tmp_path}")
    config = composed("recipe=toy_synthetic", *overrides)
    assert make_plan(config).corpus["source"] != "counted"
    assert nemo_rod("prepare", "recipe=toy_synthetic", *overrides).returncode == 0
    config.dry_run = True
    plan_command(config)
    assert "(counted)" in capsys.readouterr().out and not (tmp_path / "plan.json").exists()
    config.dry_run = False
    plan_command(config)
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["corpus"]["adaptation_tokens"] == 9000 // 64 * 64
    assert written["total"]["gpu_hours"] > 0


def test_a_layout_that_does_not_fit_is_shown_and_refused(tmp_path):
    large = ("recipe=legal_nemotron_nano_12b_v2", "cluster=h100_8", f"run_dir={tmp_path}/runs/new")
    done = nemo_rod("plan", *large, "train.micro_batch_size=2")
    assert done.returncode == 2
    assert "DOES NOT FIT" in done.stdout
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith("nemo-rod: The layout does not fit: a GPU of stage 0 would need ")
    assert "and has 79 GiB. Most are activations: set train.recompute=full, lower" in sentence
    assert (tmp_path / "runs" / "new" / "plan.json").is_file()
    # nor is it submitted
    slurm = ("launcher=slurm", "cluster.account=a", "cluster.partition=p", "dry_run=true")
    done = nemo_rod("train", "arm=no_replay", *large, *slurm)
    assert done.returncode == 2 and "nemo-rod: The layout does not fit" in done.stderr
    assert not (tmp_path / "runs" / "new" / "launch").exists()


def test_a_host_without_room_for_the_optimizer_is_refused(tmp_path):
    layout = ("cluster=h100_8", "parallel=nemotron_3_nano_30b_a3b/h100_8_one_node")
    arguments = ("recipe=german_nemotron_3_nano_30b_a3b", *layout, f"run_dir={tmp_path}")
    config = composed(*arguments, "cluster.node_memory_gib=300")
    memory = make_plan(config).memory
    assert memory.parts["optimizer"] == 0 and 8 * memory.host > 300 * 2**30
    with pytest.raises(ValueError, match=r"optimizer_offload=true puts 3\d\d GiB on a node with"):
        check_memory(config, memory)
    check_memory(composed(*arguments), memory)


@pytest.mark.parametrize(
    "settings", [{"recompute": "full", "micro_batch_size": 1}, {"micro_batch_size": 2}]
)
def test_an_arm_is_planned_by_its_own_settings(settings, tmp_path):
    recipe, arms = "legal_nemotron_nano_12b_v2", "arms=[base,no_replay,rod]"
    variant = ", ".join(f"{key}: {value}" for key, value in settings.items())
    variant = f"+variants.own={{of: rod, train: {{{variant}}}}}"
    own = plan_of(recipe, "arms=[base,no_replay,rod,own]", variant, run_dir=tmp_path)
    overrides = (f"train.{key}={value}" for key, value in settings.items())
    every = plan_of(recipe, arms, *overrides, run_dir=tmp_path)
    plain = plan_of(recipe, arms, run_dir=tmp_path)
    assert dataclasses.replace(stages(own)["own"], name="rod") == stages(every)["rod"]
    assert stages(own)["rod"] == stages(plain)["rod"]
    assert (plain.memory, stages(plain)["rod"]) != (every.memory, stages(every)["rod"])
    memories = [plain.memory, every.memory]
    assert own.memory == max(memories, key=lambda memory: memory.total)


def test_a_gpu_of_unknown_memory_is_not_judged(tmp_path):
    plan = plan_of("legal_qwen3_5_9b", "cluster.gpu_memory_gib=0", run_dir=tmp_path)
    assert plan.memory.limit is None and plan.memory.fits


def test_a_local_checkpoint_gives_its_own_shape(tmp_path):
    config = {"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
              "num_hidden_layers": 2, "num_attention_heads": 4}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = plan_of("legal_qwen3_5_9b", f"model.hf={tmp_path}", run_dir=tmp_path)
    assert plan.model["parameters"] == 2 * 512 * 64 + 64 + 2 * (4 * 64**2 + 3 * 64 * 128 + 2 * 64)


def test_the_documents_table_is_what_the_plans_say():
    rows = []
    for recipe in (recipe for recipe in RECIPES if not recipe.startswith("toy")):
        config, plan = as_it_is(recipe)
        train = config.train
        corpus = plan.corpus["adaptation_tokens"] + plan.corpus["replay_tokens"]
        budget = train.steps * train.batch_size * config.domain.block_size
        cells = [
            f"`{recipe}`",
            f"{plan.model['name'].split('/')[-1]}, {count(plan.model['parameters']).strip()}",
            f"{count(corpus)}, {plan.corpus['adaptation_tokens'] / corpus:.0%} new",
            f"{train.steps:,} steps, {count(budget).strip()}",
            plan.layout["text"].split(";")[0],
            hours(plan.gpu_hours) if plan.layout["gpu"] else "a CPU will do",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    text = DOCUMENT.read_text()
    missing = [row for row in rows if row not in text]
    assert not missing, "docs/recipes.md should have these rows:\n" + "\n".join(missing)


def test_finished_steps_are_compared_with_the_plan(tmp_path):
    (tmp_path / "arms" / "no_replay").mkdir(parents=True)
    times = enumerate((9.0, 4.0, 5.0))
    rows = [json.dumps({"step": step, "timing/train/update": seconds}) for step, seconds in times]
    torn = '{"timing/train/upd'
    (tmp_path / "arms" / "no_replay" / "metrics.jsonl").write_text("\n".join([*rows, torn]))
    plan = plan_of("legal_qwen3_5_9b", run_dir=tmp_path)
    planned = stages(plan)["no_replay"].update_seconds
    (note,) = [note for note in plan.notes if "scoring aside" in note]
    assert note.startswith("no_replay took 5 s a step, scoring aside; planned are ")
    assert f"plan.utilisation={819.2 / 2500 * planned / 5:.2g} would plan that" in note


def test_a_plan_counts_the_run_that_an_arm_follows(tmp_path):
    elsewhere = "+variants.rod_transfer={of: rod, curriculum: runs/smaller/arms/rod}"
    arms = "arms=[no_replay,rod,schedule_like_rod,rod_transfer]"
    notes = plan_of("toy_synthetic", arms, elsewhere, run_dir=tmp_path).notes
    (note,) = (note for note in notes if note.startswith("cost in all"))
    found = re.findall(r"(\w+) (\d+\.\d\d) \+ (\d+\.\d\d)", note)
    costs = {name: (float(own), float(others)) for name, own, others in found}
    assert {*costs} == {"rod", "schedule_like_rod"}
    assert costs["schedule_like_rod"] == pytest.approx((1.0, sum(costs["rod"])), abs=0.011)
    (note,) = (note for note in notes if "rod_transfer follows" in note)
    assert "runs/smaller/arms/rod, which is not there: the run that records it is not plan" in note
    (tmp_path / "there").mkdir()
    there = f"+variants.rod_transfer={{of: rod, curriculum: {tmp_path}/there}}"
    notes = plan_of("toy_synthetic", arms, there, run_dir=tmp_path).notes
    assert not any("rod_transfer follows" in note for note in notes)
