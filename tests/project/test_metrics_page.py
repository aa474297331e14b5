"""docs/watching.md names every metric that a step logs, and none that is not there."""

import re
from dataclasses import replace

import numpy as np
from places import ROOT

from nemo_rod.alternatives.odm import ODM
from nemo_rod.selection import Joint, Pool, SourceRow, choose, selection_metrics
from nemo_rod.selection.mix import Mix

OF_CALLERS = {  # of the update, the trainer and the journal
    *("train/loss", "train/grad_norm", "train/lr", "memory/peak_gib", "rod/overhead"),
    *("throughput/tokens_per_second", "throughput/model_tflops_per_gpu"),
    *(f"timing/train/{part}" for part in ("scoring", "update", "lookup", "selection", "total")),
    *("validation/<role>/<source>/loss", "validation/forgetting", "validation/adaptation_loss"),
}


def documented() -> set[str]:
    """Names in the first column of the table; a word without a slash replaces the name's end."""
    text = (ROOT / "docs" / "watching.md").read_text()
    names: set[str] = set()
    for line in re.findall(r"^\| (`.*?) \|", text.split("## Loggers")[0], re.MULTILINE):
        first, *others = re.findall(r"`(.*?)`", line)
        names.add(first)
        for word in others:
            end = r"_p10$" if word.startswith("_") else r"[^/]+$"
            names.add(word if "/" in word else re.sub(end, word, first))
    return names


def test_the_page_has_every_metric_of_a_step():
    pool = Pool(0, np.arange(4), np.array([False, False, True, True]))
    loss = np.ones(4, dtype=np.float32)
    choice = choose(pool, Joint(), 2, loss, 0 * loss)
    row = selection_metrics(choice, np.array([0, 0, 1, 1]), ["SOURCE", "OTHER"])
    sources = [SourceRow("<source>", "adaptation", 0, 2), SourceRow("OTHER", "replay", 2, 2)]
    mixed = replace(pool, sources=sources, source_C=np.array([0, 0, 1, 1]))
    mixed_choice = replace(choice, pool=mixed)
    logged = {*Mix(target=1.0).metrics(mixed_choice)}
    for name in [*row, *ODM().metrics(mixed_choice)]:
        if "OTHER" not in name:
            name = re.sub(r"(rod/(?:loss|reference))_.*", r"\1_<group>", name)
            name = re.sub(r"rho_(adaptation|replay)_", "rho_<role>_", name)
            logged.add(name.replace("SOURCE", "<source>"))
    assert documented() == logged | OF_CALLERS
