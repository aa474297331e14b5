"""The process that runs the tasks of one model: `python -m nemo_rod.lab.tasks JOB.json`.

Every model has its own process, because a backend may not free its memory.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

from nemo_rod.lab.tasks.lm_eval_job import TaskJob, evaluate_tasks
from nemo_rod.progress import Progress
from nemo_rod.signals import end_with_parent


def main() -> int:
    """Runs the job named on the command line and returns the exit status."""
    end_with_parent()
    job = TaskJob(**json.loads(Path(sys.argv[1]).read_text()))
    total = sum(len(names) for names in job.capabilities.values())
    progress = Progress(f"tasks of {job.name}", total, unit="tasks")
    try:
        evaluate_tasks(job, progress.step)
    except Exception as error:
        traceback.print_exc()
        what = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        print(f"nemo-rod error on rank 0: {what}{' '.join(str(error).split())}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
