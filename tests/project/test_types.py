"""Type checkers see the public names: examples pass `mypy --strict`, and misspelt words do not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from places import ROOT

from nemo_rod import __all__ as names

SWAP_IN = ROOT / "recipes" / "swap_in" / "megatron_bridge"
EXAMPLES = ROOT / "docs" / "examples" / "plain_torch"
LOOP, AFTER = EXAMPLES / "loop.py", SWAP_IN / "after.py"
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


def test_checkers_find_misspelt_words_and_nothing_else(tmp_path: Path) -> None:
    every = tmp_path / "every.py"
    every.write_text("import nemo_rod\n" + "".join(f"nemo_rod.{name}\n" for name in names))
    right, wrong = [every, LOOP, EXAMPLES / "references.py", AFTER], []
    for number, (file, word, misspelt, _) in enumerate(MISSPELT):
        text = file.read_text()
        assert text.count(word) == 1, word
        wrong.append(tmp_path / f"misspelt_{number}.py")
        wrong[-1].write_text(text.replace(word, misspelt))
    options = ("--strict", "--config-file", str(ROOT / "pyproject.toml"), "--no-pretty")
    command = [sys.executable, "-m", "mypy", *options, *map(str, [*right, *wrong])]
    env = {**os.environ, "MYPYPATH": str(SWAP_IN)}
    output = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True).stdout
    lines = [line for line in output.splitlines() if ": error: " in line]
    for file, (*_, sentence) in zip(wrong, MISSPELT, strict=True):
        assert [line for line in lines if file.name in line and sentence in line], output
    assert not [line for line in lines if "misspelt_" not in line], output
