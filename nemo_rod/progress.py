"""Progress lines of long-running work: its name, how far it is, and the time left."""

from __future__ import annotations

import sys
import time

# Marks output lines for users: a launcher shows only these, the log keeps all.
PREFIX = "progress: "


class Progress:
    """Prints a progress line at intervals.

    Args:
        name: Label of the work.
        total: Total amount of work; 0 if unknown.
        unit: Counted unit, such as "blocks"; if given, lines also show the pace.
        tokens: Tokens of a counted unit; if given, lines also show tokens per second.
        prefix: Start of every line.
        every_seconds: Minimum time between two lines; the last one is always shown.
    """

    def __init__(
        self,
        name: str,
        total: float,
        *,
        unit: str = "",
        tokens: int = 0,
        prefix: str = PREFIX,
        every_seconds: float = 2.0,
    ) -> None:
        self.name, self.total, self.unit, self.tokens = name, total, unit, tokens
        self.prefix = prefix
        self.every_seconds = every_seconds
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
        if done > self.first:
            rate = (done - self.first) / max(now - self.began, 1e-9)
            if self.unit:
                slow = f"{1 / rate:,.0f} s a {self.unit.removesuffix('s')}"
                parts.append(f"{rate:,.0f} {self.unit}/s" if rate >= 1 else slow)
            parts += [f"{rate * self.tokens:,.0f} tokens/s"] if self.tokens else []
            if self.total:
                left = int((self.total - done) / rate)
                parts.append(f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left")
        print(self.prefix + "  ".join(filter(None, parts)), file=sys.stderr, flush=True)
