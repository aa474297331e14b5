"""Command lines of paths: help names every argument, and a wrong one is refused in a sentence."""

import sys
from pathlib import Path

import pytest

from nemo_rod import cli
from nemo_rod.commands.arguments import Arguments, Key
from nemo_rod.commands.errors import errors_in_one_sentence
from nemo_rod.signals import Stopped

HELP = {
    "status": ["RUN_DIR"],
    "cancel": ["RUN_DIR"],
    "inspect": ["PATH", "block=ID", "split=SPLIT", "tokenizer=NAME", "overlap=TOKENS"],
    "curriculum": ["export", "materialise", "verify", "diff", "CURRICULUM", "OUT", "STORE"],
    "curriculum export": ["CURRICULUM", "OUT", "--format", "--blocks"],
    "curriculum materialise": ["CURRICULUM", "OUT", "--format", "--store-only", "--blocks"],
    "curriculum verify": ["CURRICULUM", "STORE"],
    "curriculum diff": ["CURRICULUM CURRICULUM"],
    "import": ["blocks", "references", "curriculum", "config", "FOLDER", "TRACE"],
    "import blocks": [
        *("FOLDER", "OUT", "tokenizer=NAME", "eod=ID", "recipe=NAME", "pool_share=SHARE", "check=N")
    ],
    "import references": ["CACHE", "blocks=STORE", "role=ROLE", "model=MODEL", "precision="],
    "import curriculum": ["TRACE", "OUT", "blocks=STORE"],
    "import config": ["DEFAULT", "RUN", "OUT", "recipe=NAME", "curriculum=FOLDER"],
    "doctor": ["BLOCKS", "functions=ROAD", "swap_in/megatron_bridge"],
    "merge": ["BASE", "ADAPTED", "OUT", "lambda=WEIGHT", "recipe=NAME"],
    "reference": [
        *("--config RECIPE.yaml", "recipe=NAME", "KEY=VALUE", "job=", "role=", "out=", "roles="),
        *("multiplier=", "checkpoint=", "forward_step="),
    ],
    "report": ["FOLDER", "recipe=NAME", "KEY=VALUE"],
    "train": ["--config RECIPE.yaml", "KEY=VALUE", "recipe=NAME"],
}


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize("verb", HELP)
def test_help_names_every_argument(
    verb: str, option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["nemo-rod", *verb.split(), option])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: nemo-rod {verb} ")
    assert [name for name in HELP[verb] if name not in shown] == []


def test_words_belong_to_the_keys_of_a_verb_and_else_to_paths() -> None:
    parser = Arguments(prog="verb")
    parser.add_argument("path")
    parser.add_argument("other", nargs="?")
    parser.add_keys(
        Key(name="b", value="B", help=""),
        Key(name="d", value="D", help="", read=int, expected="an integer"),
    )
    for words in (["a=0", "b=1=1", "c=2"], ["b=1=1", "a=0", "c=2"], ["a=0", "c=2", "b=1=1"]):
        options = parser.parse_args(words)
        assert (options.path, options.other, options.b, options.d) == ("a=0", "c=2", "1=1", None)
    assert parser.parse_args(["a", "d=3"]).d == 3


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("inspect", True), ("doctor recipe=toy", True), ("run --help", False), ("train", False),
        ("train recipe=toy --help", False), ("train --config-path x --config-name config", False),
        ("train --config a.yaml rod.x=1", True), ("train --config=a.yaml", True),
        ("train job=a.py:f", False), ("reference role=replay job=a.py:f", True),
        ("reference recipe=toy arm=base", False), ("reference --config-dir my recipe=mine", False),
        ("reference --config a.yaml", True), ("merge", False),
        ("merge recipe=toy arm=merge_0.4", False), ("merge -m recipe=toy", False),
        ("merge base adapted", True), ("merge a=b c d lambda=0.5", True), ("report", False),
        ("report recipe=toy report.seeds=[a]", False), ("report checkpoints/rod", True),
    ],
)  # fmt: skip
def test_paths_or_a_recipe(line: str, expected: bool) -> None:
    name, *words = line.split()
    assert cli.takes_paths(name, words) is expected


@pytest.mark.parametrize(
    ("error", "status"), [(OSError, 2), (RuntimeError, 1), (Stopped, Stopped.exit_status)]
)
def test_a_stop_and_a_failed_job_have_a_status_of_their_own(
    error: type[BaseException], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left, errors_in_one_sentence():
        raise error("rank 1:\nfailed")
    assert (left.value.code, capsys.readouterr().err) == (status, "nemo-rod: rank 1: failed\n")


WRONG = {
    "inspect": ("'nemo-rod inspect' is not understood: expected nemo-rod inspect PATH [block=",
                "(the following arguments are required: PATH)."),
    "inspect a b": ("(unrecognised or extra argument: b).",),
    "inspect .": (". was not written by nemo-rod: expected a run folder",),
    "inspect none": ("none does not exist",),
    "inspect . block=1": ("is neither a block store nor a source: block= and overlap= need",),
    "inspect . --all": ("' is not understood: expected nemo-rod inspect PATH",
                        "(unrecognised or extra argument: --all)."),
    "inspect . block=x": ("block=x is not valid: expected a number.",),
    "inspect . block=": ("block= is not valid: expected a number.",),
    "inspect . overlap=-1": ("overlap=-1 is not valid: expected a number.",),
    "inspect . block=1 block=2": ("(block= is given twice).",),
    "inspect . split=test": ("split=test is not valid: expected train or holdout",),
    "status": (
        "expected nemo-rod status RUN_DIR [--watch [every=SECONDS]] (the following arguments",
    ),
    "cancel a b": ("expected nemo-rod cancel RUN_DIR (unrecognised or extra argument: b).",),
    "curriculum": ("is not understood: expected nemo-rod curriculum export CURRICULUM",),
    "curriculum show": ("invalid choice: 'show'",),
    "curriculum diff a": ("'nemo-rod curriculum diff a' is not understood: expected ",),
    "curriculum verify none.rod": ("none.rod does not exist: check the path",),
    "doctor a b": ("nemo-rod doctor [BLOCKS] [base=MODEL] [functions=ROAD] (unrecognised",),
    "doctor functions=none": ("functions=none is not valid: expected all, scoring, trai",),
    "merge a b c": ("' is not understood: expected nemo-rod merge BASE ADAPTED OUT",
                    "(lambda= is missing)."),
    "merge a b lambda=0.5": ("(the following arguments are required: OUT).",),
    "merge a b c lambda=x": ("lambda=x is not valid: expected a number from 0",),
    "serve .": (". holds no launch",),
    "serve . port=high": ("port=high is not valid: expected a number from 0",),
    "serve . port=70000": ("port=70000 is not valid",),
    "serve . every=0": ("every=0 is not valid: expected a whole number of seconds",),
    "reference job=f.py:f role=replay out=x roles={} rule=x": (
        "has no key rule=x: expected job=, role=, out=, roles=, multiplier=, checkpoint=,",),
    "reference job=f.py:f": ("`nemo-rod reference job=...` misses role=, out=, roles=:",),
    "reference job=f.py:f roles=%j": ("roles=%j is not valid: expected {PATH: ROLE, ...}.",),
    "reference job=f.py:f role=x": ("role=x is not valid: expected adaptation or replay.",),
    "reference --config a.yaml role=replay": ("role= goes with job=, not with --config",),
    "reference job=f.py:f --all": ("(unrecognised or extra argument: --all).",),
    "train --config": ("(argument --config: expected one argument).",),
    "train --config a.yaml --all": ("expected nemo-rod train --config RECIPE.yaml",),
    "trane": ("There is no command 'trane' (did you mean train?): expected one of run, known,",),
}  # fmt: skip


@pytest.mark.parametrize("line", WRONG)
def test_wrong_arguments_are_one_sentence(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["nemo-rod", *line.split()])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("nemo-rod: ") and all(sentence in error for sentence in WRONG[line])
