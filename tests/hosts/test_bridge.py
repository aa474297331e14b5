"""A stock Megatron-Bridge job, before and after the selector is swapped in.

The job reads GPTDatasets of a `.bin/.idx` blend of two corpora that megatron-core's own builder
wrote. What it trains on is compared with what a stock job trains on, and with plain arithmetic.
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from command_line import here
from places import ROOT, WORKERS
from swap_in_oracle import BATCH, MULTIPLIER, RECIPES, Jobs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nemo_rod.loggers import shown_name
from nemo_rod.selection import Choice, Pool, References, SourceRow
from nemo_rod.selection.mix import Mix

pytestmark = pytest.mark.timeout(1800)  # the first test also waits for the jobs of all

STEPS = 6
HALF = MULTIPLIER * STEPS * BATCH // 2  # samples of each corpus; replay is the second
RECIPE = RECIPES / "megatron_bridge"
ALONE: tuple[int, dict[str, Any]] = (1, {})
# processes, and keys of the job; `test_shipped_recipes.py` has context and expert parallelism
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "tp2": (2, {"model.tensor_model_parallel_size": 2}),
    "pp2": (2, {"model.pipeline_model_parallel_size": 2}),
    # interleaved: the two layers are one virtual stage each, between embedding and loss
    "pp2_vpp2": (
        2,
        {
            "model.pipeline_model_parallel_size": 2,
            "model.pipeline_model_parallel_layout": "E|t|t|L",
            "model.overlap_p2p_comm": True,
            "model.batch_p2p_comm": False,
        },
    ),
    "dp4": (4, {}),
}
ROD = {"kind": "joint", "base": "base", "references": ["refs_new", "refs_old"], "steps": STEPS}
MIX = {**ROD, "kind": "mix", "references": ["refs_old"], "validation_every": 2}
SCORE_NEW = {"kind": "score", "role": "adaptation", "base": "specialist", "steps": STEPS}
SCORE_OLD = {"kind": "score", "role": "replay", "base": "base", "steps": STEPS}
MASKED = {
    "dataset.eod_mask_loss": True,
    "dataset.reset_position_ids": True,
    "dataset.reset_attention_mask": True,
    "dataset.skip_getting_attention_mask_from_dataset": False,
}
SHARDED = {
    "optimizer.use_distributed_optimizer": True,
    "ddp.use_distributed_optimizer": True,
    "ddp.overlap_grad_reduce": True,
    "ddp.overlap_param_gather": True,
}
NEW_LOSS = "validation/adaptation/new/text_document/loss"
REPLAY_LOSS = "validation/replay/old/text_document/loss"
WATCH = {"kind": "watch", "base": "base", "steps": STEPS}
LONG = {**ROD, "steps": 8, "references": ["long_new", "long_old"]}


def new_alone(root: Path) -> dict[str, Any]:
    """Keys of a job that trains on the new corpus, and is validated on both."""
    new, old = (f"{root}/data/{name}/text_document" for name in ("new", "old"))
    blends = [[[new], [1.0]], [[new, old], [1.0, 1.0]], None]
    return {"dataset.blend": None, "dataset.split": None, "dataset.blend_per_split": blends}


class BridgeJobs(Jobs):
    """Runs jobs of the worker."""

    def run(
        self, processes: int, layout: dict[str, Any], *runs: dict[str, Any], **options: Any
    ) -> None:
        spec = self.root / f"{runs[0]['name']}.json"
        spec.write_text(json.dumps({"root": str(self.root), "layout": layout, "runs": list(runs)}))
        self.torchrun(processes, WORKERS / "swap_in_worker.py", spec, timeout=1500, **options)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory, torchrun):
    """A base that knows the old corpus, a specialist of the new one, both references; one process.

    And the job itself: stock, watched, with RoD, and with RoD where every step runs twice.
    """
    jobs = BridgeJobs(tmp_path_factory.mktemp("swap_in"), torchrun)
    jobs.run(
        *ALONE,
        {"name": "base", "kind": "stock", "steps": 10, "corpora": ["old"]},
        {"name": "specialist", "kind": "stock", "base": "base", "steps": 10, "corpora": ["new"]},
        {"name": "refs_new", **SCORE_NEW},
        # keys that the job resumes by are not the reference model's, or replay would not score 0
        {
            **SCORE_OLD,
            "name": "refs_old",
            "settings": {
                "checkpoint.ckpt_step": 5,
                "checkpoint.non_persistent_ckpt_type": "global",
                "checkpoint.non_persistent_global_ckpt_dir": str(jobs.root / "specialist"),
            },
        },
        {"name": "stock", "kind": "stock", "base": "base", "steps": STEPS},
        {**WATCH, "name": "watch"},
        {**WATCH, "name": "of_new_alone", "corpora": ["new"], "settings": new_alone(jobs.root)},
        {"name": "rod", **ROD},
        {**MIX, "name": "mix"},
        {
            **ROD,
            "name": "twice",
            "settings": {
                "rerun_state_machine.rerun_mode": "report_determinism_stats",
                "logger.tensorboard_dir": str(jobs.root / "tensorboard"),
            },
            "validation_every": 2,
        },
        {**ROD, "name": "of_other_data", "steps": STEPS + 1, "refused": "is of block store"},
        {**ROD, "name": "of_other_loss", "settings": MASKED, "refused": "is of block store"},
        {
            **ROD,
            "name": "of_other_precision",
            "settings": {"mixed_precision": "bf16_mixed"},
            "refused": "is of precision 'fp32', but candidates are scored in 'bf16'",
        },
        {"name": "refs_new", **SCORE_NEW, "base": "base", "refused": "holds references with model"},
        {"name": "masked_new", "settings": MASKED, **SCORE_NEW},
        {"name": "masked_old", "settings": MASKED, **SCORE_OLD},
        {**ROD, "name": "masked", "settings": MASKED, "references": ["masked_new", "masked_old"]},
    )
    return jobs


@pytest.fixture(scope="module")
def long(jobs):
    """And both references for a job of more steps."""
    steps = {"steps": LONG["steps"]}
    new, old = (
        {"name": "long_new", **SCORE_NEW, **steps},
        {"name": "long_old", **SCORE_OLD, **steps},
    )
    jobs.run(*ALONE, new, old)
    return jobs


def test_a_watched_job_is_the_stock_job(jobs):
    assert len(jobs.steps("stock", "loss")) == STEPS
    jobs.assert_same_steps("watch", "stock", "loss", "grad_norm")
    assert jobs.steps("rod", "loss") != jobs.steps("stock", "loss")


def test_the_job_trains_on_the_top_of_losses_less_references(jobs):
    """Its candidates are what it would have read: each corpus from the first sample on."""
    jobs.assert_trained_on_the_top("rod", steps=STEPS)
    curriculum = jobs.curriculum("rod")
    ids = curriculum.block_ids.ravel()
    assert ids[ids < HALF].tolist() == list(range(HALF))
    assert ids[ids >= HALF].tolist() == list(range(HALF, 2 * HALF))
    references = References.open([jobs.root / "refs_new", jobs.root / "refs_old"])
    for ids, loss, score in zip(
        curriculum.block_ids, curriculum.loss, curriculum.score, strict=True
    ):
        np.testing.assert_allclose(score, loss - references.losses(ids), rtol=0, atol=1e-6)
    is_replay = curriculum.block_ids[0] >= HALF
    assert curriculum.score[0][~is_replay].mean() > 0.01  # the specialist is better on the new


def test_a_blend_scores_nothing_and_needs_references_of_replay_alone(jobs):
    curriculum, rows = jobs.curriculum("mix"), jobs.metrics("mix")
    policy, references = Mix(forgetting=0.01), References.open(jobs.root / "refs_old")
    rows_of = (SourceRow("new", "adaptation", 0, HALF), SourceRow("old", "replay", HALF, HALF))
    for step, row in enumerate(rows):
        ids, loss, chosen = (
            curriculum.block_ids[step],
            curriculum.loss[step],
            curriculum.chosen[step],
        )
        is_replay = ids >= HALF
        assert (np.isfinite(loss) == chosen).all()
        source, chosen = is_replay.astype(np.int64), np.flatnonzero(chosen)
        pool = Pool(step, ids, is_replay, source, rows_of, seed=1234, steps=STEPS)
        assert row["rod/mix/kappa"] == pytest.approx(math.exp(policy.state["dial"][0]))
        assert (policy.select(pool, curriculum.score[step], BATCH) == chosen).all()
        np.testing.assert_allclose(policy.estimate(pool), curriculum.score[step], atol=1e-6)
        reference = np.full(len(ids), np.nan, dtype=np.float32)
        reference[is_replay] = references.losses(ids[is_replay])
        policy.observe(Choice(pool, None, None, chosen, reference=reference), loss[chosen])
        policy.measured(step, row)
    assert (curriculum.block_ids[0][curriculum.chosen[0]] < HALF).all()


def test_a_step_that_runs_again_trains_on_the_same_winners(jobs):
    jobs.assert_same_steps("twice", "rod", "loss")
    assert (jobs.curriculum("twice").chosen == jobs.curriculum("rod").chosen).all()


def test_masks_of_the_job_enter_its_losses(jobs):
    masked, plain = jobs.curriculum("masked"), jobs.curriculum("rod")
    assert (masked.block_ids == plain.block_ids).all()
    assert (masked.loss[0] != plain.loss[0]).any()
    is_replay = masked.block_ids[0] >= HALF
    assert (masked.score[0][is_replay] == 0).all()
    assert masked.score[0][~is_replay].mean() > 0.01


def test_metrics_say_what_was_chosen(jobs):
    curriculum, rows = jobs.curriculum("rod"), jobs.metrics("rod")
    is_replay = curriculum.block_ids >= HALF
    assert [row["step"] for row in rows] == list(range(STEPS))
    shares = [is_replay[step][chosen].mean() for step, chosen in enumerate(curriculum.chosen)]
    for name in ("rod/replay_share", "rod/share/old/text_document"):
        assert [row[name] for row in rows] == shares


def held_out(row: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in row.items() if key.startswith("validation/")}


def test_held_out_losses_are_measured_at_the_start_and_every_n_steps(jobs):
    """Every 2 steps if so asked, else at the job's own interval, of 10, and at the end."""
    begin, rows = (
        {name: of(name) for name in ("rod", "twice", "watch")} for of in (jobs.start, jobs.metrics)
    )
    assert set(begin["rod"]) == {NEW_LOSS, REPLAY_LOSS}
    assert begin["rod"] == begin["twice"] == begin["watch"]  # of the same base
    measured = [row["step"] for row in rows["twice"] if held_out(row)]
    assert measured == [1, 3, 5]
    assert [row["step"] for row in rows["rod"] if held_out(row)] == [STEPS - 1]
    last = held_out(rows["rod"][-1])
    assert last == held_out(rows["twice"][-1])
    forgotten = max(0.0, last[REPLAY_LOSS] - begin["rod"][REPLAY_LOSS])
    assert last["validation/forgetting"] == pytest.approx(forgotten, rel=1e-9)
    assert abs(last[REPLAY_LOSS] - begin["rod"][REPLAY_LOSS]) > 0.001


def test_its_metrics_are_in_the_loggers_of_the_job(jobs):
    events, rows = EventAccumulator(str(jobs.root / "tensorboard")).Reload(), jobs.metrics("twice")
    for name in ("rod/replay_share", "train/loss", "rod/threshold"):
        shown = [
            (event.step, pytest.approx(event.value, rel=1e-6))
            for event in events.Scalars(shown_name(name))
        ]
        assert shown == [(row["step"] + 1, row[name]) for row in rows]
    assert [event.step for event in events.Scalars(shown_name(REPLAY_LOSS))] == [0, 2, 4, 6]
    assert [event.step for event in events.Scalars("at_a_glance/forgetting")] == [2, 4, 6]
    names = events.Tags()["scalars"]
    assert {"lm loss", "grad-norm"} <= {*names}, "the trainer's own"
    assert not [name for name in names if name.startswith("host/")], "they would repeat them"
    assert [row["train/loss"] for row in rows] == jobs.steps("twice", "loss")
    assert [row["train/grad_norm"] for row in rows] == jobs.steps("twice", "grad_norm")
    assert rows[0]["train/lr"] > rows[-1]["train/lr"] > 0


def test_a_watched_job_has_its_losses_in_training_by_source(jobs):
    curriculum, rows = jobs.curriculum("watch"), jobs.metrics("watch")
    for row, ids, loss in zip(rows, curriculum.block_ids, curriculum.loss, strict=True):
        is_replay = ids >= HALF // MULTIPLIER
        assert row["rod/loss/new/text_document"] == pytest.approx(loss[~is_replay].mean(), rel=1e-6)
        assert row["rod/loss/old/text_document"] == pytest.approx(loss[is_replay].mean(), rel=1e-6)
        assert row["train/loss"] == pytest.approx(loss.mean(), rel=1e-6)


def test_what_is_not_trained_on_can_be_forgotten(jobs):
    """Its sources are in the validation split alone, and count equally."""
    last = jobs.metrics("of_new_alone")[-1]
    forgotten = max(0.0, last[REPLAY_LOSS] - jobs.start("of_new_alone")[REPLAY_LOSS])
    assert last["validation/forgetting"] == pytest.approx(forgotten)
    assert last["validation/adaptation_loss"] == last[NEW_LOSS]
    folder = jobs.root / "of_new_alone" / "rod"
    here("report", folder)
    results = json.loads((folder / "report" / "results.json").read_text())
    assert results["arms"]["watched"]["val_forgetting"] == pytest.approx(forgotten)


def test_the_report_shows_a_job(jobs, capsys):
    folder = jobs.root / "rod"
    here("report", folder)
    assert capsys.readouterr().out == f"{folder}/rod/report/index.html\n"
    results = json.loads((folder / "rod" / "report" / "results.json").read_text())
    last = jobs.metrics("rod")[-1]
    rod, base = (results["arms"][name] for name in ("rod", "base"))
    shown = rod["val_forgetting"], rod["adapt_loss"], base["adapt_loss"]
    expected = last["validation/forgetting"], last[NEW_LOSS], jobs.start("rod")[NEW_LOSS]
    assert shown == pytest.approx(expected, rel=1e-12)  # a weighted mean over one source
    assert rod["trained_tokens"] == STEPS * BATCH * 64
    assert rod["compute"] == pytest.approx(STEPS * (1 + MULTIPLIER / 3))
    page = (folder / "rod" / "report" / "index.html").read_text()
    assert "Held-out loss by source" in page and "curriculum.html" in page


@pytest.mark.swap_in
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(jobs, name):
    jobs.run(
        *LAYOUTS[name],
        {"name": f"stock_{name}", "kind": "stock", "base": "base", "steps": STEPS},
        {**WATCH, "name": f"watch_{name}"},
        {**ROD, "name": f"rod_{name}"},
        *([{**ROD, "name": "sharded", "settings": SHARDED}] if name == "dp2" else []),
    )
    jobs.assert_same_steps(f"watch_{name}", f"stock_{name}", "loss", "grad_norm")
    jobs.assert_same_choices(f"rod_{name}", "rod", "loss", "grad_norm")
    if name == "dp2":  # weights gathered by the first of the two forward passes
        jobs.assert_same_choices("sharded", "rod", "loss")


@pytest.mark.swap_in
def test_a_multiplier_need_not_be_whole(jobs):
    """With the paper's 1.5, a pool of 12 for a batch of 8, and samples built for 6 of them."""
    half = {"multiplier": 1.5, "steps": STEPS}
    jobs.run(
        *ALONE,
        {**SCORE_NEW, **half, "name": "half_new"},
        {**SCORE_OLD, **half, "name": "half_old"},
        {**ROD, **half, "name": "half", "references": ["half_new", "half_old"]},
    )
    curriculum = jobs.curriculum("half")
    assert curriculum.block_ids.shape == (STEPS, 12)
    assert sorted(curriculum.block_ids.ravel()) == list(range(12 * STEPS))
    for score, chosen in zip(curriculum.score, curriculum.chosen, strict=True):
        assert np.flatnonzero(chosen).tolist() == sorted(np.argsort(-score, kind="stable")[:BATCH])


@pytest.mark.swap_in
def test_held_out_losses_at_the_end_are_of_the_last_weights(long):
    long.run(*ALONE, {**LONG, "name": "after", "base": "rod"})
    last = long.metrics("rod")[-1]
    expected = {name: last[name] for name in (NEW_LOSS, REPLAY_LOSS)}
    assert long.start("after") == pytest.approx(expected, abs=1e-6)


@pytest.fixture(scope="module")
def killed(long):
    """And a job that was killed in step 6 in two replicas, and one that was not."""
    long.run(*LAYOUTS["dp2"], {**LONG, "name": "whole"})
    long.run(*LAYOUTS["dp2"], {**LONG, "name": "killed", "die_at": 6}, expect_failure=True)
    assert long.steps("killed", "step") == list(range(7))
    return long


@pytest.mark.swap_in
@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2"])
def test_a_killed_job_repeats_and_skips_nothing(killed, layout):
    name = f"killed_{layout}"
    shutil.copytree(killed.root / "killed", killed.root / name)
    killed.run(*LAYOUTS[layout], {**LONG, "name": name})
    # steps 5 and 6 were done again, from the checkpoint behind step 4
    assert killed.steps(name, "step") == [*range(7), 5, 6, 7]
    killed.assert_same_choices(name, "whole")
    if layout == "dp2":  # to the bit
        killed.assert_resumed(name, "whole", steps=[*range(7), 5, 6, 7], repeated=3)
    resumed = killed.curriculum(name)
    assert sorted(resumed.block_ids.ravel()) == list(range(MULTIPLIER * 8 * BATCH))
    assert [row["step"] for row in killed.metrics(name)] == list(range(8))


@pytest.mark.swap_in
@pytest.mark.parametrize(("name", "batch"), [("longer", BATCH), ("larger", 2 * BATCH)])
def test_a_finished_job_goes_on_as_another(long, name, batch):
    """With more steps, or a larger batch too: from what it has consumed on, in a second segment."""
    shutil.copytree(long.root / "rod", long.root / name)
    # Megatron refuses another schedule of the learning rate without the first of these
    settings = {"scheduler.override_opt_param_scheduler": True, "train.global_batch_size": batch}
    new, old, steps = f"{name}_new", f"{name}_old", LONG["steps"]
    job = {"settings": settings, "steps": steps}
    long.run(
        *ALONE,
        {**SCORE_NEW, **job, "name": new},
        {**SCORE_OLD, **job, "name": old},
        {**ROD, **job, "name": name, "references": [new, old]},
    )
    first, second = (long.root / run / "rod" / "curriculum.rod" for run in ("rod", name))
    assert Path(f"{second}.1").read_bytes() == first.read_bytes()
    assert long.steps(name, "step") == list(range(steps))
    assert [row["step"] for row in long.metrics(name)] == list(range(steps))
    segment = long.curriculum(name)
    assert segment.step.tolist() == list(range(STEPS, steps))
    ids, half = segment.block_ids.ravel(), MULTIPLIER * steps * batch // 2
    following = list(range(HALF, HALF + ids.size // 2))
    assert sorted(ids[ids < half]) == following and sorted(ids[ids >= half] - half) == following
    long.assert_highest_scores_trained(name, batch=batch)


@pytest.mark.swap_in
def test_a_job_that_trains_adapters_selects_against_whole_weights(jobs):
    """An adapter begins as nothing, so the references of the base are its own losses at first."""
    jobs.run(*ALONE, {**ROD, "name": "lora", "lora": {"dim": 4, "alpha": 8}})
    jobs.assert_trained_on_the_top("lora", steps=STEPS)
    replay = jobs.curriculum("lora").block_ids >= HALF
    assert (jobs.curriculum("lora").score[-1][replay[-1]] != 0).any()
    assert jobs.steps("lora", "loss") != jobs.steps("rod", "loss")


def script(root: Path, lines: str) -> str:
    """A program of a job on the data below a folder, with `cfg` as `make_config` makes it."""
    return (
        f"import sys; sys.path.insert(0, {str(RECIPE)!r})\n"
        "from pathlib import Path\n"
        "from before import make_config\n"
        "from megatron.bridge.training.gpt_step import forward_step\n"
        "from nemo_rod.hosts import swap_in\n"
        f"root = Path({str(root)!r})\n"
        f"cfg = make_config(root / 'data', Path('nowhere'), ['new', 'old'], steps={STEPS})\n"
        "roles = {str(root / 'data/new'): 'adaptation', str(root / 'data/old'): 'replay'}\n"
    ) + lines


@pytest.mark.swap_in
def test_one_script_writes_both_references(jobs, tmp_path):
    """As in docs/swap-in.md, in two processes that the script itself connects."""
    program = tmp_path / "both.py"
    lines = (
        "for role, model in (('adaptation', 'specialist'), ('replay', 'base')):\n"
        "    swap_in.reference('megatron_bridge', cfg, forward_step, role=role, roles=roles,\n"
        f"        checkpoint=root / model, out=Path({str(tmp_path)!r}) / role)\n"
    )
    program.write_text(script(jobs.root, lines))
    jobs.on_cpu(2, "megatron_bridge", program, path=str(ROOT), timeout=600)
    for role, name in (("adaptation", "refs_new"), ("replay", "refs_old")):
        one, other = (References.open([folder]) for folder in (tmp_path / role, jobs.root / name))
        assert one.digest == other.digest


@pytest.mark.swap_in
def test_a_base_may_be_of_hugging_face(tmp_path, torchrun):
    """Its references are the losses that transformers itself computes on the job's samples."""
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "hf")
    program = tmp_path / "of_hf.py"
    lines = (
        "import numpy as np, torch\n"
        "from megatron.bridge import AutoBridge\n"
        "from nemo_rod.hosts.swap_in.job_references import HostReferenceJob\n"
        "model = AutoBridge.from_hf_pretrained(str(root / 'hf')).to_megatron_provider(False)\n"
        "for key in ('seq_length', 'params_dtype', 'pipeline_dtype', 'transformer_layer_spec',\n"
        "    'gradient_accumulation_fusion', 'apply_rope_fusion', 'persist_layer_norm',\n"
        "    'masked_softmax_fusion', 'bias_dropout_fusion', 'bias_activation_fusion',\n"
        "    'cross_entropy_loss_fusion'):\n"
        "    setattr(model, key, getattr(cfg.model, key))\n"
        "model.bf16 = model.fp16 = False\n"
        "model.autocast_dtype, model.vocab_size = torch.float32, 256\n"
        "cfg.model = model\n"
        "cfg.checkpoint.pretrained_checkpoint = str(root / 'hf')\n"
        "write = HostReferenceJob.write\n"
        "def write_and_keep(job, *args, **options):\n"
        "    write(job, *args, **options)\n"
        f"    ids = np.arange({HALF}, {HALF} + 8)\n"
        "    torch.save(next(job.data.micro_batches(ids, 8)), root / 'samples.pt')\n"
        "HostReferenceJob.write = write_and_keep\n"
        "swap_in.reference('megatron_bridge', cfg, forward_step, role='replay', roles=roles,\n"
        "    out=root / 'refs')\n"
    )
    program.write_text(script(tmp_path, lines))
    jobs = Jobs(tmp_path, torchrun)
    jobs.make_data()
    jobs.on_cpu(1, "megatron_bridge", program, path=str(ROOT), timeout=600)
    samples = torch.load(tmp_path / "samples.pt")
    with torch.no_grad():
        logits = model(input_ids=samples["tokens"]).logits
    loss = torch.nn.functional.cross_entropy(logits.mT, samples["labels"], reduction="none")
    mask = samples["loss_mask"]
    expected = (loss * mask).sum(1) / mask.sum(1)
    written = References.open([tmp_path / "refs"]).losses(np.arange(HALF, HALF + 8))
    np.testing.assert_allclose(written, expected, rtol=0, atol=1e-5)


@pytest.mark.swap_in
def test_the_recipe_runs_as_its_readme_says(tmp_path):
    shutil.copytree(RECIPE.parent, tmp_path / "swap_in")
    (block,) = re.findall(
        r"^```bash\n(.*?)^```", (RECIPE / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PET_STANDALONE": "1",  # a port of its own for every torchrun
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block], cwd=tmp_path / "swap_in" / RECIPE.name,
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "8 of 16 blocks" in done.stdout, done.stdout[-2000:]
