"""The most memory that a passage needs beyond what was in use when it began."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

GIB = 2**30


@contextmanager
def peak_beyond() -> Iterator[list[float]]:
    """Yields a list that has the GiB once the passage has ended.

    Of the GPU, as torch allocates it; without a GPU, of the process, as the kernel counts it.
    """
    peak: list[float] = []
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield peak
        torch.cuda.synchronize()
        peak.append((torch.cuda.max_memory_allocated() - before) / GIB)
        return
    Path("/proc/self/clear_refs").write_text("5")  # forgets the high-water mark
    before = status("VmRSS")
    yield peak
    peak.append(max(0, status("VmHWM") - before) / 2**20)


def status(name: str) -> int:
    """A line of this process's /proc/self/status, KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise AssertionError(name)
