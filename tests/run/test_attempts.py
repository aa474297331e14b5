"""What a second attempt keeps of an interrupted one, and what it refuses to go on with."""

import copy
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_up_run
import numpy as np
import pytest
from corpus_cases import BYTE
from made_up_run import recipe

from nemo_rod.config import Config
from nemo_rod.corpus.store import BlockStore
from nemo_rod.files import write_json
from nemo_rod.jobs import EvaluateJob
from nemo_rod.lab.merge import merge_stages
from nemo_rod.run.evaluate import evaluate_stages
from nemo_rod.run.handover import Stage, partial
from nemo_rod.run.model_jobs import ModelJobs
from nemo_rod.run.stages import Stages
from nemo_rod.selection.references.folder import Folder

MERGED = "merge_0.6"


def manifest_of(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return manifest


def test_a_merge_resumes_after_its_weights_are_written(run_dir):
    (stage,) = merge_stages(Stages(recipe(run_dir, f"arm={MERGED}")))
    weights = stage.folder / "hf" / "model.safetensors"
    merged, outputs = weights.read_bytes(), manifest_of(stage.folder)["outputs"]
    # an attempt that was killed before its last files were written
    for name in ("evaluation.json", "arm.json"):
        (stage.folder / name).unlink()
    os.replace(stage.folder / "manifest.json", stage.folder / "inputs.json")
    os.replace(stage.folder, partial(stage.folder))
    assert not stage.is_done()
    stage.run()
    assert stage.is_done() and weights.read_bytes() == merged
    assert manifest_of(stage.folder)["outputs"] == outputs
    assert json.loads((stage.folder / "arm.json").read_text())["lambda"] == 0.6


def test_a_pretrained_base_is_checked_again_before_it_is_used(run_dir, monkeypatch):
    described = pytest.importorskip("transformers").AutoConfig.for_model("qwen3", vocab_size=200)
    described.save_pretrained(run_dir / "base" / "hf")  # smaller than the blocks' tokenizer
    BYTE.save_pretrained(run_dir / "base" / "hf")
    config = recipe(run_dir)
    config.model = dataclasses.replace(config.model, hf="base", architecture=None)
    monkeypatch.setattr(ModelJobs, "run", lambda *_: pytest.fail("it has started"))
    stages = Stages(config)
    for stage in (stages.reference("base"), stages.train("no_replay")):
        assert stage.is_done()
        stage.move_aside()
        with pytest.raises(ValueError, match=r"knows 200 tokens, but the tokenizer of .* has 256"):
            stage.run()
        assert not partial(stage.folder).exists()


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def refusal_of(before: Config, after: Config, stage: Callable[[Config], Stage]) -> str:
    """What a second attempt with another configuration says; nothing if it goes on."""
    with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(ModelJobs, "run", interrupt)
        stage(before).run()
    try:
        assert not stage(after).is_done()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("variant", "refused"),
    [
        ({"of": "no_replay", "converge": True}, "made with validation.every=2, but now it is 3"),
        ({"of": "rod"}, ""),
    ],
)
def test_an_arm_that_ends_when_it_has_converged_depends_on_the_looks(variant, refused, run_dir):
    before, after = (recipe(run_dir, f"validation.every={every}") for every in (2, 3))
    for config in (before, after):
        config.variants["mine"] = variant
    refusal = refusal_of(before, after, lambda config: Stages(config).train("mine"))
    assert refused in refusal and bool(refusal) == bool(refused)


TENSOR = "tensor_model_parallel_size"
CLIP = {"policy": {"max_grad_norm": 0.1}}


@pytest.mark.parametrize(
    ("kind", "keys", "trained", "scored"),
    [
        ("nemo_rl", CLIP, "nemo_rl.policy.max_grad_norm=nothing, but now it is 0.1", ""),
        ("ray", CLIP, "nemo_rl.policy.max_grad_norm=nothing, but now it is 0.1", ""),
        ("local", CLIP, "", ""),
        ("nemo_rl", {"worker": "a.B"}, "nemo_rl.worker=nothing", ""),
        ("nemo_rl", {"policy": {"hf_config_overrides": {"x": 1}}},
         "nemo_rl.policy.hf_config_overrides.x=nothing",
         "nemo_rl.policy.hf_config_overrides.x=nothing"),
        ("nemo_rl", {"policy": {"megatron_cfg": {TENSOR: 2}}}, "", ""),
        ("nemo_rl", {"policy": {"megatron_cfg": {}}, "cluster": {"num_nodes": 2},
                     "logger": {"monitor_gpus": True}}, "", ""),
    ],
)  # fmt: skip
def test_overrides_of_nemo_rl_that_decide_are_inputs(kind, keys, trained, scored, run_dir):
    before = recipe(run_dir)
    before.launcher.kind = kind
    after = copy.deepcopy(before)
    after.nemo_rl = keys
    for name, refused in (("no_replay", trained), ("base", scored)):

        def stage(config: Config, name: str = name) -> Stage:
            stages = Stages(config)
            return stages.reference(name) if name == "base" else stages.train(name)

        assert stage(before).is_done()  # no change where there are no overrides
        stage(before).move_aside()
        refusal = refusal_of(before, after, stage)
        assert refused in refusal and bool(refusal) == bool(refused)


def test_references_are_of_what_can_be_drawn_and_grow(run_dir, monkeypatch):
    monkeypatch.setattr(ModelJobs, "run", made_up_run._run)
    folder, store = run_dir / "references/base", BlockStore(run_dir / "blocks")

    def stage(*more: str) -> tuple[Stage, np.ndarray]:
        stages = Stages(recipe(run_dir, *more))
        rod, steps = stages.jobs.arm("rod"), stages.config.train.steps
        drawn = [rod.pools().pool(step).block_ids for step in range(steps)]
        ids = np.unique(np.concatenate(drawn))
        return stages.reference("base"), ids[ids >= store.num_adaptation]

    first, drawn = stage()
    assert first.is_done() and len(drawn) < len(store) - store.num_adaptation
    assert np.flatnonzero(Folder.open(folder).present()).tolist() == [
        i - store.num_adaptation for i in drawn
    ]
    manifest, everything = (folder / "manifest.json").read_bytes(), {*drawn.tolist()}
    for more in ("seed=7", "train.steps=9", "selection.multiplier=4"):
        other, ids = stage(more)
        assert not other.is_done(), more
        other.run()
        assert other.is_done() and first.is_done()
        everything |= {*ids.tolist()}
        assert Folder.open(folder).present().sum() == len(everything)
    assert (folder / "manifest.json").read_bytes() == manifest
    with pytest.raises(
        ValueError,
        match=r"has losses over the first 16 tokens of a block, not 4, as scoring\.prefix asks "
        r"for: add rebuild=\[references_base\]",
    ):
        stage("scoring.prefix=1/4")[0].is_done()


def test_rebuild_moves_everything_measured_aside(run_dir):
    stage, arm = evaluate_stages(Stages(recipe(run_dir)))[0], run_dir / "arms" / "rod"
    left = (
        "evaluation.json", "held_out_losses.npy", "tasks.json", "tasks.job.json",
        "tasks.answered.json", "tasks.answered.partial.json",
    )  # fmt: skip
    for name in left:
        (arm / name).touch()
    assert (run_dir / "evaluation.partial").exists()
    stage.move_aside()
    for name in left:
        assert not (arm / name).exists() and (arm / f"{name}.replaced-1").exists()
    assert (arm / "manifest.json").exists() and not (run_dir / "evaluation.partial").exists()


class Evaluations:
    """Runs evaluations of made-up losses, each killed after `whole` models."""

    def __init__(self) -> None:
        self.whole, self.asked = 0, list[list[str]]()

    def __call__(self, jobs: ModelJobs, job: EvaluateJob, folder: Path) -> None:
        write_json(folder / "job.json", {})
        self.asked.append(list(job.models))
        for number, name in enumerate(job.models):
            if number == self.whole:
                raise KeyboardInterrupt
            attempt = float(len(self.asked))
            write_json(folder / f"{name}.json", {"loss": {"replay": {"x": attempt}}, "blocks": {}})


@pytest.fixture
def evaluations(monkeypatch):
    evaluations = Evaluations()
    monkeypatch.setattr(ModelJobs, "run", lambda *given: evaluations(*given))
    return evaluations


def test_a_second_evaluation_keeps_what_there_is(run_dir, evaluations):
    names = ["base", "no_replay", "fixed_32", MERGED, "rod"]
    config = recipe(run_dir)
    stage = evaluate_stages(Stages(config))[0]
    stage.move_aside()

    def kill_after(whole: int) -> list[str]:
        evaluations.whole = whole
        with pytest.raises(KeyboardInterrupt):
            stage.run()
        return evaluations.asked[-1]

    assert kill_after(2) == names
    assert kill_after(1) == names[2:]
    # made again: its losses no longer hold
    manifest = manifest_of(run_dir / "arms" / "no_replay")
    manifest["outputs"]["weights"] = "others"
    write_json(run_dir / "arms" / "no_replay" / "manifest.json", manifest)
    assert kill_after(0) == ["no_replay", MERGED, "rod"]
    evaluations.whole = 9
    stage.run()
    assert evaluations.asked[-1] == ["no_replay", MERGED, "rod"]
    results = [json.loads((run_dir / f"arms/{n}/evaluation.json").read_text()) for n in names]
    assert [row["loss"]["replay"]["x"] for row in results] == [1.0, 4.0, 2.0, 4.0, 4.0]
    assert stage.is_done() and not (run_dir / "evaluation.partial").exists()


def test_losses_of_unknown_inputs_are_made_again(run_dir, evaluations):
    evaluations.whole = 9
    stage = evaluate_stages(Stages(recipe(run_dir)))[0]
    stage.move_aside()
    (run_dir / "evaluation.partial").mkdir()
    write_json(run_dir / "evaluation.partial" / "rod.json", {"loss": {}})
    stage.run()
    assert "rod" in evaluations.asked[0]


def test_the_losses_of_a_model_are_written_whole_or_not_at_all(run_dir, tmp_path, monkeypatch):
    pytest.importorskip("megatron.core")
    from nemo_rod.megatron import forward_jobs

    class Scorer:
        def losses(self, ids: np.ndarray) -> np.ndarray:
            return np.ones(len(ids), np.float32)

    monkeypatch.setattr(forward_jobs, "_scorer", lambda *_: Scorer())
    monkeypatch.setattr(forward_jobs, "is_recorder", lambda: True)
    monkeypatch.setattr(forward_jobs, "compare_base", lambda *_: None)
    jobs = Stages(recipe(run_dir)).jobs
    job = jobs.job(EvaluateJob, "evaluate", tmp_path, models={"base": "hf"})
    with monkeypatch.context() as patched:
        patched.setattr("nemo_rod.files.os.replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            forward_jobs.evaluate(job)
    assert not (tmp_path / "base.json").exists()
    forward_jobs.evaluate(job)
    losses = json.loads((tmp_path / "base.json").read_text())["loss"]
    assert set(losses["replay"].values()) == {1.0}
