"""A run on a terminal: bars below its lines; elsewhere, the same lines alone."""

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("rich")
from rich.console import Console
from rich.progress import Progress

from nemo_rod.commands import run_stages
from nemo_rod.config import Config
from nemo_rod.lab import live, status
from nemo_rod.run.handover import Stage

_CONTROL = re.compile(r"\x1b\[[\d;?]*[A-Za-z]|\r")


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> live.Screen:
    """A screen of four stages, whose second one is planned with half an hour."""
    monkeypatch.setattr(live, "hours_left", lambda _: {"base": 0.5, "rod": 2.0, "report": 0.25})
    bars = Progress(console=Console(file=io.StringIO(), width=80))
    return live.Screen(Config(), ["prepare", "base", "rod", "report"], bars, io.StringIO())


def shown(screen: live.Screen) -> list[tuple[str, float | None, str]]:
    return [(task.description, task.completed, task.fields["text"]) for task in screen.bars.tasks]


def test_lines_of_progress_move_the_bars(screen: live.Screen) -> None:
    for line, whole, stage in (
        ("[1/4] text -> blocks: done before", (1.0, "1 of 4 stages"), None),
        (
            "[2/4] train the base",
            (1.0, "1 of 4 stages  about 2.8 h left"),
            ("base", 0.0, "train the base"),
        ),
        (
            "progress: base  250/1,000  loss 2.1  replay 100%  5,000 tokens/s  0:15:00 left",
            (1.25, "1 of 4 stages  about 2.5 h left"),
            ("base", 0.25, "250/1,000  0:15:00 left  loss 2.1  replay 100%  5,000 tokens/s"),
        ),
        ("[2/4] train the base: 60 s", (2.0, "2 of 4 stages  about 2.2 h left"), None),
    ):
        assert screen.write(line + "\n") == len(line) + 1
        assert shown(screen)[0] == ("whole run", *whole)
        if stage:
            assert shown(screen)[1] == stage


@pytest.mark.parametrize("tells_time", [True, False])
def test_the_time_left_is_computed_once_where_a_stage_begins(
    tells_time: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the lines of a run, or by its screen, which does so itself."""
    asked: list[Config] = []
    monkeypatch.setattr(status, "time_left", lambda config: asked.append(config) or "1 h")
    stages = [
        Stage(
            name=name, command="", title=name, folder=tmp_path / name, proof=(), extra="",
            is_done=lambda: False, run=lambda: None,
        )
        for name in ("a", "b")
    ]  # fmt: skip
    run_stages._run_here(Config(run_dir=str(tmp_path)), stages, tells_time=tells_time)
    assert len(asked) == (2 if tells_time else 0)


def test_other_lines_are_printed_above_the_bars(screen: live.Screen) -> None:
    """Also a job's remarks, which are marked as progress, but are none."""
    for line in ("nemo-rod: a note", "progress: rank 2: no progress for 60 s", ""):
        screen.write(line + "\n")
    printed = screen.bars.console.file.getvalue()  # type: ignore[attr-defined]
    assert printed == "nemo-rod: a note\n  rank 2: no progress for 60 s\n"


@pytest.mark.parametrize("on_terminal", [True, False])
def test_a_real_run(tmp_path: Path, on_terminal: bool) -> None:
    """With a pseudo-terminal as standard error, and with a pipe."""
    words = ["recipe=toy_synthetic", f"run_dir={tmp_path / 'run'}", "domain.workers=1"]
    command = [sys.executable, "-m", "nemo_rod.cli", "prepare", *words]
    ours, theirs = pty.openpty() if on_terminal else os.pipe()
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, cwd=tmp_path) as process:
        os.close(theirs)
        output = b""
        try:
            while part := os.read(ours, 65536):
                output += part
        except OSError:  # the end of a terminal
            pass
    os.close(ours)
    text = output.decode()
    assert process.returncode == 0, text
    lines = _CONTROL.sub("\n", text)
    assert re.search(r"^\[1/1\] text -> blocks: \d+ s$", lines, re.MULTILINE), lines
    assert ("whole run" in text) == ("\x1b[?25h" in text) == on_terminal  # the cursor is back
