"""What a first hour gets wrong is answered by one sentence with its cure, before anything "
"starts."""

import gzip
import time
from pathlib import Path

import pytest
from command_line import composed, nemo_rod

from nemo_rod.run import beforehand, hub
from nemo_rod.run.stages import Stages

HEAD = "# @package _global_\ndefaults: [toy_synthetic, _self_]\n"
SOURCE = "domain: {sources: {x: {role: replay, kind: %s}}}"
# what is below HEAD in my/recipe/mine.yaml -> a part of the sentence about it
IN_A_FILE = {
    "domain:\n  tokeniser: byte":
    "my/recipe/mine.yaml:4: There is no key domain.tokeniser (did you "
    "mean domain.tokenizer?)",
    "train:\n  steps: sixty":
    "mine.yaml:4: train.steps=sixty is not valid: expected a whole number",
    "train:\n\tsteps: 3": "mine.yaml:4 is not YAML (found character '\\t' that cannot start any "
    "token): indent with spaces",
    "train: {steps: 3}\ntrain: {lr: 1}": "mine.yaml:4 is not YAML (found duplicate key train)",
    "train: {lr: 1": "mine.yaml:4 is not YAML (expected ',' or '}'",
    "train.lr: 3": "mine.yaml:3: train.lr is of the command line: write train:, and lr: below it",
    "train: [1]": "mine.yaml:3: train is a section, not [1]: write keys below it",
    "cluster: h100_1": "mine.yaml:3: cluster is a section, not h100_1: name a file of it under "
    "defaults, as `- override /cluster: h100_1`",
    "trian: {steps: 3}": "mine.yaml:3: There is no key trian (did you mean train?)",
    "arms: rod": "mine.yaml:3: arms=rod is not valid: expected a list",
    "dry_run: maybe": "mine.yaml:3: dry_run=maybe is not valid: expected true or false",
    "variants: {x: {of: rod, selection: {kapa: 2}}}\narms: [x]": "There is no key "
    "variants.x.selection.kapa (did you mean kappa?): expected some of multiplier",
    "domain: {sources: {x: {role: reply, kind: text, files: [a]}}}": "(did you mean replay?)",
    SOURCE % "txt, files: [a]": "domain.sources.x.kind='txt' is not valid (did you mean text?)",
    SOURCE % "text, files: ['my/text/*.txt']": "source x: no file matches 'my/text/*.txt' in",
    SOURCE % "text, files: [text]": "source x: files 'text' cannot be listed: text is a folder",
    SOURCE % "text, files: [link]": "link is a link to 'nowhere', which cannot be reached",
    SOURCE % "text, files: [packed.txt]": "packed.txt",
    SOURCE % "jsonl, files: [a.jsonl]": "a.jsonl:1: no field 'text' (found: body): set text_field",
    SOURCE % "jsonl, files: [no.jsonl.gz]": "no.jsonl.gz: broken or cut off .gz data",
    SOURCE % "megatron, files: [none]": "source x: no file matches 'none.bin'",
    SOURCE % "huggingface, path: ./none": "domain.sources.x.path=./none does not exist: expected a",
    SOURCE % "generated, path: a/b/c, max_tokens: 9": "domain.sources.x.path=a/b/c does not exist",
    "domain: {tokenizer: ./none}": "domain.tokenizer=./none does not exist: expected a folder, or",
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    for name in ("my/recipe", "text", "empty", "config_alone"):
        (folder / name).mkdir(parents=True)
    (folder / "my" / "stray.yaml").write_text(HEAD)
    (folder / "config_alone" / "config.json").write_text("{}")
    (folder / "a.jsonl").write_text('{"body": "x"}\n')
    (folder / "no.jsonl.gz").write_text("plain")
    (folder / "packed.txt").write_bytes(gzip.compress(b"text"))
    (folder / "link").symlink_to("nowhere")
    return folder


@pytest.mark.parametrize("content", IN_A_FILE)
@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_mistake_in_a_file(command: str, content: str, place: Path) -> None:
    (place / "my" / "recipe" / "mine.yaml").write_text(f"{HEAD}{content}\n")
    done = nemo_rod(command, "--config-dir", "my", "recipe=mine", "cluster=null", cwd=place)
    *_, sentence = done.stderr.splitlines()
    assert done.returncode == 2 and sentence.startswith("nemo-rod: "), done.stderr
    assert IN_A_FILE[content] in sentence
    assert not (place / "runs" / "mine" / "launch").exists()


TYPED = {  # words -> a part of the sentence about them
    "run recipe=toy cluster=h100_1":
    "cluster.gpu=H100, but torch sees no GPU on this machine: check "
    "nvidia-smi and CUDA_VISIBLE_DEVICES, or add cluster=null to run on the CPU.",
    "train recipe=toy arm=rod cluster=a100_8": "cluster.gpu=A100, but torch sees no GPU",
    "run recipe=toy cluster=a100":
    "(did you mean a100_8?): expected one of a100_1, a100_8, b200_8, "
    "b300_8, gh200_1, h100_1, h100_8, h200_8, l40s_1, rtx4090_1, rtx5090_1, template; any other "
    "GPU needs its own: `nemo-rod init FOLDER` writes FOLDER/cluster/ours.yaml",
    "run recipe=toy launcher=slurm":
    "or your own: `nemo-rod init FOLDER` writes FOLDER/cluster/ours",
    "run recipe=german_qwen3_0_6b cluster=null model.hf=runs/a/b/hf":
    "model.hf=runs/a/b/hf does not "
    "exist: expected a folder, or a name or NAME@REVISION on the Hugging Face hub",
    "run recipe=german_qwen3_0_6b cluster=null model.hf=empty":
    "model.hf=empty holds no config.json",
    "run recipe=german_qwen3_0_6b cluster=null model.hf=a.jsonl":
    "model.hf=a.jsonl holds no config.",
    "plan recipe=german_qwen3_0_6b model.hf=config_alone":
    "model.hf=config_alone holds no *.safeten",
    "run recipe=german_qwen3_0_6b cluster=null model.hf=Qwen/Qwen3@":
    "model.hf=Qwen/Qwen3@ does not",
    "run --config-dir my recipe=stray": "There is no recipe=stray (move my/stray.yaml to "
    "my/recipe/stray.yaml)",
    "run my recipe=mine": "my is a folder: did you mean --config-dir my recipe=mine?",
    "export recipe=toy": "An earlier step needs its arm and its number, such as arm=rod step=1200.",
    "status recipe=toy": "runs/toy holds no launch",
    "sample recipe=toy": "prompt= is missing",
}  # fmt: skip


@pytest.mark.parametrize("line", TYPED)
def test_a_mistake_on_the_command_line(line: str, place: Path) -> None:
    (place / "my" / "recipe" / "mine.yaml").write_text(HEAD)
    done = nemo_rod(*line.split(), cwd=place)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert TYPED[line] in done.stderr


def test_dry_run_shows_the_stages_and_then_refuses(place: Path) -> None:
    done = nemo_rod("run", "recipe=toy_synthetic", "cluster=h100_1", "dry_run=true", cwd=place)
    *stages, sentence = done.stderr.splitlines()
    assert done.returncode == 2 and len(stages) == 12 and "torch sees no GPU" in sentence


def test_a_plan_for_another_machine_is_no_mistake(place: Path) -> None:
    done = nemo_rod("plan", "recipe=toy_synthetic", "cluster=h100_1", "parallel=single", cwd=place)
    assert done.returncode == 0 and "Note: a run is refused here: cluster.gpu=H100" in done.stdout


def test_too_small_a_disk_is_a_matter_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    config = composed("recipe=toy_synthetic")
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10_000}))
    ((sentence, everywhere),) = beforehand.lacking(Stages(config).all(), config)
    assert not everywhere and "and 10 kB are free there: choose another run_dir" in sentence


def test_a_silent_hub_costs_its_seconds_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    asked: list[hub.Repository] = []

    def silent(repository: hub.Repository) -> None:
        asked.append(repository)
        time.sleep(5)

    monkeypatch.setattr(hub, "check_access", silent)
    monkeypatch.setattr(hub, "_SECONDS", 0.2)
    config = composed("recipe=german_qwen3_0_6b", "~cluster", "model.hf=own/silent")
    began = time.monotonic()
    for _ in range(2):
        ((sentence, everywhere),) = beforehand.lacking(Stages(config).all(), config)
    assert time.monotonic() - began < 5 and len(asked) == len({*asked})
    assert not everywhere and "domain.sources" in sentence
    assert "model.hf=own/silent" in sentence and "the hub does not answer within 0 s" in sentence


def test_what_the_hub_lacks_is_named_by_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")

    def refuse(repository: hub.Repository) -> None:
        if repository.name == "own/none":
            raise ValueError("The hub has no model own/none that this account may read.")

    monkeypatch.setattr(hub, "check_access", refuse)
    hub._answer.cache_clear()
    config = composed("recipe=german_qwen3_0_6b", "~cluster", "model.hf=own/none")
    lacks = beforehand.lacking(Stages(config).all(), config)
    hub._answer.cache_clear()
    assert lacks == [("model.hf: The hub has no model own/none that this account may read.", True)]


@pytest.mark.parametrize(
    ("name", "is_name"),
    [("gpt2", True), ("Qwen/Qwen3-0.6B", True), ("a/b@main", True), ("a/b/c", False),
     ("./a", False),
     ("~/a", False), ("/a", False), ("a/", False), ("a b", False), ("a/b@", False), ("", False)],
)  # fmt: skip
def test_names_of_the_hub(name: str, is_name: bool) -> None:
    assert hub.is_name(name) == is_name
