"""Kernels that Triton has tuned on a run's GPUs, kept from job to job of the run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nemo_rod.files import write_whole
from nemo_rod.run.processes.pythons import sees_gpu


@contextmanager
def tuned_kernels(kept: Path, *, keep: bool) -> Iterator[dict[str, str]]:
    """Yields variables that give Triton a folder on this node with the kernels kept so far.

    Triton picks a kernel by timing several, and sums of Gated DeltaNet and Mamba-2 depend on the
    pick: a job that resumes should not pick again. A TRITON_CACHE_DIR of the user's is left alone.

    Args:
        kept: folder of the run.
        keep: whether this node adds its new kernels to it; one node of a job does.
    """
    if not sees_gpu() or "TRITON_CACHE_DIR" in os.environ:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="triton-") as folder:
        if kept.exists():
            shutil.copytree(kept, folder, dirs_exist_ok=True)
        try:
            switches = {"TRITON_CACHE_AUTOTUNING": "1", "FLA_CACHE_RESULTS": "1"}
            yield {"TRITON_CACHE_DIR": folder, **switches}
        finally:
            with suppress(OSError):  # they can be tuned again
                for file in Path(folder).rglob("*") if keep else ():
                    goal = kept / file.relative_to(folder)
                    if file.is_file() and not goal.exists():
                        write_whole(goal, file.read_bytes())
