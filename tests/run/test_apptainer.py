"""Jobs of a real Slurm in real containers of Apptainer: preempted, requeued, and gone at the end.

Part of `make test-slurm`. Needs `apptainer` (Debian has it in its unstable suite), `mmdebstrap` and
root, and is skipped without. The image is a small Debian, into which this machine's Python is
mounted.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from command_line import composed
from places import ROOT
from slurm_chain import ON_SLURM, RECIPE, Chain, copy, nemo_rod
from slurm_cluster import Cluster, wait_for

from nemo_rod.config import Config
from nemo_rod.run.launch.containers import mounts, render_apptainer
from nemo_rod.run.launch.slurm import render_node, render_stage

pytestmark = pytest.mark.slurm

PYTHON = Path(sys.base_prefix).resolve()
LIBRARIES = "libssl3,libffi8,libsqlite3-0,zlib1g,libbz2-1.0,liblzma5,libgomp1"
# A stage that starts a daemon, as Ray does, and trains until it is asked to stop.
STAGE = """
import os, pathlib, signal, subprocess, sys, time
place = pathlib.Path(sys.argv[1])
count = os.environ.get("SLURM_RESTART_COUNT", "0")
daemon = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
subprocess.Popen([sys.executable, "-c", daemon], start_new_session=True)
pathlib.Path("/tmp/of-this-job").touch()
pathlib.Path("/written-to-the-image").touch()
(place / f"began{count}").write_text("\\n".join([
    os.readlink("/proc/self/ns/pid"), os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ["HOME"],
    " ".join(os.listdir(os.environ["HOME"])), " ".join(os.listdir("/tmp")),
]))
told = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, _: told.append(number))
while count == "0" and not told:
    time.sleep(0.1)
if told:
    time.sleep(3)  # saving takes time
    (place / "saved").write_text(str(told))
    sys.exit(75)
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A .sif file of a small Debian; NEMO_ROD_TEST_SIF names one that is there."""
    if shutil.which("apptainer") is None:
        pytest.skip("apptainer is not installed: Debian's unstable suite has it")
    if given := os.environ.get("NEMO_ROD_TEST_SIF"):
        return Path(given)
    folder = tmp_path_factory.mktemp("image")
    debian = ["mmdebstrap", "--variant=minbase", f"--include={LIBRARIES}", "bookworm"]
    subprocess.run(["unshare", "--mount", *debian, str(folder / "root")], check=True)
    build = ["apptainer", "build", str(folder / "image.sif"), str(folder / "root")]
    subprocess.run(build, check=True)
    return folder / "image.sif"


def in_image(image: Path) -> list[str]:
    """Keys of jobs that run in Apptainer, with this machine's Python and this checkout."""
    places = [PYTHON, ROOT, Path(sys.prefix)]
    return [
        "cluster.container=apptainer",
        f"cluster.image={image}",
        f"cluster.python={sys.executable}",
        f"cluster.mounts=[{','.join(f'{place}:{place}' for place in places)}]",
    ]


def configured(image: Path, run_dir: Path) -> Config:
    options = ["launcher=slurm", "cluster.gpus_per_node=1", *in_image(image)]
    return composed("recipe=toy_synthetic", *options, f"run_dir={run_dir}")


def write_job(config: Config, folder: Path, command: Sequence[str]) -> Path:
    """A job as `launcher=slurm` writes it, with a command of the test's."""
    (folder / "stage.sh").write_text(render_stage(config))
    (folder / "container.sh").write_text(render_apptainer(config))
    (folder / "node.sh").write_text(render_node(config))
    words = ["bash", f"{folder}/container.sh", "bash", f"{folder}/node.sh"]
    (folder / "job.sbatch").write_text(
        "#!/bin/bash\n#SBATCH --time=00:30:00 --requeue --open-mode=append --cpus-per-task=1\n"
        f"#SBATCH --output={folder}/out\nrecord={folder}/record\n"
        f"command=({shlex.join([*words, *command])})\nsource {folder}/stage.sh\n"
    )
    return folder / "job.sbatch"


def test_jobs_in_apptainer_are_requeued_and_leave_nothing(
    cluster: Cluster, image: Path, tmp_path: Path
) -> None:
    (tmp_path / "stage.py").write_text(STAGE)
    config = configured(image, tmp_path)
    python = str(Path(sys.executable).resolve())
    script = write_job(config, tmp_path, [python, f"{tmp_path}/stage.py", str(tmp_path)])
    first = cluster.ask("sbatch", "--parsable", str(script))
    after = write_job(config, tmp_path, [python, "-c", "print()"])
    second = cluster.ask("sbatch", "--parsable", f"--dependency=afterok:{first}", str(after))

    wait_for((tmp_path / "began0").exists, 600, "the job did not begin")
    namespace, inductor, _, at_home, in_tmp = (tmp_path / "began0").read_text().split("\n")
    assert namespace != os.readlink("/proc/self/ns/pid")
    assert inductor == "/tmp/inductor"
    mounted = [Path(mount.split(":")[1]) for mount in mounts(config)]
    assert {*at_home.split()} == first_parts(mounted, Path.home())
    assert {*in_tmp.split()} == first_parts(mounted, Path("/tmp")) | {"of-this-job"}
    assert not (image / "written-to-the-image").exists()
    urgent = ("--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null")
    cluster.ask("sbatch", *urgent, "--wrap=sleep 2")
    wait_for((tmp_path / "began1").exists, 900, "the job did not begin again")
    wait_for(lambda: not cluster.ask("squeue", "-h"), 900, "the jobs did not end")

    print((tmp_path / "out").read_text())
    print(f"signals before it saved: {(tmp_path / 'saved').read_text()}")
    assert (cluster.job(first)["JobState"], cluster.job(first)["Restarts"]) == ("COMPLETED", "1")
    assert cluster.job(second)["JobState"] == "COMPLETED"
    assert left_by(first, second) == []


def test_a_recipe_trains_in_apptainer(cluster: Cluster, image: Path, tmp_path: Path) -> None:
    """Preempted and requeued, two containers on two nodes train what no container trains."""
    chain = Chain(cluster, tmp_path / "run", {})
    recipe = [*RECIPE, "arms=[no_replay,rod]", "train.steps=100"]
    run = ["run", *recipe, *ON_SLURM, *in_image(image), f"run_dir={chain.run_dir}"]
    print(nemo_rod(*run, cluster=cluster))
    for arm in ("no_replay", "rod"):
        chain.reach(arm, 1, 30)
        chain.preempt(arm)
    chain.wait()
    print(chain.status())
    assert {chain.job(stage)["JobState"] for stage in chain.numbers} == {"COMPLETED"}
    for arm in ("no_replay", "rod"):
        assert chain.kinds(arm) == ["began", "stopped", "began", "done"]
        assert chain.job(arm)["Restarts"] == "1"
    assert (chain.run_dir / "report" / "index.html").exists()
    assert left_by(*chain.numbers.values()) == []

    here = tmp_path / "here"
    here.mkdir()
    copy(chain.run_dir, "blocks", "base", "references", to=here)
    for arm in ("no_replay", "rod"):
        nemo_rod("train", *recipe, f"arm={arm}", f"run_dir={here}")
        ours, theirs = (folder / "arms" / arm for folder in (chain.run_dir, here))
        for name in ("curriculum.rod", "hf/model.safetensors"):
            assert (ours / name).read_bytes() == (theirs / name).read_bytes()


def left_by(*jobs: str) -> list[str]:
    """Processes and folders of these jobs that are still on this machine."""
    scratch = Path(os.environ.get("TMPDIR", "/tmp")).glob("nemo-rod.*")
    numbers = "|".join(jobs)
    found = [str(p) for p in scratch if re.search(rf"\.({numbers})\.", p.name)]
    found += processes_of(*jobs)
    print(f"left by jobs {', '.join(jobs)}: {found}")
    return found


def first_parts(places: Sequence[Path], folder: Path) -> set[str]:
    """What a container shows in a folder that is empty but for what is mounted below it."""
    return {p.relative_to(folder).parts[0] for p in places if p.is_relative_to(folder)}


def processes_of(*jobs: str) -> list[str]:
    """Every process of this machine that Slurm's variables say is of one of these jobs."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("SLURM_JOB_ID") in jobs:
                found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
