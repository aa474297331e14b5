"""Every command, given random words: an exit status and a sentence, never a traceback or a hang.

The words are those that users type, with values of the wrong kind, size and letters, in a run
folder of which everything is there. Nothing there may change: commands that would work are dry.
"""

import contextlib
import io
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra
from hypothesis import given
from hypothesis import strategies as st
from made_up_run import ON_A_CLUSTER, RECIPE
from sandbox import Sandbox, cases, time_limit

from nemo_rod import cli
from nemo_rod.config import config_class

pytestmark = pytest.mark.fuzz

RECIPE_CASES, PATH_CASES, SECONDS = 300, 3000, 60
VERBS = ("run", "plan", "prepare", "pretrain", "reference", "train", "merge", "evaluate", "report")
PATH_VERBS = ("status", "inspect", "curriculum", "merge")
PATH_KEYS = ("block", "overlap", "tokenizer", "lambda")
STATUSES = (0, 1, 2, 75)
VALUES = (
    *("0", "1", "-1", "3", "1e400", "nan", "1e-30", "10000000000000", "true", "null", "''"),
    *("x", "[]", "[a,b]", "{}", "{a:1}", "../x", "/dev/null", "'é'", "ü", "${seed}", "${nope}"),
    *("1,2", "%j", "'a b'", "a=b", "[", "}", "\x1b[31m", "???", "${oc.env:HOME}", "rod", "toy"),
)


def keys(section: Any, prefix: str = "") -> Iterator[str]:
    """Every key of the configuration."""
    for field in fields(section):
        yield prefix + field.name
        if is_dataclass(value := getattr(section, field.name)):
            yield from keys(value, f"{prefix}{field.name}.")


OWN_KEYS = tuple(
    key for key in keys(config_class()()) if key not in ("run_dir", "dry_run", "launcher.kind")
)
OTHERS = (
    *("model", "domain", "parallel", "cluster", "tasks", "variants", "recipe", "hydra.callbacks"),
    *("variants.x", "variants.rod", "domain.sources.x", "domain.sources.dialect.files"),
    *("x", "lambda"),
)  # fmt: skip
WORDS = st.builds(
    lambda sign, key, value: f"{sign}{key}={value}",
    st.sampled_from(("", "", "", "+", "++", "~")),
    st.sampled_from(OWN_KEYS + OTHERS),
    st.sampled_from(VALUES),
)
PATHS = (
    *("", "run", "run/blocks", "run/blocks/replay/chain_0", "run/references/base", "run/arms/rod"),
    *("run/references/unfinished", "run/arms/rod/curriculum.rod", "run/base/hf", "run/report"),
    *("run/arms/max.partial", "run/launch", "nothing", "run/arms/rod/metrics.jsonl"),
)


@pytest.fixture(scope="module")
def sandbox(made_run):
    return Sandbox(made_run.parent)


@pytest.fixture(autouse=True)
def apart(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # a random word may be the name of a folder to write
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # a random word may be the name of a tokenizer


@pytest.mark.parametrize("verb", VERBS)
def test_random_keys_of_recipes(verb, sandbox):
    launchers = st.sampled_from(((), ON_A_CLUSTER))

    @cases(RECIPE_CASES)
    @given(st.lists(WORDS, min_size=1, max_size=3), launchers)
    def check(words: list[str], launcher: tuple[str, ...]) -> None:
        kept = [f"run_dir={sandbox.root / 'run'}", "dry_run=true"]
        run([verb, *RECIPE, *launcher, *words, *kept], sandbox, renders=bool(launcher))

    check()


@pytest.mark.parametrize("verb", PATH_VERBS)
def test_random_paths_and_keys(verb, sandbox):
    words = st.one_of(
        st.sampled_from(PATHS).map(lambda path: str(sandbox.root / path)),
        st.sampled_from(("export", "verify", "diff", "--help", "--config", "--x")),
        st.builds("{}={}".format, st.sampled_from(PATH_KEYS), st.sampled_from(VALUES)),
    )

    @cases(PATH_CASES)
    @given(st.lists(words, max_size=4))
    def check(words: list[str]) -> None:
        run([verb, *words], sandbox, renders=True)

    check()


def run(words: list[str], sandbox: Sandbox, *, renders: bool) -> None:
    """Runs a command line in this process, which writes new files or a launch's if it `renders`."""
    output, before, status = io.StringIO(), sys.argv, 0
    sys.argv = ["nemo-rod", *words]
    try:
        with (
            time_limit(SECONDS),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
        ):
            cli.main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 2 if end.code else 0
    finally:
        sys.argv = before
        GlobalHydra.instance().clear()
    text = output.getvalue()
    assert status in STATUSES and "Traceback" not in text, f"{words}\n{text[-3000:]}"
    assert status == 0 or text.strip(), f"{words} failed without a word"
    changed = sandbox.changed()
    lost = [p for p in changed if p in sandbox.content and "launch" not in p.parts]
    assert not lost and (renders or not changed), f"{words} changed {lost or changed}"
    sandbox.restore(*changed)
