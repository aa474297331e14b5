"""Reference losses for `after.py`: `torchrun reference.py DATA REFERENCES ROLE CHECKPOINT`."""

from __future__ import annotations

import sys
from pathlib import Path

from after import ROLES
from before import CORPORA, make_job

from nemo_rod.hosts import swap_in


def main() -> None:
    """Computes the reference losses of one corpus, "new" or "old", with a checkpoint of the job."""
    data, references, name, checkpoint = sys.argv[1:5]
    job = make_job(Path(data), Path(references))
    swap_in.reference(
        "nemo2",
        job["model"],
        job["data"],
        job["trainer"],
        role=ROLES[CORPORA.index(name)],
        roles=ROLES,
        checkpoint=checkpoint,
        out=f"{references}/{name}",
    )


if __name__ == "__main__":
    main()
