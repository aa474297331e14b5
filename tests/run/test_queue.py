"""One chain in a run folder, and only its own jobs, as a small made-up Slurm tells it.

The stub programs keep the queue in a file: number, state and log of each job.
"""

import re
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
from command_line import composed
from test_render import CLUSTER

from nemo_rod.commands import run_stages
from nemo_rod.lab import launches, status
from nemo_rod.run.checks import check
from nemo_rod.run.launch import queue, slurm
from nemo_rod.run.launch.submit import submit
from nemo_rod.run.run_folder import RunFolder
from nemo_rod.run.stages import Stages

STUBS = {
    "sbatch": """\
number=$(($(cat last 2>/dev/null || echo 100) + 1))
echo $number >last
log=$(grep -ohP '(?<=--output=)\\S+' <(printf '%s\\n' "$@") "${@: -1}")
echo "$number PENDING $log" >>queue
echo "$number${MANY:+;east}"
""",
    "squeue": """\
[[ -e down ]] && { echo "Unable to contact slurm controller" >&2; exit 1; }
[[ ! -v MANY || $* == *--clusters=east* ]] || exit 0
[[ -v MANY ]] && echo "CLUSTER: east"
while read -r number state log; do
  case $* in
    *--Format=jobarrayid:24,stdout:4096*) printf '%-24s%-4096s\\n' $number "$log" ;;
    *) echo "$number|$state||Priority" ;;
  esac
done <queue
""",
    "scancel": """\
[[ ! -v MANY || $* == *--clusters=east* ]] || exit 1
for number in "$@"; do sed -i "/^$number /d" queue; done
""",
    "sacct": "exit 1",
    "scontrol": "exit 1",
}


HERE = ("recipe=toy", "run_dir=run")


class Slurm:
    """The made-up Slurm."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "queue").touch()
        for name, body in STUBS.items():
            program = folder / name
            program.write_text(f'#!/bin/bash\nfile=$(realpath -s "$0")\ncd "${{file%/*}}"\n{body}')
            program.chmod(0o755)

    def numbers(self) -> list[str]:
        return [line.split()[0] for line in (self.folder / "queue").read_text().splitlines()]


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/slurm:/usr/bin:/bin")
    return Slurm(tmp_path / "slurm")


def launch(launcher: str = "slurm", run_dir: str = "run") -> None:
    options = [*CLUSTER, "cluster.image=null" if launcher == "slurm" else "cluster.image=example/a"]
    own = ("recipe=toy", "arms=[no_replay]", f"launcher={launcher}", f"run_dir={run_dir}")
    config = composed(*own, *options)
    stages = Stages(config)
    submit(stages, stages.all())


def cancelled(run_dir: str = "run") -> None:
    status.cancel(Path(run_dir))


def show_status() -> None:
    status.main(Namespace(run_dir=Path("run"), serve=False, cancel=False, watch=False))


@pytest.mark.parametrize(("second", "name"), [("slurm", ""), ("ray", ""), ("slurm", ";east")])
def test_one_run_folder_has_one_chain(cluster, monkeypatch, second, name):
    """With the name of a cluster where Slurm has many: its jobs are sought there."""
    if name:
        monkeypatch.setenv("MANY", "1")
    launch("slurm")
    assert f"prepare\t101{name}\n" in Path("run/launch/slurm/jobs.tsv").read_text()
    before = cluster.numbers()
    assert len(before) == 5
    active = rf"launch of run is still active \(jobs 101{name}, 102{name}"
    for other in (lambda: launch(second), lambda: run_stages.run(composed(*HERE))):
        with pytest.raises(ValueError, match=active):
            other()
    assert cluster.numbers() == before
    cancelled()
    assert cluster.numbers() == []
    launch(second)
    assert len(cluster.numbers()) == 5


@pytest.mark.parametrize("why", ["Unable to contact slurm controller", "not on this machine"])
def test_slurm_that_does_not_answer_is_no_empty_queue(cluster, monkeypatch, why):
    launch()
    if "machine" in why:
        monkeypatch.setenv("PATH", "/nonexistent")
    (cluster.folder / "down").touch()
    expected = f"Slurm does not list the jobs of run in the queue.*{why}"
    for action in (launch, cancelled, show_status):
        with pytest.raises(ValueError, match=expected):
            action()
    assert len(cluster.numbers()) == 5


def test_later_dry_run_hides_no_job(cluster, capsys):
    launch()
    run_stages.run(composed(*HERE, "arms=[rod]", "dry_run=true"))
    assert not Path("run/launch/local").exists()
    show_status()
    shown = capsys.readouterr().out
    assert "launcher=slurm" in shown and "in the queue (Priority)" in shown
    Path("run/launch/local").mkdir()  # as of a launch on this machine before this one
    shutil.copy("run/launch/slurm/config.yaml", "run/launch/local")
    show_status()
    assert "in the queue (Priority)" in capsys.readouterr().out
    cancelled()
    assert cluster.numbers() == []


@pytest.mark.parametrize(
    ("program", "printed", "state"),
    [
        ("sacct", "101_1|FAILED|n1\n\nplease note\n101|CANCELLED by 1|n1\n101||\n", "CANCELLED"),
        ("scontrol", "\nJobId=101\nJobId=101 JobState=FAILED NodeList=(null)\n", "FAILED"),
    ],
)
def test_what_slurm_prints_besides_is_passed_over(cluster, program, printed, state):
    launch()
    (cluster.folder / "queue").write_text("")
    (cluster.folder / "output").write_text(printed)
    asked = '[[ $* == *101* ]] && cat "${0%/*}/output"'
    (cluster.folder / program).write_text(f"#!/bin/bash\n{asked}\n")
    jobs = launches.jobs_by_stage(Path("run"), "slurm")
    assert {number: job.state for number, job in jobs.values() if job} == {"101": state}


def test_jobs_of_another_run_are_left_alone(cluster):
    launch()
    before = cluster.numbers()
    shutil.copytree("run", "copy")
    with pytest.raises(ValueError, match="copy has no job in the queue"):
        cancelled("copy")
    assert cluster.numbers() == before
    assert {job for _, job in launches.jobs_by_stage(Path("copy"), "slurm").values()} == set()
    launch(run_dir="copy")  # which has no chain of its own
    assert len(cluster.numbers()) == 10
    Path("link").symlink_to("run")  # another name of the same folder
    cancelled("link")
    assert cluster.numbers() == ["106", "107", "108", "109", "110"]


def test_damaged_record_of_jobs_is_named(cluster):
    launch()
    file = Path("run/launch/slurm/jobs.tsv")
    for damage, line in ((b"rod", "rod"), (b"\x93", "\N{REPLACEMENT CHARACTER}")):
        file.write_bytes(damage)
        with pytest.raises(ValueError, match=rf"run/launch/slurm/jobs\.tsv has the line '{line}'"):
            cancelled()


@pytest.mark.parametrize("name", ["x\ntouch made", "../../../escape", "y;touch made"])
def test_names_are_neither_paths_nor_commands(name):
    config = composed("recipe=toy")
    config.variants[name] = {"of": "rod"}
    with pytest.raises(ValueError, match=r"variant name .* must consist of letters, digits"):
        check(config)
    with pytest.raises(ValueError, match=r"recipe name .* must consist of letters, digits"):
        RunFolder(Path("run"), name)


def test_what_reaches_a_shell_is_a_word():
    assert slurm.shell_options({"account": "a b"}) == ["--account='a b'"]
    assert slurm.comment("report, in a\ntouch made/report") == "# report, in a touch made/report"


@pytest.mark.parametrize(
    "text",
    [
        *("", "[1]", "a: [", "hydra: {}", "{defaults: 1, hydra: 1, x: 1}", "a: " + "[" * 20_000),
        *("a: &a [x]\nb: [*a]", "defaults: []\nrecipe: a", "hydra: a\nlogger: {a: b}"),
    ],
    ids=range(9),
)
def test_damaged_configuration_of_a_launch_is_named(cluster, text):
    folder = Path("run/launch/local")
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(text)
    for read in (show_status, lambda: launches.in_place_of_recipe(folder / "config.yaml", ["run"])):
        with pytest.raises(ValueError, match=r"run/launch/local/config\.yaml is damaged \(.*\):"):
            read()


def test_filters_in_the_environment_hide_no_job(monkeypatch):
    for name in ("SQUEUE_STATES", "SQUEUE_PARTITION", "SCANCEL_INTERACTIVE", "SLURM_TIME_FORMAT"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("SLURM_CONF", "/conf")
    lines = queue.ask("env")
    assert "SLURM_CONF=/conf" in lines
    assert not [line for line in lines if re.match("SQUEUE|SCANCEL|SLURM_TIME", line)]
