"""Which checkpoint of which arm is exported, and what is refused before anything starts."""

import json
from pathlib import Path

import pytest
from command_line import composed, nemo_rod

from nemo_rod.files import write_json
from nemo_rod.lab.exports import evaluate_stages, export_stages, find_checkpoint
from nemo_rod.run.beforehand import NEEDS, lacking
from nemo_rod.run.stages import Stages


def save(folder: Path, *steps: int) -> None:
    job = {"config_digest": "c", "config": {"seed": 42}, "start": "base/hf"}
    write_json(folder / "job.json", job)
    for step in steps:
        write_json(folder / "checkpoints" / f"iter_{step:07d}" / "metadata.json", {})


def test_a_step_is_found_by_its_number(tmp_path):
    save(tmp_path, 200, 1200)
    (tmp_path / "checkpoints" / "iter_0001400").mkdir()  # being written
    assert find_checkpoint(tmp_path, 1200).name == "iter_0001200"
    with pytest.raises(ValueError, match=r"step=1400 has no checkpoint .* one of 200, 1200; "):
        find_checkpoint(tmp_path, 1400)
    with pytest.raises(ValueError, match=r"expected one of none; "):
        find_checkpoint(tmp_path / "elsewhere", 1400)


@pytest.fixture
def stages(tmp_path):
    """Those of a run of which step 20 of RoD is to be exported."""
    return Stages(composed("recipe=toy_synthetic", f"run_dir={tmp_path}", "arm=rod", "step=20"))


def test_an_arm_in_training_is_exported_from_where_it_works(stages, tmp_path):
    stage, looked = evaluate_stages(stages)
    assert (stage.name, stage.command) == ("export_rod_20", "export arm=rod step=20")
    assert stage.folder == tmp_path / "exports/rod/step_20"
    save(tmp_path / "arms" / "rod.partial", 20)
    assert not stage.is_done()
    assert looked.needs == (stage.name,) and not looked.is_done()
    write_json(stage.folder / "manifest.json", {"inputs": {"arm": "c", "seed": 42, "step": 20}})
    assert stage.is_done()
    save(tmp_path / "arms" / "rod.partial")
    job = tmp_path / "arms" / "rod.partial" / "job.json"
    job.write_text(job.read_text().replace('"c"', '"another"'))
    with pytest.raises(ValueError, match=r"made with arm=c, but now it is another"):
        stage.is_done()


def test_an_export_is_of_the_arm_as_it_was_made(stages, tmp_path):
    arm = tmp_path / "arms" / "rod"
    save(arm, 20)
    write_json(arm / "manifest.json", {"inputs": {"base": "b", "blocks": "d"}})
    stage, looked = evaluate_stages(stages)
    manifest = stage.folder / "manifest.json"
    inputs = {"arm": "c", "seed": 42, "step": 20, "rod.base": "b", "rod.blocks": "d"}
    write_json(manifest, {"inputs": inputs, "outputs": {"weights": "w"}})
    assert stage.is_done() and not looked.is_done()
    blocks = {"digest": "d", "num_adaptation": 1, "num_replay": 1}
    write_json(tmp_path / "blocks" / "manifest.json", {"outputs": blocks})
    write_json(stage.folder / "evaluation.json", {"inputs": {"model": "w", "blocks": "d"}})
    assert looked.is_done()
    write_json(manifest, {"inputs": inputs, "outputs": {"weights": "others"}})
    with pytest.raises(ValueError, match=r"model=w, but now it is others: add rebuild=\[evaluate_"):
        looked.is_done()
    for name in ("manifest.json", "inputs.json"):  # finished, or in training again
        (arm / "manifest.json").unlink(missing_ok=True)
        write_json(arm / name, {"inputs": {"base": "another", "blocks": "d"}})
        with pytest.raises(ValueError, match=r"rod\.base=b, but now it is another"):
            stage.is_done()


def test_an_arm_that_has_not_begun_is_refused(stages, tmp_path):
    with pytest.raises(ValueError, match=r"run `nemo-rod train recipe=\S+ run_dir=\S+ arm=rod`"):
        export_stages(stages)[0].run()
    assert not (tmp_path / "exports" / "rod" / "step_20").exists()


def test_every_stage_says_what_it_needs():
    config = composed("recipe=toy", "arm=rod", "step=20")
    known = [*Stages(composed("recipe=toy")).all(), *evaluate_stages(Stages(config))]
    assert [*lacking(known, config)] == []
    assert {stage.extra for stage in known} == {*NEEDS} - {""}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["no_replay", "lora_4"])
def test_a_saved_step_is_exported_and_evaluated_by_the_command(tmp_path, name):
    words = [f"run_dir={tmp_path}", f"arms=[{name}]", "train.steps=12", "checkpoint.every=6"]
    words += ["recipe=toy_synthetic", "checkpoint.keep=2", "pretrain.steps=4"]
    for command in (["prepare"], ["pretrain"], ["train", f"arm={name}"], ["evaluate"]):
        done = nemo_rod(*command, *words)
        assert done.returncode == 0, done.stderr
    for step in (6, 12):
        done = nemo_rod("evaluate", *words, f"arm={name}", f"step={step}")
        assert done.returncode == 0, done.stderr
    arm, exports = tmp_path / "arms" / name, tmp_path / "exports" / name
    early, late = exports / "step_6", exports / "step_12"
    weights = [(folder / "hf/model.safetensors").read_bytes() for folder in (arm, late, early)]
    assert weights[0] == weights[1] != weights[2]
    losses = [json.loads((f / "evaluation.json").read_text())["loss"] for f in (arm, late, early)]
    assert losses[0] == losses[1] != losses[2]
