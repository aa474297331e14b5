"""What is submitted and what is refused, before Slurm is asked for anything."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from command_line import composed, nemo_rod
from test_render import CLUSTER

from nemo_rod.config import Config
from nemo_rod.installation import config_folder
from nemo_rod.run.launch.submit import submit
from nemo_rod.run.stage_log import StageLog
from nemo_rod.run.stages import Stages


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def configured(*overrides: str) -> Config:
    return composed("recipe=toy", "launcher=slurm", *CLUSTER, *overrides)


def submit_all(config: Config) -> None:
    submit(Stages(config), Stages(config).all())


@pytest.mark.parametrize("name", ["a:b", "a,b", "a\nb"])
def test_a_working_folder_that_no_container_can_mount_is_refused(name, tmp_path, monkeypatch):
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    with pytest.raises(ValueError, match="submit from another folder"):
        submit_all(configured(f"run_dir={tmp_path}/run", "dry_run=true"))


def test_jobs_inherit_no_allocation(tmp_path, monkeypatch):
    of_none = [f"cluster.{key}partition=null" for key in ("", "cpu_")]
    config = configured("dry_run=true", *of_none, "+cluster.cpu_sbatch.partition=cpu")
    submit(Stages(config), Stages(config).all()[:1])
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(f"#!/bin/bash\necho 7\nenv > {tmp_path}/environment\n")
    sbatch.chmod(0o755)
    left = {"SLURM_JOB_ID": "3", "SLURM_MEM_PER_CPU": "9", "SLURM_NTASKS": "2"}
    left |= {"SLURM_TIMELIMIT": "9", "SBATCH_TIMELIMIT": "9", "SBATCH_GRES": "gpu:1"}
    left |= {"SBATCH_ACCOUNT": "x", "SBATCH_PARTITION": "x"}
    left |= {"SLURM_EXPORT_ENV": "NONE", "SCANCEL_STATE": "RUNNING"}
    kept = {"SLURM_CONF": "/conf", "SLURM_JWT": "token", "PATH": f"{sbatch.parent}:/usr/bin:/bin"}
    kept |= {"SBATCH_CLUSTERS": "a", "SBATCH_QOS": "long"}  # the cluster's qos is null
    script = Path(config.run_dir) / "launch" / "slurm" / "submit.sh"
    subprocess.run(["bash", script], env={**left, **kept}, check=True)
    variables = dict(
        line.split("=", 1) for line in (tmp_path / "environment").read_text().splitlines()
    )
    assert {key: variables[key] for key in kept} == kept
    assert not left.keys() & variables.keys()


def test_without_image_or_slurm_only_a_dry_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    image = tmp_path / "rod.sqsh"
    config = configured(f"cluster.image={image}")
    with pytest.raises(ValueError, match=re.escape(f"cluster.image={image} is not there")):
        submit_all(config)
    image.touch()
    for there in (str(image), "registry.example.com#team/nemo_rod:tag", None):
        config.cluster.image = there
        with pytest.raises(ValueError, match="needs sbatch, which is not on this machine"):
            submit_all(config)
    image.unlink()
    config.cluster.image, config.dry_run = str(image), True
    submit_all(config)
    assert (Path(config.run_dir) / "launch" / "slurm" / "submit.sh").exists()


def test_template_makes_a_cluster_of_ones_own():
    template = (config_folder() / "cluster" / "template.yaml").read_text()
    Path("my/cluster").mkdir(parents=True)
    Path("my/cluster/ours.yaml").write_text(template.replace("YOUR_", "OUR_"))
    options = ["recipe=toy", "launcher=slurm", "cluster=ours", "dry_run=true"]
    done = nemo_rod("run", "--config-dir", "my", *options)
    assert done.returncode == 0, done.stderr
    assert "20 jobs rendered, none submitted" in done.stderr
    job = Path("runs/toy/launch/slurm/rod.sbatch").read_text()
    assert "#SBATCH --account=OUR_ACCOUNT" in job
    assert "#SBATCH --gpus-per-node=2" in job
    assert "export HF_HOME=" in Path("runs/toy/launch/slurm/node.sh").read_text()


def test_the_line_to_copy_is_quoted(capsys):
    submit_all(configured("recipe=toy_synthetic", "dry_run=true", "run_dir='a (copy) & b'"))
    line = capsys.readouterr().err.strip().partition("none submitted: ")[2]
    program, script = shlex.split(line)
    assert program == "bash" and Path(script).is_file()


def submitted(*overrides: str) -> dict[str, set[str]]:
    """Names of the jobs that would be submitted, and what each comes after."""
    config = configured("recipe=toy_synthetic", "dry_run=true", *overrides)
    submit_all(config)
    text = (Path(config.run_dir) / "launch" / "slurm" / "submit.sh").read_text()
    lines = re.findall(r"^submit (\S+)(.*)$", text, re.MULTILINE)
    return {name: set(needs.split()) for name, needs in lines}


def test_what_is_done_is_not_submitted_again():
    small = "domain.sources.dialect.max_bytes=9000"
    assert submitted(small)["base"] == {"prepare"}
    done = nemo_rod("prepare", "recipe=toy_synthetic", small)
    assert done.returncode == 0, done.stderr
    left = submitted(small)
    assert "prepare" not in left
    assert left["base"] == set()
    assert left["references_base"] == {"base"}
    # but it is if it is to be made again
    assert submitted(small, "rebuild=[prepare]")["base"] == {"prepare"}
    with pytest.raises(ValueError, match=r"add rebuild=\[prepare\]"):
        submitted("domain.sources.dialect.max_bytes=8000")


def test_single_command_needs_what_comes_before():
    config = configured("dry_run=true")
    with pytest.raises(ValueError, match=r"rod needs base, which is not there yet: run `nemo-rod "):
        submit(Stages(config), [Stages(config).train("rod")])


def test_blocks_are_there_with_all_of_their_files():
    proof = Stages(composed("recipe=toy_synthetic")).prepare().proof
    assert {file.name for file in proof} == {"manifest.json", "store.json"}


def test_record_tells_and_keeps_a_second_command_away(tmp_path):
    record = StageLog(tmp_path, "rod")
    assert not record.is_held() and record.events() == []
    with record.only_one(), record.attempt():
        assert StageLog(tmp_path, "rod").is_held()
        with (
            pytest.raises(ValueError, match=r"Another nemo-rod is running rod in"),
            StageLog(tmp_path, "rod").only_one(),
        ):
            pass
        with StageLog(tmp_path, "base").only_one():  # another stage is another matter
            pass
    with pytest.raises(RuntimeError), record.attempt():
        raise RuntimeError("rank 1: out\nof memory")
    events = record.events()
    assert [event["event"] for event in events] == ["began", "done", "began", "failed"]
    assert events[-1]["why"] == "rank 1: out of memory"
    assert not record.is_held()
