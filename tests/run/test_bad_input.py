"""Bad input is answered by one sentence with its cure: every row of `tests/refusals.yaml`."""

import dataclasses
import gzip
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import composed, nemo_rod
from places import TESTS
from test_render import CLUSTER

from nemo_rod import cli
from nemo_rod.config import Config, Domain
from nemo_rod.corpus import SourceSpec, block_hash, is_holdout
from nemo_rod.corpus.adapters.synthetic import synthetic_input
from nemo_rod.corpus.documents import open_inputs
from nemo_rod.files import check_name
from nemo_rod.hosts.swap_in.roles import check_weights
from nemo_rod.lab.plan.built_shapes import read_shape
from nemo_rod.lab.rehearsal.forms import small_form
from nemo_rod.run.checks import check
from nemo_rod.run.launch.slurm import exports, shell_options
from nemo_rod.run.launch.submit import submit
from nemo_rod.run.stages import Stages
from nemo_rod.selection.arms import registered_policy
from nemo_rod.selection.candidates import Candidates, retention_for_share
from nemo_rod.selection.forgetting import validation_forgetting
from nemo_rod.selection.mix import Mix
from nemo_rod.selection.policies import FixedShare, Joint
from nemo_rod.selection.schedule import Schedule

HEAD = "# @package _global_\ndefaults: [toy_synthetic, _self_]\n"
MINE = Path("my/recipe/mine.yaml")
SIX_STEPS = (
    *("train.steps=6", "train.warmup_steps=1", "train.decay_steps=2", "arms=[base,rod,mine]"),
    *("checkpoint.every=2", "checkpoint.keep=3", "+variants.end={of:rod,at:2,anneal:3}"),
    "+variants.longer={of:rod,at:4,steps:8}",
)
ROWS = [
    (kind, *row)
    for kind, rows in yaml.safe_load((TESTS / "refusals.yaml").read_text("utf-8")).items()
    for row in (rows.items() if isinstance(rows, dict) else rows)
]


def written() -> None:
    """Puts into the working folder what commands are refused for."""
    for name in ("my/recipe", "a&b/recipe", "text", "empty", "config_alone", "short"):
        Path(name).mkdir(parents=True)
    for name, content in {
        "my/stray.yaml": HEAD, "a&b/recipe/x.yaml": HEAD, MINE: HEAD, "my/recipe/old.yml": HEAD,
        "config_alone/config.json": '{"model_type": "llama"}',  # known without transformers
        "short/config.json": '{"text_config": {"model_type": "llama", "rope_scaling": {"type": '
        '"linear", "factor": 8.0}, "max_position_embeddings": 256}}', "short/model.safetensors": "",
        "a.jsonl": '{"body": "x"}\n', "no.jsonl.gz": "plain",
    }.items():  # fmt: skip
        Path(name).write_text(content)
    Path("packed.txt").write_bytes(gzip.compress(b"text"))
    Path("link").symlink_to("nowhere")


def by_command(*words: str) -> str:
    done = nemo_rod(*words, cwd=Path.cwd())
    *titles, sentence = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "") and sentence.startswith("nemo-rod: "), done
    assert all(line.startswith(("[", "  adaptation/")) for line in titles), titles
    return sentence


def by_call(call: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as error:
        call()
    return str(error.value)


def of_command(line: str) -> str:
    written()
    return by_command(*line.split())


def of_file(content: str, head: str = HEAD) -> str:
    written()
    MINE.write_text(f"{head}{content}\n")
    if not head:  # beside those that no error is about
        MINE.with_name("gone.yaml").symlink_to("nowhere")
        MINE.with_name("mark.yaml").write_text("\ufeff")
    command = ("plan", "run")[len(content) % 2]
    sentence = by_command(command, "--config-dir", "my", "recipe=mine", "cluster=null")
    assert not Path("runs/mine/launch").exists()
    return sentence


def of_paths(line: str) -> str:
    with pytest.MonkeyPatch.context() as patched, pytest.raises(SystemExit) as left:
        patched.setattr(sys, "argv", ["nemo-rod", *line.split()])
        cli.main()
    assert left.value.code == 2
    return ""


def of_variant(text: str) -> str:
    toy = composed("recipe=toy")
    variants = toy.variants | {"bad": yaml.safe_load(text)}
    return by_call(lambda: check(dataclasses.replace(toy, variants=variants)))


def of_toy(line: str) -> Config:
    short = {"CLUSTER": CLUSTER, "ON_CLUSTER": ["launcher=slurm", *CLUSTER], "SIX_STEPS": SIX_STEPS}
    return composed("recipe=toy", *(w for word in line.split() for w in short.get(word, [word])))


def of_cluster(line: str) -> str:
    def submitted() -> None:
        stages = Stages(of_toy(f"{line} dry_run=true"))
        submit(stages, stages.all())

    return by_call(submitted)


def of_source(values: Any) -> str:
    if isinstance(values, dict):
        values = {"role": "replay", "kind": "jsonl", "files": ["x"], **values}
        values = {key: value for key, value in values.items() if value != "absent"}
    sentence = by_call(lambda: Domain(tokenizer="byte", sources={"web": values}).specs)
    assert sentence.startswith("domain.sources.web")
    return sentence


CALLED: dict[str, Callable[..., object]] = {
    "Candidates": lambda **values: Candidates(
        **{"num_adaptation": 10, "num_replay": 10, "batch_size": 4, **values}
    ),
    **{
        called.__name__: called
        for called in (
            FixedShare, Joint, Mix, Schedule, block_hash, check_name, check_weights, exports,
            is_holdout, read_shape, registered_policy, retention_for_share, shell_options,
            small_form, synthetic_input, validation_forgetting,
        )
    },
    "open_inputs": lambda **values: open_inputs(SourceSpec(name="web", role="replay", **values)),
}  # fmt: skip


ANSWERS: dict[str, Callable[[Any], str]] = {
    "run": lambda line: by_command("run", *line.split(), "dry_run=true"),
    "command": of_command,
    "paths": of_paths,
    "file": of_file,
    "whole_file": lambda content: of_file(content, head=""),
    "recipe": lambda line: by_call(lambda: of_toy(line)),
    "variant": of_variant,
    "cluster": of_cluster,
    "source": of_source,
    "value": lambda row: by_call(
        lambda: CALLED[row[0]](**row[1]) if isinstance(row[1], dict) else CALLED[row[0]](*row[1])
    ),
}


@pytest.mark.parametrize(("kind", "given", "sentence"), ROWS)
def test_bad_input_is_answered_by_its_sentence(
    kind, given, sentence, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # what is wrong here is known without the hub
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "planted")
    answer = ANSWERS[kind](given) or capsys.readouterr().err.removesuffix("\n")
    parts = [sentence] if isinstance(sentence, str) else sentence
    assert [part for part in parts if part not in answer] == [], answer
    assert "\n" not in answer and "hf_0123456789" not in answer and "planted" not in answer
    if kind == "cluster":
        assert [*tmp_path.iterdir()] == []
