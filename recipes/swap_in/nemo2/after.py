"""The job of `before.py` with Replay on Demand in it: `torchrun after.py DATA OUT REFERENCES`."""

from __future__ import annotations

import sys
from pathlib import Path

from before import make_job
from nemo.collections import llm

import nemo_rod

ROLES = {0: "adaptation", 1: "replay"}


def main() -> None:
    """Trains on what the model chooses."""
    data, out, references = map(Path, sys.argv[1:4])
    job = make_job(data, out)
    nemo_rod.install(
        "nemo2",
        job["model"],
        job["data"],
        job["trainer"],
        roles=ROLES,
        references=[references / "new", references / "old"],
    )
    llm.pretrain(**job)


if __name__ == "__main__":
    main()
