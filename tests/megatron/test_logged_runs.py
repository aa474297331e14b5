"""TensorBoard's and W&B's own files, read back, equal metrics.jsonl, also after a kill."""

import json

import pytest
from logged import of_metrics, of_tensorboard, of_wandb
from test_resume import kill_after

from nemo_rod.config import Parallel
from nemo_rod.files import read_json
from nemo_rod.selection.curriculum.journal import read_rows
from nemo_rod.selection.forgetting import validation_forgetting

STEPS = 12
TIMES = ("rod/seconds_", "rod/overhead", "host/model", "host/peak", "at_a_glance/tokens")


@pytest.mark.slow
def test_a_killed_and_resumed_run_is_one_curve_in_every_logger(tiny, monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))  # no account: files
    from torch.utils.tensorboard import SummaryWriter

    out, run_dir = tiny.root / "logged", str(tmp_path / "run")
    (tmp_path / "run" / "tensorboard" / "rod").mkdir(parents=True)
    with SummaryWriter(tmp_path / "run" / "tensorboard" / "rod") as writer:
        writer.add_scalar("at_a_glance/forgetting", 9.0, 0)  # of an arm that is made again
    loggers = ["tensorboard", "wandb"]
    options = {"checkpoint__every": 5, "validation__every": 3, "logger": loggers}
    job = tiny.rod_job(out, Parallel(), steps=STEPS, run_dir=run_dir, **options)
    kill_after(8, job, 1)
    lost = (out / "metrics.jsonl").read_text().splitlines()[5:]
    assert lost  # steps after the checkpoint, which are done twice
    outputs = tiny.torchrun(1, "nemo_rod.megatron", job)
    assert sum("W&B has no account here" in line for line in outputs) <= 1
    rows = read_rows(out / "metrics.jsonl")
    start = read_json(out / "validation_start.json")
    counts = {s.name: s.count for s in tiny.store.sources if s.role == "replay"}
    for row in rows[2::3]:
        now, before = (
            {name: losses[f"validation/replay/{name}/loss"] for name in counts}
            for losses in (row, start)
        )
        assert row["validation/forgetting"] == validation_forgetting(now, before, counts) > 0
    expected = of_metrics(out)
    assert list(expected["at_a_glance/training_loss"]) == list(range(1, STEPS + 1))
    assert list(expected["at_a_glance/forgetting"]) == [3, 6, 9, 12]
    assert 0 in expected["rod_by_source/replay/chain_0/loss"]
    board = of_tensorboard(tmp_path / "run" / "tensorboard" / "rod")
    online, ids = of_wandb(out)
    assert ids == {json.loads((out / "loggers.json").read_text())["wandb"]}
    assert set(board) == set(expected), "the trainer's own curves would repeat ours"
    assert {name for name in online if name[0] != "_"} == set(expected)
    for name, curve in expected.items():
        # TensorBoard stores float32
        assert board[name] == pytest.approx(curve, rel=1e-6, abs=1e-12), name
        if not name.startswith(TIMES):  # W&B has the times of the first attempt
            assert online[name] == curve, name
        assert online[name].keys() == curve.keys()
