"""Progress lines of long-running work: its name, how far it is, and the time left."""

from __future__ import annotations

import sys
import time
from dataclasses import KW_ONLY, dataclass

# Marks output lines of a job that users are shown; its log has all lines.
PREFIX = "progress: "


@dataclass(eq=False)
class Progress:
    """Prints a progress line at intervals."""

    name: str  # label of the work
    total: float  # amount of work; 0 if unknown
    _: KW_ONLY
    unit: str = ""  # counted unit, such as "blocks"; if given, lines also show the pace
    tokens: int = 0  # tokens per counted unit; if given, lines also show tokens per second
    every_seconds: float = 2.0  # shortest time between two lines; the last is always shown

    def __post_init__(self) -> None:
        self.first, self.began, self.shown = 0.0, time.monotonic(), time.monotonic()

    def start(self, done: float) -> None:
        """Starts counting at `done`, so that the pace of resumed work is its own."""
        self.first, self.began = done, time.monotonic()

    def step(self, done: float, note: str = "") -> None:
        """Prints a line if the last one is old enough or the work is complete."""
        now = time.monotonic()
        complete = self.total and done >= self.total
        if now - self.shown < self.every_seconds and not complete:
            return
        self.shown = now
        far = f"{done:,.0f}/{self.total:,.0f}" if self.total else f"{done:,.0f}"
        parts = [self.name, f"{far} {self.unit}".rstrip(), note]
        if done > self.first and now > self.began + 0.1:  # an earlier pace is noise
            rate = (done - self.first) / (now - self.began)
            if self.unit:
                slow = f"{1 / rate:,.0f} s a {self.unit.removesuffix('s')}"
                parts.append(f"{rate:,.0f} {self.unit}/s" if rate >= 1 else slow)
            parts += [f"{rate * self.tokens:,.0f} tokens/s"] if self.tokens else []
            if self.total:
                left = int((self.total - done) / rate)
                parts.append(f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left")
        print(PREFIX + "  ".join(filter(None, parts)), file=sys.stderr, flush=True)
