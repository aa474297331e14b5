"""Jobs of a real Slurm in real containers of Apptainer: preempted, requeued, and gone at the end.

Part of `make test-slurm`. Needs `apptainer`, `mmdebstrap` and root, and is skipped without. The
image is a small Debian, into which this machine's Python is mounted. Debian has Apptainer in its
unstable suite alone, for a libc above that of Debian 12: there its files go to the same places from
`dpkg-deb -x`, and `patchelf --set-interpreter ... --force-rpath --set-rpath ...` points
`/usr/bin/apptainer` and `/usr/lib/x86_64-linux-gnu/apptainer/bin/starter` to unstable's libc6,
libseccomp2 and libsqlite3-0, unpacked in a folder of their own. Where root lacks a capability, set
`root default capabilities = no` in /etc/apptainer/apptainer.conf.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from command_line import composed
from image_builder import debian
from places import ROOT
from slurm_chain import ON_SLURM, RECIPE, Chain, nemo_rod, write_job
from slurm_cluster import processes_of, slurm_cluster, wait_for

from nemo_rod.run.launch.containers import mounts, render_apptainer
from nemo_rod.run.launch.slurm import render_node

NEEDED = pytest.mark.skipif(shutil.which("apptainer") is None, reason="apptainer is not installed")
pytestmark = [pytest.mark.slurm, NEEDED]

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
    os.readlink("/proc/self/ns/pid"), os.environ["TORCHINDUCTOR_CACHE_DIR"],
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
def cluster(tmp_path_factory):
    """Two nodes with addresses of their own.

    torchrun tells its nodes apart by address and process number, and each container counts its
    processes from 1.
    """
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), apart=True) as started:
        yield started


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """A .sif file of a small Debian; NEMO_ROD_TEST_SIF names one that is there."""
    if given := os.environ.get("NEMO_ROD_TEST_SIF"):
        return Path(given)
    folder = tmp_path_factory.mktemp("image")
    debian(folder / "root", LIBRARIES)
    build = ["apptainer", "build", str(folder / "image.sif"), str(folder / "root")]
    subprocess.run(build, check=True)
    return folder / "image.sif"


def in_image(image: Path) -> list[str]:
    """Keys of jobs that run in Apptainer, with this machine's Python and this checkout."""
    venv = Path(sys.prefix).resolve()  # which may be a link in the checkout
    places = [PYTHON, ROOT, venv]
    return [
        "cluster.container=apptainer",
        f"cluster.image={image}",
        f"cluster.python={venv}/bin/python",
        f"cluster.mounts=[{','.join(f'{place}:{place}' for place in places)}]",
    ]


def test_jobs_in_apptainer_are_requeued_and_leave_nothing(cluster, image, tmp_path):
    options = ["launcher=slurm", "cluster.gpus_per_node=1", *in_image(image)]
    config = composed("recipe=toy_synthetic", *options, f"run_dir={tmp_path}")
    (tmp_path / "stage.py").write_text(STAGE)
    (tmp_path / "container.sh").write_text(render_apptainer(config))
    (tmp_path / "node.sh").write_text(render_node(config))
    python = str(Path(sys.executable).resolve())
    start = ["bash", f"{tmp_path}/container.sh", "bash", f"{tmp_path}/node.sh", python]
    script = write_job(tmp_path, config, *start, f"{tmp_path}/stage.py", str(tmp_path))
    first = cluster.ask("sbatch", "--parsable", script)
    unchanged = "import os; assert not os.path.exists('/written-to-the-image')"
    after = write_job(tmp_path, config, *start, "-c", unchanged)
    second = cluster.ask("sbatch", "--parsable", f"--dependency=afterok:{first}", after)

    wait_for((tmp_path / "began0").exists, 600, "the job did not begin")
    namespace, inductor, at_home, in_tmp = (tmp_path / "began0").read_text().split("\n")
    assert namespace != os.readlink("/proc/self/ns/pid")
    assert inductor == "/tmp/inductor"
    mounted = [Path(mount.split(":")[1]) for mount in mounts(config)]
    assert {*at_home.split()} == first_parts(mounted, Path.home())
    assert {*in_tmp.split()} == first_parts(mounted, Path("/tmp")) | {"of-this-job"}
    cluster.preempt(2)
    wait_for((tmp_path / "began1").exists, 900, "the job did not begin again")
    cluster.wait(900)

    print((tmp_path / "out").read_text())
    print(f"signals before it saved: {(tmp_path / 'saved').read_text()}")
    assert (cluster.job(first)["JobState"], cluster.job(first)["Restarts"]) == ("COMPLETED", "1")
    assert cluster.job(second)["JobState"] == "COMPLETED"
    assert left_by(first, second) == []


def test_a_recipe_trains_in_apptainer(cluster, image, tmp_path):
    """Preempted and requeued, two containers on two nodes train what no container trains."""
    chain, arms = Chain(cluster, tmp_path / "run", {}), ("no_replay", "rod")
    recipe = [*RECIPE, "arms=[no_replay,rod]", "train.steps=100"]
    run = ["run", *recipe, *ON_SLURM, *in_image(image), f"run_dir={chain.run_dir}"]
    print(nemo_rod(*run, cluster=cluster))
    for arm in arms:
        chain.reach(arm, 1, 30)
        chain.preempt(arm)
    cluster.wait(3000)
    print(chain.status())
    assert {chain.job(stage)["JobState"] for stage in chain.numbers} == {"COMPLETED"}
    for arm in arms:
        assert chain.kinds(arm) == ["began", "stopped", "began", "done"]
        assert chain.job(arm)["Restarts"] == "1"
    assert (chain.run_dir / "report" / "index.html").exists()
    assert left_by(*chain.numbers.values()) == []
    (tmp_path / "here").mkdir()
    chain.trained_the_same_here(tmp_path / "here", arms, *recipe)


def left_by(*jobs: str) -> list[str]:
    """Processes and folders of these jobs that are still on this machine."""
    scratch = Path(os.environ.get("TMPDIR", "/tmp")).glob("nemo-rod.*")
    left = [str(p) for p in scratch if re.search(rf"\.({'|'.join(jobs)})\.", p.name)]
    left += [" ".join(process["cmdline"]) for process in processes_of(*jobs)]
    print(f"left by jobs {', '.join(jobs)}: {left}")
    return left


def first_parts(places: Sequence[Path], folder: Path) -> set[str]:
    """What a container shows in a folder that is empty but for what is mounted below it."""
    return {p.relative_to(folder).parts[0] for p in places if p.is_relative_to(folder)}
