"""Runs a job as `launcher=nemo_rl` does: run_job.py JOB.json SECTION (`nemo_rl` in JSON)."""

import json
import sys
from pathlib import Path

from nemo_rod.commands.errors import errors_in_one_sentence
from nemo_rod.hosts.nemo_rl import algorithm, settings
from nemo_rod.jobs import read_job
from nemo_rod.signals import leave_ray

if __name__ == "__main__":
    status = 0
    try:
        with errors_in_one_sentence():
            job = read_job(Path(sys.argv[1]))
            assert hasattr(job, "start"), "a job that trains or scores"
            algorithm.run(job, settings.resolve_job(job, json.loads(sys.argv[2])))
    except SystemExit as end:
        status = int(end.code or 0)
    leave_ray(status)
    sys.exit(status)
