"""Type checkers see the public names: examples pass `mypy --strict`, and misspelt words do not."""

import doctest
import importlib
import os
import subprocess
import sys

import numpy as np
import pytest
from places import ROOT

import nemo_rod
from nemo_rod import __all__ as names

pytestmark = pytest.mark.filterwarnings("ignore")  # of Megatron, about what a CPU lacks
SWAP_IN = ROOT / "recipes" / "swap_in" / "megatron_bridge"
EXAMPLES = ROOT / "docs" / "examples" / "plain_torch"
LOOP, AFTER = EXAMPLES / "loop.py", SWAP_IN / "after.py"
NEED_FILES = (
    *("BlockStore", "References", "Curriculum", "RoDSelector", "RoDBatches"),
    *("install", "watch"),
)
NO_VARIANT = 'No overload variant of "install" matches'
# an example, a word of it, the same word misspelt, and the sentence about it
MISSPELT = [
    (LOOP, "micro_batch_size=micro", "micro_batchsize=micro", 'argument "micro_batchsize"'),
    (LOOP, "multiplier=2", "multiplyer=2", 'argument "multiplyer" for "Candidates"'),
    (LOOP, "batches.end_step(", "batches.end_steps(", '"RoDBatches" has no attribute "end_steps"'),
    (LOOP, "import BlockStore,", "import Blockstore,", 'no attribute "Blockstore"'),
    (LOOP, 'out=out / "rod"', "out=1", 'Argument "out" to "RoDBatches" has incompatible type'),
    (AFTER, "multiplier=2", "multiplyer=2", NO_VARIANT),
    (AFTER, '"megatron_bridge"', '"megatron_brigde"', NO_VARIANT),
    (AFTER, "references=[", "references=[0, ", NO_VARIANT),
    (AFTER, "        cfg,\n", "", NO_VARIANT),
]


@pytest.mark.slow
def test_checkers_find_misspelt_words_and_nothing_else(tmp_path, pytestconfig):
    kept = getattr(pytestconfig, "cache", None)  # what mypy knows of the package from before
    cache = kept.mkdir("mypy") if kept else tmp_path / "cache"
    every = tmp_path / "every.py"
    every.write_text("import nemo_rod\n" + "".join(f"nemo_rod.{name}\n" for name in names))
    right, wrong = [every, LOOP, EXAMPLES / "references.py", AFTER], []
    for number, (file, word, misspelt, _) in enumerate(MISSPELT):
        text = file.read_text()
        assert text.count(word) == 1, word
        wrong.append(tmp_path / f"misspelt_{number}.py")
        wrong[-1].write_text(text.replace(word, misspelt))
    settings = tmp_path / "mypy.ini"  # torch itself would take most of the time
    settings.write_text("[mypy]\n[mypy-torch.*,transformers.*]\nfollow_imports = skip\n")
    options = ("--strict", "--follow-imports=silent", "--config-file", str(settings))
    command = [sys.executable, "-m", "mypy", *options, "--ignore-missing-imports"]
    command += ["--cache-dir", str(cache), *map(str, [*right, *wrong])]
    env = {**os.environ, "MYPYPATH": str(SWAP_IN)}
    output = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True).stdout
    lines = [line for line in output.splitlines() if ": error: " in line]
    for file, (*_, sentence) in zip(wrong, MISSPELT, strict=True):
        assert [line for line in lines if file.name in line and sentence in line], output
    assert not [line for line in lines if "misspelt_" not in line], output


@pytest.mark.parametrize("name", [name for name in names if name != "__version__"])
def test_public_docstrings_have_an_example(name):
    """Those that need neither files nor a model are run."""
    public = getattr(nemo_rod, name)
    there = vars(importlib.import_module(public.__module__)) | {"np": np}
    example = doctest.DocTestParser().get_doctest(public.__doc__ + "\n", there, name, None, 0)
    assert example.examples
    if name not in NEED_FILES:
        assert doctest.DocTestRunner().run(example).failed == 0
