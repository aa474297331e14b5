"""TensorBoard's and W&B's own files, read back, equal metrics.jsonl, also after a kill."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from logged import of_metrics, of_tensorboard, of_wandb
from test_resume import NEVER, kill_after
from tiny import Setting

from nemo_rod.config import Parallel

STEPS = 12


@pytest.mark.slow
def test_a_killed_and_resumed_run_is_one_curve_in_every_logger(
    tiny: Setting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))  # no account: files
    out = tiny.root / "logged"
    loggers = ["tensorboard", "wandb"]
    job = tiny.rod_job(out, Parallel(), steps=STEPS, checkpoint__every=5, logger=loggers)
    kill_after(8, job, 1)
    lost = (out / "metrics.jsonl").read_text().splitlines()[5:]
    assert lost  # steps after the checkpoint, which are done twice
    outputs = tiny.torchrun(1, "nemo_rod.megatron", job)
    assert sum("W&B has no account here" in line for line in outputs) <= 1
    check_logged(out)


def check_logged(out: Path) -> None:
    """Compares the files of both loggers with metrics.jsonl, step by step."""
    expected = of_metrics(out)
    assert list(expected["train/loss"]) == list(range(1, STEPS + 1))
    assert 0 in expected["validation/replay/chain_0/loss"]
    board = of_tensorboard(out / "tensorboard")
    online, ids = of_wandb(out)
    assert ids == {json.loads((out / "loggers.json").read_text())["wandb"]}
    assert set(board) == set(expected), "the trainer's own curves would repeat ours"
    assert {name for name in online if name[0] != "_"} == set(expected)
    for name, curve in expected.items():
        # TensorBoard stores float32
        assert board[name] == pytest.approx(curve, rel=1e-6, abs=1e-12), name
        if not name.startswith(NEVER):  # W&B has the times of the first attempt
            assert online[name] == curve, name
        assert online[name].keys() == curve.keys()
