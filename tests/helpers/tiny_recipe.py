"""A recipe of seconds: `toy_synthetic` on a few blocks, with a whole RoD arm.

`small_run` of conftest.py runs it with a part of each kind of the example package in
docs/examples, and with a branch of its arm beside its unbroken counterpart.
"""

import csv
import json
from pathlib import Path

import numpy as np
from places import ROOT

from nemo_rod.files import read_lines
from nemo_rod.selection import Curriculum

STEPS, BATCH = 6, 8
ARMS = ("base", "no_replay", "rod")
RECIPE = (
    *("recipe=toy_synthetic", f"arms=[{','.join(ARMS)}]", "parallel=single", "run_dir=run"),
    *("domain.block_size=16", "domain.holdout_fraction=0.1"),
    *(f"domain.sources.chain_{number}.max_bytes=5000" for number in range(2)),
    *(f"~domain.sources.chain_{number}" for number in range(2, 9)),
    *(f"pretrain.{key}" for key in ("steps=4", "batch_size=8", "micro_batch_size=8")),
    *(f"train.{key}" for key in (f"steps={STEPS}", f"batch_size={BATCH}", "micro_batch_size=8")),
)

EXAMPLE = ROOT / "docs" / "examples" / "nemo_rod_example"
SHARE = 0.25
NEW = "{role: adaptation, kind: csv, files: [new.csv], text_field: body, options: {delimiter: ';'}"
EXTENDED = (
    *(*RECIPE, "~domain.sources.dialect"),
    f"+domain.sources.new={NEW}, filter: 'lang == \"de\"'}}",
    *("selection.policy=capped", f"+selection.policy_options.max_share={SHARE}"),
    *("selection.score=relative", "logger=[lines,modules]", "launcher.kind=timed"),
    *("example.parameters=true", "example.shares=2"),
)
BRANCHES = {  # one, and the arm that it is equal to; tests/run/test_ends.py has the others
    "end": "{of: rod, at: 2, anneal: 3}",
    "end_unbroken": "{of: rod, steps: 5, train: {warmup_steps: 1, decay_steps: 3}}",
}
SCHEDULED = (
    *("checkpoint.every=2", "checkpoint.keep=4", "train.warmup_steps=1", "train.decay_steps=2"),
    *(f"+variants.{name}={variant}" for name, variant in BRANCHES.items()),
)
WHOLE = (*EXTENDED, *SCHEDULED, f"arms=[{','.join([*ARMS, *BRANCHES])}]")


def write_rows(path: Path) -> None:
    """Sixty documents, some of several lines; two thirds of them in German."""
    words = np.random.default_rng(0).integers(0, 26, (60, 40, 4)) + ord("a")
    with path.open("w", newline="") as file:
        table = csv.writer(file, delimiter=";")
        table.writerow(["lang", "body"])
        for number, row in enumerate(words):
            text = "\n".join("".join(map(chr, word)) for word in row)
            table.writerow(["en" if number % 3 == 0 else "de", text])


def assert_is_the_unbroken_arm(branch: Path, whole: Path, trunk: Path, at: int, steps: int) -> None:
    """To the bit, with steps of its own after those of the trunk alone."""
    records = [Curriculum.open(arm / "curriculum.rod", read_only=True) for arm in (branch, whole)]
    assert records[0].records().tobytes() == records[1].records().tobytes()
    own, other, before = (read_lines(arm / "metrics.jsonl") for arm in (branch, whole, trunk))
    timing = ("timing/", "throughput/", "memory/", "rod/overhead")
    lasting = [
        [{k: v for k, v in row.items() if not k.startswith(timing)} for row in rows]
        for rows in (own, other)
    ]
    assert lasting[0] == lasting[1]
    weights = "hf/model.safetensors"
    assert (branch / weights).read_bytes() == (whole / weights).read_bytes()
    # those before are the trunk's, to the time that they took
    assert own[:at] == before[:at] and own[at:] != before[at : len(own)]
    assert json.loads((branch / "arm.json").read_text())["steps"] == len(own) == steps
