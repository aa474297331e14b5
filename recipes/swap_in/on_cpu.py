"""Runs a Megatron-Bridge job on a machine without a GPU: `python on_cpu.py JOB.py [ARGUMENTS]`.

The job's file stays as it is for GPUs; only its configuration must ask for plain torch and gloo.
"""

from __future__ import annotations

import runpy
import sys


def main() -> None:
    """Runs the job as `python JOB.py` would."""
    from nemo_rod.megatron import cpu  # makes Megatron importable

    cpu.install_trainer()
    del sys.argv[0]
    sys.path.insert(0, str(__import__("pathlib").Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":  # the checkpoint writer starts processes that read this file again
    main()
