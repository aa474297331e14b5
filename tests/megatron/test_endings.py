"""An exit of Megatron's trainer is a requested stop, or an error."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rod.signals import Stopped


@pytest.mark.parametrize(
    ("status", "error", "sentence"),
    [
        (0, Stopped, "rod was asked to stop and has saved: run it again to resume"),
        (16, RuntimeError, "Megatron ended the process with exit status 16"),  # a rerun differed
    ],
)
def test_only_an_exit_without_a_fault_is_a_stop(status, error, sentence, monkeypatch):
    from nemo_rod.megatron import train_job

    monkeypatch.setattr(train_job, "pretrain", lambda *_, **__: sys.exit(status))
    monkeypatch.setattr(train_job, "_write_checkpoints_in_this_process", lambda: None)
    selector: Any = SimpleNamespace(installed=nullcontext)
    job: Any = SimpleNamespace(name="rod")
    config: Any = None
    with pytest.raises(error, match=sentence):
        train_job._pretrain(job, selector, config, [])
