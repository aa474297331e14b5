"""What a first hour gets wrong is answered by one sentence, before anything starts."""

import time

import pytest
from command_line import composed, nemo_rod

from nemo_rod.run import beforehand, hub
from nemo_rod.run.stages import Stages


def test_dry_run_shows_the_stages_and_then_refuses(tmp_path):
    done = nemo_rod("run", "recipe=toy_synthetic", "cluster=h100_1", "dry_run=true", cwd=tmp_path)
    *stages, sentence = done.stderr.splitlines()
    assert done.returncode == 2 and len(stages) == 12 and "torch sees no GPU" in sentence


def test_a_plan_for_another_machine_is_no_mistake(tmp_path):
    words = ("recipe=toy_synthetic", "cluster=h100_1", "parallel=single")
    done = nemo_rod("plan", *words, cwd=tmp_path)
    assert done.returncode == 0 and "Note: a run is refused here: cluster.gpu=H100" in done.stdout


def test_too_small_a_disk_is_a_matter_of_this_machine(monkeypatch):
    config = composed("recipe=toy_synthetic")
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10_000}))
    ((sentence, everywhere),) = beforehand.lacking(Stages(config).all(), config)
    assert not everywhere and "and 10 kB are free there: choose another run_dir" in sentence


def test_a_silent_hub_costs_its_seconds_once(monkeypatch):
    pytest.importorskip("huggingface_hub")
    asked: list[hub.Repository] = []

    def silent(repository: hub.Repository) -> None:
        asked.append(repository)
        time.sleep(5)

    monkeypatch.setattr(hub, "check_access", silent)
    monkeypatch.setattr(hub, "_SECONDS", 0.2)
    config = composed("recipe=german_qwen3_0_6b", "~cluster", "arms=[base]", "model.hf=own/silent")
    began = time.monotonic()
    for _ in range(2):
        ((sentence, everywhere),) = beforehand.lacking(Stages(config).all(), config)
    assert time.monotonic() - began < 5 and len(asked) == len({*asked})
    assert not everywhere and "domain.sources" in sentence
    assert "model.hf=own/silent" in sentence and "the hub does not answer within 0 s" in sentence


def test_what_the_hub_lacks_is_named_by_its_key(monkeypatch):
    pytest.importorskip("huggingface_hub")

    def refuse(repository: hub.Repository) -> None:
        if repository.name == "own/none":
            raise ValueError("The hub has no model own/none that this account may read.")

    monkeypatch.setattr(hub, "check_access", refuse)
    monkeypatch.setattr(hub, "_answer", hub._answer.__wrapped__)
    config = composed("recipe=german_qwen3_0_6b", "~cluster", "arms=[base]", "model.hf=own/none")
    lacks = beforehand.lacking(Stages(config).all(), config)
    assert lacks == [("model.hf: The hub has no model own/none that this account may read.", True)]


@pytest.mark.parametrize(
    ("name", "is_name"),
    [("gpt2", True), ("Qwen/Qwen3-0.6B", True), ("a/b@main", True), ("a/b/c", False),
     *((name, False) for name in ("./a", "~/a", "/a", "a/", "a b", "a/b@", ""))],
)  # fmt: skip
def test_names_of_the_hub(name, is_name):
    assert hub.is_name(name) == is_name
