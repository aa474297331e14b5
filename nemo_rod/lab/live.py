"""A run on a terminal: its lines, and below them a bar for the run and one for the stage."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from nemo_rod.config import Config
from nemo_rod.lab.plan.plan_text import wall
from nemo_rod.lab.status import PROGRESS, hours_left
from nemo_rod.progress import PREFIX
from nemo_rod.run.handover import Stage
from nemo_rod.run.processes.pythons import can_be_found

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

# the lines that `run_stages` prints at the start and the end of a stage
_STAGE = re.compile(r"\[(?P<number>\d+)/\d+\] (?P<title>.+?)(?P<end>: done before|: \d+ s)?$")


@contextmanager
def live(config: Config, stages: Sequence[Stage]) -> Iterator[bool]:
    """Shows a run on the terminal of standard error until it ends; without rich, as plain lines.

    Yields:
        Whether it shows how much time is left.
    """
    if not can_be_found("rich"):
        yield False
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    terminal = sys.stderr
    bars = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=16),
        TextColumn("{task.fields[text]}", markup=False),
        console=Console(file=terminal, highlight=False, markup=False, emoji=False),
        transient=True,
        refresh_per_second=2,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    screen: Any = Screen(config, [stage.name for stage in stages], bars, terminal)
    with bars, redirect_stderr(screen), ExitStack() as stack:
        if sys.stdout and sys.stdout.isatty():  # the same terminal
            stack.enter_context(redirect_stdout(screen))
        yield True


@dataclass(eq=False)
class Screen:
    """Standard error of a run: progress of a stage moves the bars, all else is printed above them.

    A line is handed over in one piece, as `print` does.
    """

    config: Config
    names: Sequence[str]  # all stages
    bars: Progress
    terminal: TextIO
    number: int = field(default=0, init=False)  # stage in progress, from 1
    hours: dict[str, float] = field(default_factory=dict, init=False)  # left as this stage began

    def __post_init__(self) -> None:
        self.whole: TaskID = self.bars.add_task("whole run", total=len(self.names), text="")
        self.stage: TaskID = self.bars.add_task("", total=1, text="", visible=False)

    def write(self, text: str) -> int:
        """Shows a line."""
        line = text.rstrip("\n")
        if shown := PROGRESS.match(line):
            done = float(shown["done"].replace(",", ""))
            total = float((shown["all"] or "0").replace(",", ""))
            # the least important part last, as narrow terminals cut it off
            parts = (shown["far"], shown["left"] and f"{shown['left']} left", shown["note"])
            self._draw(shown["name"], "  ".join(filter(None, parts)), done / total if total else 0)
            if shown["left"]:
                hours, minutes, seconds = map(int, shown["left"].split(":"))
                self._draw_whole(done / total, hours + minutes / 60 + seconds / 3600)
        elif label := _STAGE.match(line):
            ended = bool(label["end"])
            self.number = int(label["number"])
            if ended:
                self.bars.print(line, soft_wrap=True)
                self._draw_whole(1.0, 0.0)
            else:
                left = hours_left(self.config)
                self.hours = {name: left[name] for name in self.names if name in left}
                name = self.names[self.number - 1]
                self._draw(name, label["title"], 0)
                self._draw_whole(0.0, self.hours.get(name, 0.0))
        elif line:
            self.bars.print(line.replace(PREFIX, "  ", 1), soft_wrap=True)
        return len(text)

    def _draw(self, name: str, text: str, share: float) -> None:
        self.bars.update(self.stage, description=name, completed=share, text=text, visible=True)

    def _draw_whole(self, share: float, own: float) -> None:
        """Draws the run with a share of its stage done, which takes `own` hours yet."""
        present = self.names[self.number - 1]
        left = own + sum(hours for name, hours in self.hours.items() if name != present)
        text = f"{self.number - 1 + int(share)} of {len(self.names)} stages"
        text += f"  about {wall(left)} left" if left else ""
        self.bars.update(self.whole, completed=self.number - 1 + share, text=text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.terminal, name)
