"""Compares held-out losses of exported models with those of Hugging Face's own classes.

Run as `python -m nemo_rod.lab.rehearsal.exported_losses JOB.json`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from nemo_rod.checkpoints.losses import TOLERANCE, distance, load
from nemo_rod.corpus.store import BlockStore
from nemo_rod.files import read_json, write_json
from nemo_rod.run.run_folder import RunFolder


def main() -> int:
    """Writes the largest difference of every arm over its sources; returns the exit status."""
    job = read_json(Path(sys.argv[1]), "run_dir", "arms", "recipe", "precision", "out")
    results, tolerance = RunFolder(Path(job["run_dir"]), job["recipe"]), TOLERANCE[job["precision"]]
    try:
        store = BlockStore(results.blocks, split="holdout")
        largest: dict[str, float] = {}
        for arm in job["arms"]:
            model = load(results.checkpoint(arm))
            losses = read_json(results.arm(arm) / "evaluation.json", "loss")["loss"]
            largest[arm] = max(
                distance(
                    model,
                    store.tokens(source.start + np.arange(source.count)),
                    losses[source.role][source.name],
                    tolerance,
                )
                for source in store.sources
            )
            if not largest[arm] <= tolerance:
                raise ValueError(
                    f"The held-out losses of {arm} differ by up to {largest[arm]:.2g} nats from "
                    f"those of Hugging Face's {type(model).__name__} on the same weights, expected "
                    f"at most {tolerance:g}: the checkpoint and its conversion do not agree."
                )
    except ValueError as error:
        print(f"nemo-rod error on rank 0: {' '.join(str(error).split())}", flush=True)
        return 1
    write_json(Path(job["out"]), {"difference": largest, "precision": job["precision"]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
