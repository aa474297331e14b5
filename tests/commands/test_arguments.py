"""Command lines of paths: help names every argument, and a wrong one is refused in a sentence."""

import sys

import pytest

from nemo_rod import cli, parts
from nemo_rod.commands.arguments import Arguments, Key
from nemo_rod.commands.errors import errors_in_one_sentence
from nemo_rod.signals import Stopped


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize(
    "verb", [*parts.names("commands"), "curriculum materialise", "import references"]
)
def test_every_command_of_paths_has_help(verb, option, monkeypatch, capsys):
    """Its arguments and keys are in it by how `Arguments` adds them."""
    monkeypatch.setattr(sys, "argv", ["nemo-rod", *verb.split(), option])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: nemo-rod {verb} ")


def test_words_belong_to_the_keys_of_a_verb_and_else_to_paths():
    parser = Arguments(prog="verb")
    parser.add_argument("path")
    parser.add_argument("other", nargs="?")
    parser.add_keys(
        Key(name="b", value="B", help=""),
        Key(name="d", value="D", help="a number", read=int, expected="an integer"),
    )
    for words in (["a=0", "b=1=1", "c=2"], ["b=1=1", "a=0", "c=2"], ["a=0", "c=2", "b=1=1"]):
        options = parser.parse_args(words)
        assert (options.path, options.other, options.b, options.d) == ("a=0", "c=2", "1=1", None)
    assert parser.parse_args(["a", "d=3"]).d == 3
    assert "d=D" in parser.format_help() and "other" in parser.format_help()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("inspect", True), ("doctor recipe=toy", True), ("run --help", False), ("train", False),
        ("train recipe=toy --help", False), ("train --config-path x --config-name config", False),
        ("train job=a.py:f", False), ("reference recipe=toy arm=base", False),
        ("reference --config-dir my recipe=mine", False),
        ("merge", False),
        ("merge recipe=toy arm=merge_0.4", False), ("merge -m recipe=toy", False),
        ("merge base adapted", True), ("merge a=b c d lambda=0.5", True), ("report", False),
        ("report recipe=toy report.seeds=[a]", False), ("report checkpoints/rod", True),
    ],
)  # fmt: skip
def test_paths_or_a_recipe(line, expected):
    name, *words = line.split()
    assert cli.takes_paths(name, words) is expected


@pytest.mark.parametrize(
    ("error", "status"), [(OSError, 2), (RuntimeError, 1), (Stopped, 75), (KeyboardInterrupt, 130)]
)
def test_a_stop_and_a_failed_job_have_a_status_of_their_own(error, status, capsys):
    with pytest.raises(SystemExit) as left, errors_in_one_sentence():
        raise error("rank 1:\nfailed")
    said = "stopped by Ctrl-C" if error is KeyboardInterrupt else "rank 1: failed"
    assert (left.value.code, capsys.readouterr().err) == (status, f"nemo-rod: {said}\n")


def test_a_missing_package_is_named_with_its_smallest_extra(capsys):
    with pytest.raises(SystemExit), errors_in_one_sentence():
        raise ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow")
    assert "[data]" in capsys.readouterr().err
