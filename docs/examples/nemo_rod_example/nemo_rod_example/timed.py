"""A launcher: runs everything here, and notes the duration of every job."""

import time
from pathlib import Path

from nemo_rod.config import Config
from nemo_rod.jobs import Job
from nemo_rod.run.launch.local import Local


class Timed(Local):
    def run_job(self, job: Job, file: Path, config: Config, log: Path) -> None:
        start = time.monotonic()
        super().run_job(job, file, config, log)
        with (Path(config.run_dir) / "seconds.tsv").open("a") as table:
            table.write(f"{job.name}\t{time.monotonic() - start:.1f}\n")
