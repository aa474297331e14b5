"""Stages: made once, skipped when done, refused when inputs changed, resumed when cut short."""

import json
import shutil
from contextlib import nullcontext
from itertools import product

import pytest
from hypothesis import settings, stateful
from hypothesis import strategies as st

from nemo_rod.files import flat
from nemo_rod.run import handover
from nemo_rod.run.handover import HandOver


def stage(tmp_path, make, *, lr=0.1, **options):
    inputs = {"train.lr": lr}
    return HandOver("rod", tmp_path / "rod", lambda: inputs, make, **options).stage("train", "")


def write_result(folder):
    (folder / "result").write_text("42")
    return {"weights": "abc"}


class Handing(stateful.RuleBasedStateMachine):
    """A stage that is made, cut short, asked for with other inputs, and moved aside."""

    home = None  # of the test

    @stateful.initialize()
    def begin(self):
        shutil.rmtree(self.home, ignore_errors=True)
        self.home.mkdir()
        self.made = self.begun = None  # inputs of the folder, and of the partial one
        self.foreign, self.aside = False, 0

    @stateful.precondition(lambda self: self.made is None and not self.foreign)
    @stateful.rule(
        lr=st.sampled_from([0.1, 0.2]), end=st.sampled_from([None, KeyboardInterrupt, ValueError])
    )
    def make(self, lr, end):
        """What is cut short goes on in its folder; a refusal before the work leaves none."""
        lr = self.begun or lr

        def make(folder):
            if end is not ValueError:
                (folder / "half").touch()
            if end:
                raise end
            return {"weights": lr}

        with pytest.raises(end) if end else nullcontext():
            stage(self.home, make, lr=lr, note={"parallel": 1}).run()
        if end is not ValueError:
            self.made, self.begun = (None, lr) if end else (lr, None)

    @stateful.precondition(lambda self: not self.foreign)
    @stateful.rule(name=st.sampled_from(["photo", "."]))
    def put_something_there(self, name):
        (self.home / "rod").mkdir(exist_ok=True)  # an empty folder is in nobody's way
        (self.home / "rod" / name).touch()
        self.foreign = name == "photo"

    @stateful.precondition(lambda self: self.made or self.begun or self.foreign)
    @stateful.rule()
    def move_aside(self):
        self.aside += sum((self.home / name).exists() for name in ("rod", "rod.partial"))
        stage(self.home, write_result).move_aside()
        self.made, self.begun, self.foreign = None, None, False

    @stateful.invariant()
    def the_folders_are_what_they_should_be(self):
        for name, lr in (("rod/manifest.json", self.made), ("rod.partial/inputs.json", self.begun)):
            file = self.home / name
            foreign = ["photo"] * (self.foreign and name.startswith("rod/"))
            expected = [*foreign, *(["half", file.name] if lr else [])]
            assert sorted(each.name for each in file.parent.glob("*")) == sorted(expected)
            assert not lr or json.loads(file.read_text())["inputs"] == {"train.lr": lr}
        if self.made:
            assert '"parallel": 1' in (self.home / "rod/manifest.json").read_text()
            assert handover.outputs(self.home / "rod", made_by="train") == {"weights": self.made}
        assert len([*self.home.glob("rod*.replaced-*")]) == self.aside

    @stateful.invariant()
    def every_question_has_its_answer(self):
        """A note may change; inputs may not, unless a stage looks after its partial files."""
        for lr, itself in product((0.1, 0.2), (False, True)):
            options = {"note": {"parallel": 2}, "checks_itself": itself}
            asked = stage(self.home, write_result, lr=lr, **options)
            held = self.made or (None if itself else self.begun)
            if held not in (None, lr):
                sentence = rf"train\.lr={held}, but now it is {lr}: add rebuild=\[rod\]"
            elif self.foreign and not self.made:
                sentence = r"rod holds files but no manifest\.json, .* rebuild=\[rod"
            else:
                assert asked.is_done() == (self.made is not None)
                continue
            with pytest.raises(ValueError, match=sentence):
                asked.is_done()


def test_a_stage_is_handed_over_whole_whatever_befalls_it(tmp_path):
    machine = type("Machine", (Handing,), {"home": tmp_path / "run"})
    stateful.run_state_machine_as_test(
        machine, settings=settings(max_examples=30, stateful_step_count=10)
    )


def test_a_folder_is_finished_with_all_its_proof(tmp_path):
    (tmp_path / "rod").mkdir()
    (tmp_path / "rod" / "manifest.json").write_text('{"inputs": {"train.lr": 0.1}}')
    assert stage(tmp_path, write_result).is_done()
    with pytest.raises(ValueError, match=r"rod holds files but no store\.json"):
        stage(tmp_path, write_result, proof=("manifest.json", "store.json")).is_done()
    (tmp_path / "rod" / "manifest.json").write_text('{"inputs": ')
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        stage(tmp_path, write_result).is_done()


def test_weights_are_as_readable_as_other_files(tmp_path):
    def save(folder):
        (folder / "hf").mkdir()
        (folder / "hf" / "model.safetensors").touch(mode=0o600)
        (folder / "hf" / "config.json").touch()
        return {}

    stage(tmp_path, save).run()
    modes = {file.name: file.stat().st_mode for file in (tmp_path / "rod" / "hf").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]


def test_nested_values_have_the_keys_that_users_type():
    value = {"lr": 0.1, "sources": {"de": {"files": ["a", "b"]}}, "none": {}, "points": {0: 0.5}}
    assert flat({"x": value}) == {
        "x.lr": 0.1,
        "x.sources.de.files": ["a", "b"],
        "x.none": {},
        "x.points.0": 0.5,
    }
