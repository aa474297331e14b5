"""A saved step as a Hugging Face checkpoint, from any layout, read by transformers."""

import json
from pathlib import Path

import pytest
import torch
from architectures import tensors
from test_layouts import assert_validated
from tiny import Setting

from nemo_rod.config import Parallel
from nemo_rod.jobs import ExportJob


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Parallel(), Parallel(tensor=2)])
def test_a_saved_step_is_what_was_validated_then(tiny, layout):
    """Validated after step 10 of 20; the last step equals the export at the end, bit for bit."""
    out = tiny.root / f"exported_tp{layout.tensor}"
    tiny.rod_run(out, layout, checkpoint__every=10)
    exported = {step: export(tiny, out, step) for step in (10, 20)}
    at_end, last = tensors(out / "hf"), tensors(exported[20])
    assert at_end.keys() == last.keys() and len(last) > 10
    assert all(torch.equal(at_end[name], last[name]) for name in last)
    row = json.loads((out / "metrics.jsonl").read_text().splitlines()[9])
    assert_validated(tiny, row, exported[10])


def export(tiny: Setting, trained: Path, step: int) -> Path:
    """Exports a step with one process; returns the folder of the Hugging Face checkpoint."""
    out = trained / f"export_{step}"
    checkpoint = str(trained / "checkpoints" / f"iter_{step:07d}")
    job = tiny.write(ExportJob, out.name, out, start=str(tiny.base), saved=checkpoint)
    tiny.torchrun(1, "nemo_rod.megatron", job)
    return out / "hf"
