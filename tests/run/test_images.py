"""Container images: sound Dockerfiles, and both images built for real and used.

`make test-images` builds them with buildah over a base made from Debian's packages, and runs a
whole recipe in the one for machines without a GPU. It needs root, `buildah`, `mmdebstrap` and 10 GB
of disk, and takes some twenty minutes on two cores. The other tests here only read files.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from image_builder import PROGRAMS, ROOT, Builder, image_builder

DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile*"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
WORKERS = "/opt/ray_venvs/nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"


def test_dockerfiles_pass_hadolint():
    here = shutil.which("hadolint", path=Path(sys.executable).parent)
    program = here or shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint is not installed: make venv")
    files = [*DOCKERFILES, *(ROOT / "tests" / "images").glob("Dockerfile*")]
    done = subprocess.run([program, "--no-color", *map(str, files)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_base_is_an_argument_and_the_user_is_not_root(file):
    text = file.read_text()
    instructions = [line for line in text.splitlines() if re.match(r"[A-Z]+ ", line)]
    # a tag, which can move, makes no reference of it: no engine begins to build
    assert re.fullmatch(r"ARG BASE_IMAGE=[^\s:@]+", instructions[0])
    assert re.fullmatch(r"ARG BASE_DIGEST(=sha256:[0-9a-f]{64})?", instructions[1])
    base = "FROM ${BASE_IMAGE}@${BASE_DIGEST}"
    stages = {line for line in instructions if line.startswith("FROM ")}
    assert stages <= {base, f"{base} AS wheel", f"{base} AS environment", "FROM environment"}
    *_, user = re.findall(r"^USER (\d+)", text, re.MULTILINE)
    assert int(user) > 0
    assert "<<" not in text  # buildah and older engines know no heredocs


def test_every_base_without_a_digest_is_shown_with_one():
    """NVIDIA's registry alone knows those of its tags."""
    text = (ROOT / "docs" / "images.md").read_text()
    shown = re.search(
        r"^base=\$\(docker image inspect .*RepoDigests 0.* (\S+)\)$", text, re.MULTILINE
    )
    assert shown is not None
    without = [
        re.search(r"ARG BASE_IMAGE=(\S+)\nARG BASE_DIGEST\n", f.read_text()) for f in DOCKERFILES
    ]
    for base in filter(None, without):  # NeMo's and NeMo-RL's have one file
        assert base[1].removesuffix("-rl") == shown[1].partition(":")[0]
    built = '--build-arg BASE_IMAGE="${base%@*}" --build-arg BASE_DIGEST="${base#*@}"'
    assert built in text


@pytest.mark.parametrize("index", ["", "https://torch.example/cpu"])
def test_torch_alone_comes_from_an_index_of_its_own(tmp_path, index):
    """A package of another name there, or of a higher version, must not be taken for PyPI's."""
    python, calls = tmp_path / "venv" / "bin" / "python", tmp_path / "calls"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && echo 3.12 || echo "$@" >>{calls}\n')
    python.chmod(0o755)
    env = {**os.environ, "TORCH_INDEX_URL": index, "SET": "bridge-0.6", "HASHES": "files"}
    install = ["bash", str(ROOT / "requirements" / "install.sh"), str(tmp_path / "venv")]
    subprocess.run(install, env=env, check=True, capture_output=True)
    of_torch, *others = calls.read_text().splitlines()
    assert "requirements/torch.txt" in of_torch
    assert ("--no-deps --index-url " + index in of_torch) == bool(index)
    assert others and all("--require-hashes" in call and "index" not in call for call in others)
    assert "EXTRA_INDEX" not in (ROOT / "docker" / "Dockerfile.cpu").read_text()


def test_documents_build_from_files_that_exist():
    named = {
        (page.name, file)
        for page in PAGES
        for file in re.findall(r"\bbuild .*?-f (\S+)", page.read_text())
    }
    assert named
    assert [(page, file) for page, file in named if not (ROOT / file).is_file()] == []


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        pytest.fail(f"{', '.join(missing)} missing: apt-get install buildah mmdebstrap")
    with image_builder(tmp_path_factory.mktemp("images")) as started:
        _timed(started, "base", lambda: started.bootstrap("base"))
        yield started


@pytest.mark.images
@pytest.mark.parametrize("base", ["", "BASE_IMAGE=localhost/base:latest"])
def test_no_image_is_built_on_a_tag(builder, base):
    words = ["--build-arg", base] if base else []
    file = str(ROOT / "docker" / "Dockerfile")
    with pytest.raises(AssertionError, match="invalid reference format"):
        builder("build", "--isolation", "chroot", *words, "--file", file, str(ROOT))


@pytest.fixture(scope="module")
def cpu_image(builder):
    _timed(builder, "cpu", lambda: builder.build("docker/Dockerfile.cpu", "cpu", "localhost/base"))
    return "localhost/cpu"


@pytest.fixture(scope="module")
def nemo_rl_base(builder, cpu_image):
    """An image that is laid out as NeMo-RL's, without nemo_rod."""
    environment = ("--target", "environment")
    builder.build("docker/Dockerfile.cpu", "environment", "localhost/base", *environment)
    builder.build("tests/images/Dockerfile.nemo_rl", "nemo-rl", "localhost/environment")
    return "localhost/nemo-rl"


@pytest.fixture(scope="module")
def gpu_image(builder, nemo_rl_base):
    _timed(builder, "gpu", lambda: builder.build("docker/Dockerfile", "gpu", nemo_rl_base))
    return "localhost/gpu"


def _timed(builder: Builder, tag: str, work: Callable[[], None]) -> None:
    start = time.monotonic()
    work()
    seconds = time.monotonic() - start
    print(f"\n{tag}: {seconds:.0f} s, {builder.size(f'localhost/{tag}')}", flush=True)


@pytest.mark.images
def test_cpu_image_runs_a_recipe(builder, cpu_image, tmp_path):
    settings = builder.settings(cpu_image)
    assert settings["Cmd"] == ["nemo-rod", "run", "recipe=toy"] and not settings.get("Entrypoint")
    assert settings["Volumes"] == {"/rod/runs": {}}
    page = _run_recipe(builder, cpu_image, tmp_path / "runs")
    assert page.stat().st_uid == int(settings["User"].split(":")[0]) != 0


def _run_recipe(builder: Builder, image: str, runs: Path) -> Path:
    """Runs a whole recipe in an image; returns the report's page."""
    runs.mkdir()
    runs.chmod(0o777)
    start = time.monotonic()
    command, options = ("nemo-rod", "run", "recipe=toy_synthetic"), f"{runs}:/rod/runs"
    output = builder.run(image, *command, options=["--volume", options])
    print(f"\nrecipe: {time.monotonic() - start:.0f} s\n{output[-2000:]}", flush=True)
    report = runs / "toy_synthetic" / "report"
    arms = json.loads((report / "results.json").read_text())["arms"]
    assert {"base", "no_replay", "rod"} <= set(arms)
    return report / "index.html"


@pytest.mark.images
def test_cpu_image_serves_any_user(builder, cpu_image, tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    runs.chmod(0o777)
    options = ["--user", "12345:12345", "--volume", f"{runs}:/rod/runs"]
    builder.run(cpu_image, "nemo-rod", "prepare", "recipe=toy_synthetic", options=options)
    assert (runs / "toy_synthetic" / "blocks" / "manifest.json").stat().st_uid == 12345


@pytest.mark.images
def test_layer_over_nemo_rl_adds_the_package_and_nothing_else(builder, nemo_rl_base, gpu_image):
    def packages(image: str, python: str) -> set[str]:
        freeze = builder.run(image, "python3", "-m", "pip", "--python", python, "freeze")
        return set(freeze.splitlines())

    for python, lacking in (
        ("/opt/nemo_rod/bin/python3", set()),
        (f"{WORKERS}/bin/python", {"hydra-core"}),
    ):
        before, after = packages(nemo_rl_base, python), packages(gpu_image, python)
        assert before < after
        added = {re.split("==| @ ", line)[0].lower() for line in after - before}
        kernels = {"fla-core", "flash-linear-attention"}  # before 0.6, at fault on Blackwell
        assert added == {"nemo-rod", "nvidia-modelopt", "pulp"} | kernels | lacking


@pytest.mark.images
def test_layer_over_nemo_rl_works_without_root(builder, gpu_image):
    assert builder.settings(gpu_image)["User"].split(":")[0] == "10001"
    output = builder.run(gpu_image, "nemo-rod", "doctor")
    print(f"\n{output}", flush=True)
    of_driver, of_workers = output.split(f"NeMo-RL's Megatron workers, {WORKERS}/bin/python:")
    assert re.search(
        r"^- +megatron-core +not installed: NeMo-RL's workers", of_driver, re.MULTILINE
    )
    assert re.search(r"^ok +trainer ", of_workers, re.MULTILINE), output
    assert not re.search(r"^NO ", output, re.MULTILINE)
    program = "import nemo_rod; print(nemo_rod.__file__)"
    assert WORKERS in builder.run(gpu_image, f"{WORKERS}/bin/python", "-c", program)


@pytest.mark.images
def test_layer_over_nemo_rl_runs_models_where_megatron_is(builder, gpu_image, tmp_path):
    """The command's own environment has no Megatron: that of the workers runs every model."""
    assert _run_recipe(builder, gpu_image, tmp_path / "runs").exists()
