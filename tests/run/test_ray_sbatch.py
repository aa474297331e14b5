"""`ray.sbatch` as it is rendered, with a ray.sub and a Slurm of the test's."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from command_line import composed
from slurm_cluster import wait_for

from nemo_rod.hosts.nemo_rl.on_slurm import RayOnSlurm
from nemo_rod.run.launch.render import launch_folder, write_files
from nemo_rod.run.stages import Stages

JOB = "7"
AT_WORK = "touch $HERE/at_work; while [[ ! -e $HERE/go ]]; do sleep 0.1; done; exit 3"
STOPPED = 'echo "{\\"event\\": \\"stopped\\"}" >>"$HERE/record"; exit 1'
# Slurm ends a job that it takes back, so that nothing comes of the pauses after a requeue
SLEEP = '[[ $1 == 3600 || $1 == 300 ]] && touch "$HERE/waits"; exec /bin/sleep "$1"'


class Job:
    """A job of ray.sub, and what it asked of Slurm."""

    def __init__(self, folder: Path, ray_sub: str, *overrides: str, restarts: int = 0) -> None:
        self.folder, programs = folder, folder / "bin"
        programs.mkdir()
        for name, text in (
            (programs / "scontrol", 'echo "$@" >>"$HERE/asked"'),
            (programs / "sleep", SLEEP),
            (folder / "ray.sub", ray_sub),
        ):
            name.write_text(f"#!/bin/bash\n{text}\n")
            name.chmod(0o700)
        script = rendered(folder, *overrides) / "ray.sbatch"
        self.process = subprocess.Popen(
            ["bash", str(script), str(folder / "record")],
            env={
                "HERE": str(folder),
                "PATH": f"{programs}:{os.environ['PATH']}",
                "BASE_LOG_DIR": str(folder / "logs"),
                "SLURM_JOB_ID": JOB,
                "SLURM_RESTART_COUNT": str(restarts),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def near_its_limit(self) -> None:
        """As Slurm sends it for --signal=B:USR1@...: to the job script alone."""
        wait_for((self.folder / "at_work").exists, 60, "ray.sub did not begin")
        self.process.send_signal(signal.SIGUSR1)

    def ends(self, status: int) -> bool:
        """Whether it ends with this status, and nothing was asked of Slurm."""
        return self.process.wait(60) == status and not (self.folder / "asked").exists()

    def waits_for_its_end(self) -> bool:
        return (self.folder / "waits").exists() and self.process.poll() is None

    def goes_back(self) -> bool:
        """Whether it has asked for a requeue, once, and waits for Slurm to end it."""
        wait_for(self.waits_for_its_end, 60, "it does not wait")
        return (self.folder / "asked").read_text() == f"requeue {JOB}\n"


def rendered(folder: Path, *overrides: str) -> Path:
    """The folder of a launch's files."""
    config = composed(
        *("recipe=toy_synthetic", "launcher=ray", "cluster=b200_8", f"run_dir={folder}/run"),
        *("cluster.image=/shared/image.sqsh", f"launcher.nemo_rl={folder}"),
        *overrides,
    )
    write_files(launch_folder(config), RayOnSlurm().render(config, Stages(config).all()))
    return launch_folder(config)


@pytest.fixture
def start(tmp_path):
    jobs: list[Job] = []

    def started(*arguments: str, **options: int) -> Job:
        jobs.append(Job(tmp_path, *arguments, **options))
        return jobs[-1]

    yield started
    for job in jobs:
        with suppress(ProcessLookupError):
            os.killpg(job.process.pid, signal.SIGKILL)
        job.process.wait()


def test_jobs_are_told_of_their_time_limit(tmp_path):
    folder = rendered(tmp_path, "launcher.grace_seconds=120")
    script = (folder / "rod.sh").read_text()
    assert "\n  --signal=B:USR1@120 \\\n" in script
    record = tmp_path / "run" / "launch" / "stages" / "rod.jsonl"
    assert script.endswith(f'  "$@" {folder}/ray.sbatch {record}\n')


@pytest.mark.parametrize("status", [0, 3])
def test_a_job_ends_as_ray_sub_did(start, status):
    assert start(f"exit {status}").ends(status)


def test_near_its_time_limit_a_job_goes_back_into_the_queue(start):
    job = start(AT_WORK)
    job.near_its_limit()
    assert job.goes_back()
    (job.folder / "go").touch()  # ray.sub ends before Slurm has ended the job
    time.sleep(1)
    assert job.waits_for_its_end() and job.goes_back()


def test_a_job_that_may_not_be_requeued_has_the_rest_of_its_time(start):
    job = start(AT_WORK, "launcher.requeues=2", restarts=2)
    job.near_its_limit()
    time.sleep(1)
    assert job.process.poll() is None
    (job.folder / "go").touch()
    assert job.ends(3)
    assert "stopped for good after launcher.requeues=2" in job.process.communicate()[0]


@pytest.mark.parametrize("ending", ["exit 75", "kill -TERM $$", STOPPED])
def test_a_stage_that_was_asked_to_stop_goes_back(start, ending):
    assert start(ending).goes_back()


def test_a_requeued_job_does_not_find_the_marks_of_its_first_attempt(start, tmp_path):
    """Its number, and so the folder of ray.sub's logs, is the same."""
    folder = tmp_path / "logs" / f"{JOB}-logs"
    folder.mkdir(parents=True)
    for name in ("STARTED_RAY_HEAD", "ENDED", "ray-driver.log"):
        (folder / name).touch()
    job = start('ls "$BASE_LOG_DIR"/*; echo "$SLURM_OPEN_MODE"', restarts=1)
    assert job.process.communicate(timeout=60)[0].split() == ["ray-driver.log", "append"]
