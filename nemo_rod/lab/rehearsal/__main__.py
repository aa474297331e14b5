"""Compares exported models with Hugging Face: `python -m nemo_rod.lab.rehearsal JOB.json`."""

from __future__ import annotations

import sys
from pathlib import Path

from nemo_rod.files import read_json
from nemo_rod.lab.rehearsal.exported_losses import compare


def main() -> int:
    """Runs the job named on the command line; returns the exit status."""
    job = read_json(Path(sys.argv[1]), "run_dir", "arms", "recipe", "precision", "out")
    try:
        compare(job)
    except ValueError as error:
        print(f"nemo-rod error on rank 0: {' '.join(str(error).split())}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
