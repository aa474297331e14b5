"""Completion, in real shells on a terminal of their own."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import nemo_rod

from nemo_rod.lab.completion import candidates

SHELLS = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
}
TYPED = {  # what is typed before the tab -> the line after it
    "nemo-rod pla": "nemo-rod plan ",
    "nemo-rod run rec": "nemo-rod run recipe=",
    "nemo-rod run recipe=toy_synth": "nemo-rod run recipe=toy_synthetic ",
    "nemo-rod run recipe=toy train.warmup_f": "nemo-rod run recipe=toy train.warmup_fraction=",
    "nemo-rod train recipe=toy arm=rod_av": "nemo-rod train recipe=toy arm=rod_averages ",
}


class Shell:
    """An interactive shell with completion, on a terminal."""

    def __init__(self, name: str, folder: Path) -> None:
        script = f'#!/bin/sh\nexec "{sys.executable}" -m nemo_rod.cli "$@"\n'
        (folder / "nemo-rod").write_text(script)
        (folder / "nemo-rod").chmod(0o755)
        self.terminal, inner = pty.openpty()
        environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "TERM": "dumb"}
        environment |= {"PS1": "$ ", "HOME": str(folder), "COLUMNS": "200"}
        self.process = subprocess.Popen(
            SHELLS[name],
            stdin=inner, stdout=inner, stderr=inner,
            env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(inner)
        self.type("PS1='$ '; bind 'set enable-bracketed-paste off' 2>/dev/null\n")
        self.type(f'eval "$(nemo-rod completion {name})"; echo rea""dy\n')
        self.read_until("ready")

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def read_until(self, text: str, seconds: float = 60.0) -> str:
        shown, end = "", time.monotonic() + seconds
        while text not in shown and time.monotonic() < end:
            if select.select([self.terminal], [], [], 0.1)[0]:
                shown += os.read(self.terminal, 4096).decode(errors="replace")
        assert text in shown, shown
        return shown


@pytest.mark.parametrize("name", SHELLS)
def test_a_tab_completes_the_line(name: str, tmp_path: Path) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    shell = Shell(name, tmp_path)
    try:
        for typed, line in TYPED.items():
            shell.type(f"{typed}\t")
            # what the shell has then is told by the command line that it would run
            time.sleep(0.1)
            shell.type("\x01echo '<\x05>'\n")
            # zsh takes the space away when something else than a word follows
            shell.read_until(f"<{line.rstrip() if name == 'zsh' else line + '>'}")
        shell.type("nemo-rod run recipe=toy arms=[rod,rood]\n")  # not a pattern of files
        shell.read_until("There is no arm 'rood'")
    finally:
        shell.process.kill()


@pytest.mark.parametrize(
    ("line", "expected", "others"),
    [
        ("nemo-rod ", ["run ", "status ", "completion "], ["score "]),
        ("nemo-rod run recipe=toy dry_run=", ["dry_run=true ", "dry_run=false "], []),
        ("nemo-rod run recipe=toy ar", ["arms=[", "arm="], ["arms."]),
        ("nemo-rod train recipe=toy arm=rod_ka", ["arm=rod_kappa_0.5 "], ["arm=rod "]),
        ("nemo-rod run arms=[rod,", ["arms=[rod,base"], ["arms=[rod,rod"]),
        ("nemo-rod plan recipe=toy parallel=qwen3_5_4b/h1", ["parallel=qwen3_5_4b/h100_8 "], []),
        ("nemo-rod inspect x sp", ["split=train", "split=holdout"], []),
        ("nemo-rod nonsense x", [], []),
    ],
)
def test_candidates(line: str, expected: list[str], others: list[str]) -> None:
    shown = candidates(line)
    assert {*expected} <= {*shown} and not {*others} & {*shown}
    assert expected or not shown


def test_a_line_without_candidates_is_left_to_the_shell() -> None:
    """It completes names of files then, which an empty line would keep it from."""
    done = nemo_rod("completion", "bash", "nemo-rod nonsense x")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
