"""A folder that somebody sends you is data: it runs nothing, and writes nowhere else.

Every test has attacks that once got through, or others of their kind.
"""

import ast
import base64
import contextlib
import http.client
import io
import json
import multiprocessing
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml
from command_line import composed, nemo_rod
from damage import PICKLED, _with_header
from debian_text import fetch_debian_texts
from made_up_run import made_up_training, make_run, recipe
from places import ROOT
from sandbox import time_limit

from nemo_rod import parts
from nemo_rod.cli import main, path_parser
from nemo_rod.commands import run_stages
from nemo_rod.config import Launcher, section
from nemo_rod.corpus import BlockStore, SourceSpec
from nemo_rod.corpus.documents import Documents
from nemo_rod.files import open_file, read_json, read_lines, remove, write_json, write_whole
from nemo_rod.jobs import job_store, shared_job
from nemo_rod.lab import curriculum_tools
from nemo_rod.lab.authors.trace import _launch as read_launch_rows
from nemo_rod.lab.authors.trace import export_trace
from nemo_rod.lab.doctor import _verify
from nemo_rod.lab.history import read_history
from nemo_rod.lab.inspect.command import inspect
from nemo_rod.lab.launches import read_launch
from nemo_rod.lab.merging import merge_checkpoints
from nemo_rod.lab.report import serve as server
from nemo_rod.lab.report.build_report import build_report
from nemo_rod.lab.report.explorer import explore
from nemo_rod.lab.report.job_folder import build_job_report
from nemo_rod.lab.report.section import Report
from nemo_rod.lab.report.table import Column, Table
from nemo_rod.run.base_model import checkpoint_digest
from nemo_rod.run.launch import queue
from nemo_rod.run.launch.render import launch_folder, write_files
from nemo_rod.run.launch.slurm import Slurm
from nemo_rod.run.processes.nodes import Nodes
from nemo_rod.run.processes.torchrun import run_process, torchrun
from nemo_rod.run.stage_log import StageLog
from nemo_rod.run.stages import Stages
from nemo_rod.selection import Curriculum
from nemo_rod.trust import sign

pytestmark = pytest.mark.usefixtures("no_pictures")
SECONDS = 300  # a command takes a second or two on an idle machine; what hangs takes for ever
AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="a second user takes the rights of root")
NAME = "<img src=x onerror=alert(1)>|`[x](javascript:1)`\x1b[31m"


@pytest.fixture
def victim(tmp_path):
    """Files of the person who opens the folder."""
    folder = tmp_path / "victim"
    inner = ("figures/one.png", "tables/t.csv", "parts/mine/tokens.bin")
    for name in (*inner, "curriculum_notes.html", "index.html", ".bashrc"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def here(*words: object) -> None:
    """Runs a command of paths in this process; a refusal is as good as an end."""
    options = path_parser(str(words[0])).parse_args([str(word) for word in words])
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(ValueError, OSError):
        options.main(options)


# --- what runs ---


@pytest.fixture
def evil(run_dir, tmp_path, monkeypatch):
    """A run whose own files ask for code in every way that a file can; it would make `PWNED`."""
    mark = tmp_path / "PWNED"
    attack = f"open({str(mark)!r}, 'a').write('x')\n"
    (tmp_path / "evil_part.py").write_text(attack + "def part(*a, **k): pass\nMARKS = set()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    points = {"evil": EntryPoint("evil", "evil_part:part", "x")}  # of an installed package
    kinds = ("policies", "scores", "terms", "readers", "launchers", "loggers", "in_place")
    installed = parts.other_parts
    monkeypatch.setattr(
        parts, "other_parts", lambda kind: points if kind in kinds else installed(kind)
    )
    for file in run_dir.glob("launch/*/config.yaml"):
        values = yaml.safe_load(file.read_text())
        values["model"]["trust_remote_code"] = True
        values["launcher"]["kind"] = values["logger"] = "evil"
        values["selection"] |= {"policy": "evil", "score": "evil"}
        values["train"]["terms"] = {"evil": 1.0}
        values["variants"] = {"rod": {"selection": {"policy": f"{tmp_path}/evil_part.py:part"}}}
        values["cluster"]["setup"] = [f"touch {mark}"]
        values["cluster"]["python"] = str(tmp_path / "evil_part.py")
        values["domain"]["sources"]["dialect"]["kind"] = "evil"
        values["tasks"]["arguments"] = {"trust_remote_code": True}
        values["report"] |= {"prompts": ["x"], "smoke_test": False}
        file.write_text(yaml.safe_dump(values))
    for hf in (run_dir / "base" / "hf", *run_dir.glob("arms/*/hf")):
        (hf / "evil.py").write_text(
            attack + "from transformers import PretrainedConfig\n"
            "class C(PretrainedConfig):\n    model_type = 'evil'\n"
        )
        code = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": "evil.T"}
        write_json(hf / "config.json", {"model_type": "evil", "auto_map": code})
        write_json(hf / "tokenizer_config.json", {"auto_map": code, "tokenizer_class": "T"})
    pickled = b"cposix\nsystem\n(S'touch %s'\ntR." % str(mark).encode()
    for name in (".metadata", "common.pt", "train_state.pt"):
        folder = run_dir / "arms" / "max.partial" / "checkpoints" / "iter_0000004"
        write_whole(folder / name, pickled)
    objects = np.lib.format.magic(1, 0), {"descr": "|O", "fortran_order": False, "shape": (1,)}
    for file in (
        *run_dir.glob("arms/*/held_out_losses.npy"),
        *run_dir.glob("references/*/part-00001.npy"),
    ):
        with open(file, "wb") as stream:
            np.lib.format.write_array_header_1_0(stream, objects[1])
            stream.write(pickled)
    for file in run_dir.glob("blocks/*/dialect/manifest.json"):
        values = read_json(file)
        write_json(file, values | {"in_place": ["x"], "reading": {"kind": "evil"}})
    job = read_json(run_dir / "arms" / "rod" / "job.json")
    job["arm"] |= {"policy_name": "evil", "score_name": "evil"}
    job["start"] = str(run_dir / "base" / "hf")
    write_json(run_dir / "arms" / "rod" / "job.json", job)
    return run_dir


def paths_of_commands(run: Path, out: Path) -> dict[str, list[list[object]]]:
    """The words of every command that takes paths, after its name."""
    rod, other = run / "arms" / "rod", run / "arms" / "no_replay"
    inspected = (run, rod, run / "blocks", run / "references" / "base", rod / "curriculum.rod")
    return {
        "status": [[run], [run, "--cancel"], [run, "--serve", "port=0"]],
        "inspect": [
            *([path] for path in inspected),
            [run / "blocks", "block=0"],
            [run, "prompt=x", "arm=base,rod,no_replay"],
        ],
        "curriculum": [
            ["export", rod, out / "x.parquet"],
            ["export", rod, out / "x.jsonl", "--format", "authors"],
            ["materialise", rod, "--format", "parquet", out / "made"],
            ["verify", rod],
            ["diff", rod, other],
        ],
        "import": [
            ["blocks", run / "blocks", out / "blocks", f"tokenizer={run / 'base' / 'hf'}"],
            ["references", run, out / "r", f"blocks={run / 'blocks'}", "role=replay", "model=x",
             "precision=bf16"],
            ["curriculum", rod, out / "c.rod", f"blocks={run / 'blocks'}"],
        ],
        "merge": [[run / "base" / "hf", other / "hf", out / "merged", "lambda=0.5"]],
        "report": [[rod], [run]],
        "doctor": [],  # below: the rest of it is about this machine
        "init": [[out / "init"]],
        "recipes": [],  # it takes no folder of a run
    }  # fmt: skip


@pytest.mark.timeout(900)
def test_no_command_runs_what_a_folder_names(evil, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "keep_fresh", lambda run_dir, build, every: build())
    monkeypatch.chdir(tmp_path)
    commands = paths_of_commands(evil, tmp_path / "out")
    assert {*commands} == {*parts.beside("commands")}
    for name, lines in commands.items():
        for words in lines:
            with time_limit(SECONDS), contextlib.suppress(SystemExit):
                here(name, *words)
            assert not (tmp_path / "PWNED").exists(), (name, words)
    with contextlib.suppress(ValueError):
        _verify(evil / "blocks")
    # a recipe of the user's own, in that folder
    stages = ("prepare", "pretrain", "reference", "train", "merge", "evaluate", "report")
    for command in ("run", *stages):
        config = recipe(evil, "tasks=held_out", "report.prompts=[x]")
        with made_up_training(), contextlib.suppress(ValueError, OSError, RuntimeError):
            run_stages.run(config) if command == "run" else run_stages.one_stage(command, config)
        assert not (tmp_path / "PWNED").exists(), command


def launched(run: Path, **changes: object) -> None:
    """Changes sections of a run's launched configurations."""
    for file in run.glob("launch/*/config.yaml"):
        values = yaml.safe_load(file.read_text())
        for name, change in changes.items():
            both = isinstance(change, dict) and isinstance(values.get(name), dict)
            values[name] = values[name] | change if both else change
        file.write_text(json.dumps(values))


def test_a_folder_in_place_of_a_recipe_starts_nothing(run_dir, tmp_path):
    """Hydra imports and calls what its own section names, before a command begins."""
    mark = tmp_path / "PWNED"
    call = {"_target_": "timeit.timeit", "stmt": f"open({str(mark)!r}, 'a')", "number": 1}
    handler = {"()": "subprocess.call", "args": ["touch", str(mark)]}
    logs = {"version": 1, "handlers": {"h": handler}, "root": {"handlers": ["h"]}}
    hydra = {"callbacks": {"x": call}, "job_logging": logs, "sweeper": call, "launcher": call}
    launched(run_dir, hydra=hydra, defaults=["schema", "_self_"], cluster={"env": {"A": "b"}})
    for command in ("run", "plan", "report"):
        done = nemo_rod(command, run_dir, "dry_run=true", cwd=tmp_path)
        assert done.returncode == 0 and not mark.exists(), done.stderr
    before = [file.read_text() for file in run_dir.glob("launch/*/command")]
    (run_dir / "launch" / "slurm" / "jobs.tsv").unlink()
    assert nemo_rod("run", run_dir, "seed=42").returncode == 0
    assert (run_dir / "launch" / "local" / "command").read_text() in before


CODE: dict[str, dict[str, object]] = {
    "selection.policy=theirs.py:P": {"selection": {"policy": "theirs.py:P"}},
    "variants.rod.selection.score=x": {"variants": {"rod": {"selection": {"score": "x"}}}},
    "train.terms.x": {"train": {"terms": {"x": 1.0}}},
    "variants.fixed_32.train.terms.x": {"variants": {"fixed_32": {"train": {"terms": {"x": 1}}}}},
    "logger=x": {"logger": "x"},
    "model.trust_remote_code": {"model": {"trust_remote_code": True}},
    "tasks.include": {"tasks": {"include": "tasks"}},
    "tasks.arguments": {"tasks": {"arguments": {"peft": "x"}}},
    "nemo_rl": {"nemo_rl": {"policy": {"x": 1}}},
    "model.architecture.attn_implementation": {
        "model": {"architecture": {"attn_implementation": "them/kernel"}}
    },
    "domain.sources.dialect.kind=x": {"domain": {"sources": {"dialect": {"kind": "x"}}}},
}


@pytest.mark.parametrize("named", [*CODE, pytest.param("another user's", marks=AS_ROOT)])
def test_a_folder_in_place_of_a_recipe_names_no_code(run_dir, named):
    launched(run_dir, **CODE.get(named, {}))
    if named not in CODE:
        for file in run_dir.glob("launch/*/config.yaml"):
            os.chown(file, 65534, 65534)
    done = nemo_rod("report", run_dir)
    assert done.returncode == 2 and named in done.stderr, done.stderr
    assert "type the recipe instead" in done.stderr


def test_consent_is_a_word_of_the_command(evil, tmp_path, capsys):
    def sample(*words: str) -> None:
        options = path_parser("inspect").parse_args(["inspect", str(evil), "prompt=x", *words])
        options.main(options)

    shutil.copytree(evil / "blocks", tmp_path / "kept", dirs_exist_ok=True)
    for file in evil.glob("blocks/*/dialect/manifest.json"):
        values = read_json(file)
        del values["in_place"]
        write_json(file, values)
    with pytest.raises(ValueError, match=r"code of its own.* set trust_remote_code=true, or inst"):
        sample()
    shown = capsys.readouterr().err
    assert "selection.policy=evil" in shown and "code is named on the command line" in shown
    assert not (tmp_path / "PWNED").exists()
    with contextlib.suppress(Exception):  # the code is no model
        sample("trust_remote_code=true")
    assert (tmp_path / "PWNED").exists()


# --- what is written, and where ---


def report(run: Path) -> None:
    Stages(recipe(run)).part("report")[0].run()


def log(run: Path) -> None:
    with StageLog(run, "report").only_one(), StageLog(run, "report").attempt():
        pass


def export(run: Path) -> None:
    rod = run / "arms" / "rod"
    with Curriculum.open(rod / "curriculum.rod", read_only=True) as recorded:
        curriculum_tools.export(recorded, rod / "x.parquet")
        export_trace(recorded, BlockStore(run / "blocks"), rod / "x.jsonl")


def train(run: Path) -> None:
    with made_up_training():
        Stages(recipe(run)).train("fixed_50").run()


def again(run: Path, *names: str) -> None:
    """Does some stages of a run anew, as after an interruption of each."""
    with made_up_training():
        for stage in Stages(recipe(run)).all():
            if stage.name in names:
                stage.run()


def prepare(run: Path) -> None:
    shutil.rmtree(run / "blocks")
    again(run, "prepare")


def score(run: Path) -> None:
    shutil.rmtree(run / "references" / "base")
    again(run, "references_base")


def evaluate(run: Path) -> None:
    for file in run.glob("arms/*/evaluation.json"):
        file.unlink()
    again(run, "evaluate")


def launch(run: Path) -> None:
    write_files(launch_folder(recipe(run, "launcher=slurm")), {"node.sh": "x"})


def start(run: Path) -> None:
    run_process(["true"], run / "logs" / "rod.log", Launcher())


LINKS: tuple[tuple[Callable[[Path], None], tuple[tuple[str, str], ...]], ...] = (
    # what writes; links in the run's folder -> into the victim's
    (report, (("report", "."),)),
    (report, (("report/tables", "tables"),)),
    (report, (("report/figures", "figures"), ("report/files.json", ".bashrc"))),
    (report, (("arms/rod/hf", "tables"),)),
    (report, (
        ("report/index.html", "index.html"), ("report/index.html.tmp", ".bashrc"),
        ("report/curriculum.html", "curriculum_notes.html"), ("report/results.json.tmp", ".bashrc"),
        ("report/curriculum.html.tmp", ".bashrc"), ("arms/rod/hf/README.md", "README.md"),
    )),
    (log, (("launch/stages", "tables"),)),
    (log, (("launch/stages/report.jsonl", ".bashrc"),)),
    (log, (("launch", "."),)),
    (launch, (("launch/slurm", "tables"),)),
    (launch, (("launch/slurm/node.sh", ".bashrc"),)),
    (launch, (("launch", "."),)),
    (start, (("logs", "tables"),)),
    (start, (("logs/rod.log", ".bashrc"),)),
    (export, (("arms/rod/.x.parquet.tmp", ".bashrc"), ("arms/rod/.x.jsonl.tmp", ".bashrc"))),
    (train, (("arms/fixed_50.partial", "tables"),)),
    (prepare, (("blocks.partial/.partial/lock", ".bashrc"),)),
    (prepare, (("blocks.partial/.partial/adaptation-dialect", "tables"),)),
    (train, (("arms/fixed_50.partial/metrics.jsonl", ".bashrc"),)),
    (train, (("arms/fixed_50.partial/hf", "tables"),)),
    (prepare, (("text_parts", "parts"),)),
    (prepare, (("text_parts/1_of_2", "parts"),)),
    (score, (("references/base.partial/wanted.npy", ".bashrc"),)),
    (lambda run: again(run, "references_base"), (("references/base/wanted.npy", ".bashrc"),)),
    (evaluate, (("evaluation.partial", "."),)),
    (evaluate, (("evaluation.partial/rod.npy", ".bashrc"),)),
    (evaluate, (("arms/rod", "tables"),)),
    (lambda run: here("init", run), (("recipe/mine.yaml", "new"), ("cluster", "tables"))),
    (lambda run: Curriculum.open(run / "arms/max.partial/curriculum.rod", resume_at=1).close(),
     (("arms/max.partial/curriculum.rod", ".bashrc"),)),
)  # fmt: skip


@pytest.mark.parametrize("number", range(len(LINKS)))
def test_no_link_leads_a_writer_out(run_dir, victim, number):
    write, links = LINKS[number]
    shutil.copy(run_dir / "arms" / "rod" / "curriculum.rod", victim / ".bashrc")
    before = content(victim)
    for place, target in links:
        link = run_dir / place
        if link.is_dir():
            shutil.rmtree(link)
        link.unlink(missing_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(victim / target)
    with contextlib.suppress(ValueError, OSError):
        write(run_dir)
    assert content(victim) == before, links


def test_a_report_removes_what_its_own_list_has(run_dir, victim):
    before, report = content(victim), run_dir / "report"
    mine = [report / name for name in ("notes.txt", "curriculum_notes.html", "tables/mine.csv")]
    for file in mine:
        file.write_text("mine")
    old = report / "figures" / "old.svg"
    old.write_text("of an arm that was removed")
    listed = [*read_json(report / "files.json")["files"], "figures/old.svg", "notes.txt", 3]
    listed += [
        "../arms/rod/arm.json",
        str(victim / "index.html"),
        "tables/../../base/manifest.json",
    ]
    write_json(report / "files.json", {"files": listed})
    build_report(run_dir)
    assert not old.exists()
    assert all(file.read_text() == "mine" for file in mine) and content(victim) == before
    assert (run_dir / "arms/rod/arm.json").exists() and (run_dir / "base/manifest.json").exists()


def _plant(folder: str, target: str) -> None:
    """Is another user, who puts links wherever a file may come next, as fast as it can."""
    os.setuid(65534)
    while True:
        for name in ("x.json", "x.json.tmp", ".x.json.tmp", "inner", "log.jsonl"):
            goal = os.path.dirname(target) if name == "inner" else target
            with contextlib.suppress(OSError):
                os.symlink(goal, f"{folder}/{name}")
            for found in (each for each in os.listdir(folder) if each.endswith(".tmp")):
                with contextlib.suppress(OSError):
                    os.unlink(f"{folder}/{found}")
                    os.symlink(target, f"{folder}/{found}")
            with contextlib.suppress(OSError):
                os.unlink(f"{folder}/{name}")


@AS_ROOT
def test_two_users_on_one_folder_in_real_time(victim, tmp_path):
    for folder in (tmp_path, *tmp_path.parents[:2], victim):
        folder.chmod(folder.stat().st_mode | 0o055)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    before, run = content(victim), shared / "run"
    target = victim / ".bashrc"
    planting = multiprocessing.get_context("fork").Process(
        target=_plant, args=(str(shared), str(target)), daemon=True
    )
    planting.start()
    try:
        deadline, written = time.monotonic() + 3, 0
        while time.monotonic() < deadline:
            for write in (
                lambda: write_json(shared / "x.json", {"a": 1}),
                lambda: write_json(shared / "inner" / "index.html", {"a": 1}, below=shared),
                lambda: remove(shared / "inner" / "index.html", below=shared),
                lambda: open_file(
                    shared / "log.jsonl", os.O_RDWR | os.O_CREAT | os.O_APPEND, below=shared
                ).close(),
            ):
                with contextlib.suppress(ValueError, OSError):
                    write()
                    written += 1
    finally:
        planting.terminate()
        planting.join()
    assert written > 100 and not run.exists()
    assert content(victim) == before
    shutil.rmtree(shared, ignore_errors=True)


# --- secrets ---


@pytest.mark.parametrize(
    "words",
    [
        "+cluster.env.HF_TOKEN='${oc.env:HF_TOKEN}'", "+cluster.env.TOKENIZERS_PARALLELISM=false",
        "+cluster.env.HF_TOKEN_PATH=/secrets/token", "cluster.setup=['export HF_TOKEN=$(cat ~/t)']",
        "+cluster.env.http_proxy='http://proxy:3128'", "+cluster.env.DATA='${oc.env:HOME}/data'",
        "model.special_tokens=renamed", "+nemo_rl.policy.tokenizer.pad_token=x",
    ],
)  # fmt: skip
def test_what_is_no_secret_is_not_refused(words):
    composed("recipe=toy_synthetic", words)


def test_nothing_that_a_run_writes_has_a_secret(tmp_path, monkeypatch):
    """Of the environment, of cluster.env, of the shell, and of a launch by an earlier version."""
    run, secrets = tmp_path / "run", ("hf_PLANTED_ONE", "PLANTED_TWO", "PLANTED_THREE")
    monkeypatch.setenv("HF_TOKEN", secrets[0])
    monkeypatch.setenv("WANDB_API_KEY", secrets[1])
    more = ("launcher=slurm", "cluster.gpus_per_node=2", "cluster.partition=x")
    config = recipe(run, *more, "+cluster.env.HF_TOKEN='${oc.env:HF_TOKEN}'")
    config.cluster.setup = ["export X=$WANDB_API_KEY"]
    make_run(run)
    write_files(launch_folder(config), Slurm().render(config, Stages(config).all()))
    file = run / "launch" / "slurm" / "config.yaml"
    assert file.stat().st_mode & 0o077 == 0
    text = file.read_text().replace("export X=", f"export X={secrets[2]}")
    file.write_text(text.replace("  env:\n", f"  env:\n    DB_PASSWORD: {secrets[2]}\n"))
    assert secrets[2] in file.read_text()
    build_report(run)
    for name, data in content(run).items():
        found = [secret for secret in secrets if secret.encode() in data]
        assert not found or name == "launch/slurm/config.yaml", (name, found)
    page = (run / "report" / "index.html").read_text()
    assert "DB_PASSWORD" not in page and "export X" not in page


def test_nothing_of_the_reader_gets_into_a_page(run_dir, tmp_path):
    """By a link to a file of theirs, or as blocks that a manifest says to be a part of one."""
    secret = tmp_path / "config.json"
    secret.write_text(json.dumps({"auths": {"registry": {"auth": "PLANTED"}}}))
    for link in ("launch/local/command", "launch/local/config.yaml"):
        run = Path(shutil.copytree(run_dir, tmp_path / "runs" / link))
        shutil.rmtree(run / "launch" / "slurm")
        (run / link).unlink()
        (run / link).symlink_to(secret)
        for read in (report, build_report):
            with contextlib.suppress(ValueError, OSError):
                read(run)
        assert not [n for n, data in content(run / "report").items() if b"PLANTED" in data], link


@AS_ROOT
def test_a_launch_of_another_user_shows_no_other_run(run_dir):
    launched(run_dir, report={"seeds": ["/elsewhere/run"], "settings": ["/elsewhere/run"]})
    own = read_launch(run_dir)[1]
    for file in run_dir.glob("launch/*/config.yaml"):
        os.chown(file, 65534, 65534)
    theirs = read_launch(run_dir)[1]
    assert section(own, Report).seeds and not section(theirs, Report).seeds
    assert section(own, Report).settings and not section(theirs, Report).settings


@AS_ROOT
@pytest.mark.parametrize("place", ["blocks", "arms/theirs", "x_seed_1"])
def test_a_page_has_nothing_of_a_link_of_another_user(run_dir, place):
    link = run_dir / place
    mine = Path(shutil.copytree(run_dir / "arms" / "rod", run_dir.parent / "mine"))
    if link.exists():
        link.rename(mine := run_dir.parent / "my_blocks")
    link.symlink_to(mine)
    os.chown(link, 65534, 65534, follow_symlinks=False)
    with pytest.raises(ValueError, match=f"{place} is a link of another user"):
        report(run_dir)


# --- processes ---


def test_subprocesses_import_nothing_of_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("open('PWNED', 'a').write('x')\nimport sys; sys.exit()")
    monkeypatch.chdir(tmp_path)
    child = "import subprocess, sys; subprocess.run([sys.executable, '-m', 'json'])"
    run_process([sys.executable, "-P", "-c", child], tmp_path / "logs" / "log", Launcher())
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setattr("sys.argv", ["nemo-rod", "--version"])
    main()
    assert os.environ["PYTHONSAFEPATH"]  # also of servers of forks, which Python itself starts
    assert not (tmp_path / "PWNED").exists()
    for file in (ROOT / "nemo_rod").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            words = getattr(node, "elts", ())
            texts = [word.value for word in words if isinstance(word, ast.Constant)]
            is_python = words and isinstance(words[0], ast.Name | ast.Attribute | ast.Call)
            if is_python and {"-m", "-c"} & {*texts}:
                assert "-P" in texts, f"{file}:{node.lineno}"


@pytest.mark.parametrize(
    ("order", "by"),
    [("job.json", by) for by in ("another key", "", "key")] + [("../elsewhere.json", "key")],
)
def test_orders_of_strangers_are_refused(run_dir, monkeypatch, order, by):
    from torch.distributed import HashStore

    store, job = HashStore(), run_dir / order
    shutil.copy(run_dir / "arms" / "rod" / "job.json", job)
    monkeypatch.setenv("NEMO_ROD_RECORD", str(run_dir / "launch" / "stages" / "rod.jsonl"))
    monkeypatch.setenv("NEMO_ROD_KEY", "key")
    store.set("job", sign(str(job).encode(), by))
    if (order, by) == ("job.json", "key"):
        assert shared_job(store, []).name == "rod"
        monkeypatch.delenv("NEMO_ROD_KEY")
    with pytest.raises(ValueError, match=r"was ordered to run .* which is not of this job"):
        shared_job(store, [])


# A stranger's program, who reaches the store of a job on several nodes and reads all its keys.
STRANGER = """
import re, sys
from torch.distributed import TCPStore
port, key, value = sys.argv[1:]
store = TCPStore("127.0.0.1", int(port), is_master=False, wait_for_workers=False)
prefixes = {re.sub("[^/]*$", "", key) for key in store.list_keys()}
for prefix in {"", "/", "nemo_rod/", "nemo_rod/7.0/", *prefixes}:
    store.set(prefix + key, value)
print(*prefixes)
"""


def stranger(port: int, key: str, value: str) -> str:
    command = [sys.executable, "-c", STRANGER, str(port), key, value]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_a_stranger_at_the_live_store_of_several_nodes_starts_nothing(
    run_dir, tmp_path, monkeypatch
):
    """torchrun unpickles the nodes' state, and the nodes run the job that is named there."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    record, job = run_dir / "launch/stages/rod.jsonl", run_dir / "arms/rod/job.json"
    nodes = Nodes(2, port=port, attempt="7.0", record=record)
    state = base64.b64encode(PICKLED.replace(b"PWNED", f"{tmp_path}/PWNED".encode())).decode()
    monkeypatch.setenv("NEMO_ROD_KEY", "key")
    monkeypatch.setenv("NEMO_ROD_RECORD", str(record))
    log, variables = tmp_path / "log", nodes.environment()
    own = {"PET_LOG_DIR": str(tmp_path)}  # torchrun's, which it would leave behind elsewhere
    with open(log, "w") as out:
        command, environment = torchrun(nodes, 2, Launcher()), os.environ | variables | own
        leader = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    try:
        assert nodes.wait_for_start()
        listening = {
            each.laddr.ip
            for each in psutil.Process(leader.pid).net_connections()
            if each.status == "LISTEN" and each.laddr.port == port
        }
        store = job_store(variables["NEMO_ROD_STORE"], "7.0")
        store.set("progress", "x")  # which shows the name of the job to all
        assert "nemo_rod/" in stranger(port, "job", f"{'0' * 32}{job}")
        with pytest.raises(ValueError, match=r"was ordered to run .* which is not of this job"):
            shared_job(store, [])
        stranger(port, "torch.rendezvous.7.0", state)
        assert leader.wait(SECONDS)
    finally:
        leader.kill()
    assert "the state of the nodes is not of this job" in log.read_text()
    assert listening == {"127.0.0.1"} and not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize("name", ["-oDir::Bin::Methods=d6/m", "../out", "/x", "a b", "A", "a", ""])
def test_names_of_packages_are_no_options_and_no_paths(tmp_path, name):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "package.json").write_text("{}")
    with pytest.raises(ValueError, match="is no name of a Debian package"):
        fetch_debian_texts(tmp_path / "cache", ["apt", name])


def test_a_job_of_another_run_is_not_cancelled(run_dir, tmp_path, monkeypatch):
    """Whose logs a link in the folder leads to."""
    other = tmp_path / "other" / "logs" / "slurm"
    other.mkdir(parents=True)
    shutil.rmtree(run_dir / "logs")
    (run_dir / "logs").symlink_to(other.parent)
    answers = {"%i": ["101|RUNNING|n1|None"], "stdout": [f"101 {other}/rod.out"]}
    monkeypatch.setattr(
        queue, "ask", lambda *words: answers["%i" if "%i" in words[-1] else "stdout"]
    )
    assert queue.alive(run_dir) == {}


def get(port: int, path: str, host: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.putrequest("GET", path, skip_host=True)
    connection.putheader("Host", host)
    connection.endheaders()
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_serve_gives_the_files_of_the_folder_to_this_machine(tmp_path, victim):
    report = tmp_path / "report"
    (report / "tables").mkdir(parents=True)
    for name in ("index.html", "tables/a b.csv"):
        (report / name).write_text(name)
    (report / "pub").symlink_to(victim)
    (report / "key").symlink_to(victim / ".bashrc")
    os.mkfifo(report / "pipe")
    served = server.serve(report, port=0, every=9)
    port = served.server_address[1]
    for path, host, status in (
        ("/", f"127.0.0.1:{port}", 200), ("/tables/a%20b.csv", f"localhost:{port}", 200),
        ("/index.html", "evil.example", 404), ("/", f"evil.example:{port}", 404), ("/", "", 404),
        ("/pub/.bashrc", f"127.0.0.1:{port}", 404), ("/key", f"127.0.0.1:{port}", 404),
        ("/tables/", f"127.0.0.1:{port}", 404), ("/tables", f"127.0.0.1:{port}", 404),
        ("/../victim/.bashrc", f"127.0.0.1:{port}", 404), ("/pipe", f"127.0.0.1:{port}", 404),
        ("/%2e%2e/victim/.bashrc", f"127.0.0.1:{port}", 404), ("/a%00", f"127.0.0.1:{port}", 404),
        (f"/{victim}/.bashrc", f"127.0.0.1:{port}", 404),
    ):  # fmt: skip
        code, answer = get(port, path, host)
        assert (code, b"mine" in answer) == (status, False), (path, host)
    served.shutdown()
    for file in (report / "index.html", report / "tables" / "a b.csv"):
        os.truncate(file, 8 << 40)
    linked = tmp_path / "run" / "report"
    linked.parent.mkdir()
    linked.symlink_to(victim)
    for folder, path in ((report, "/"), (report, "/tables/a%20b.csv"), (linked, "/.bashrc")):
        served = server.serve(folder, port=0, every=9)
        port = served.server_address[1]
        assert get(port, path, f"localhost:{port}")[0] == 404
        served.shutdown()


# --- names and sizes ---


def test_names_are_text_in_tables(tmp_path):
    rows = ({"name": NAME}, {"name": "=cmd|' /C calc'!A1"}, {"name": "chain_0"}, {"name": "a|b\nc"})
    table = Table("x", (Column("name", "Name", is_text=True),), rows)
    shown = table.to_markdown()
    assert not re.search(
        r"<|(?<!\\)[|`\[!]", shown.replace("| ", "").replace(" |", "").split("\n")[2]
    )
    assert "chain_0" in shown and shown.splitlines()[-1] == r"| a\|b c |"


def curriculum(path: Path, folder: Path, *, size: int = 0, sources: int = 0) -> Path:
    """A copy of a curriculum, long without content, or with a header of many sources."""
    folder.mkdir(exist_ok=True)
    out = Path(shutil.copy(path, folder / "curriculum.rod"))
    if sources:
        data = out.read_bytes()
        header = json.loads(data[12 : 12 + int.from_bytes(data[8:12], "little")])
        more = [[f"s{n}", "replay", 10**6 + n, 1] for n in range(sources)]
        header["header"]["sources"] += more
        out.write_bytes(_with_header(data, None, header))
    if size:
        os.truncate(out, size)
    return out


@pytest.mark.parametrize(
    "read",
    [inspect, read_history, explore, Curriculum.open, lambda file: build_job_report(file.parent)],
)
def test_a_curriculum_is_as_long_as_its_steps(made_run, tmp_path, read):
    recorded = made_run / "arms" / "rod" / "curriculum.rod"
    for number, hostile in enumerate(({"size": 8 << 40}, {"sources": 200_000})):
        file = curriculum(recorded, tmp_path / str(number), **hostile)
        begun = time.monotonic()
        with (
            time_limit(60),
            pytest.raises(ValueError, match=r"more than a crash leaves|sources, more than"),
        ):
            read(file)
        assert time.monotonic() - begun < 20


def test_as_many_sources_as_a_header_may_have_are_drawn(made_run, tmp_path):
    file = curriculum(made_run / "arms/rod/curriculum.rod", tmp_path / "many", sources=4000)
    with time_limit(60):
        inspect(file)
        explore(file)
        read_history(file)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[" * 1000 + "]" * 1000, "damaged"), ("{" * (1 << 21), "objects"),
        (" " * (1 << 25) + "{}", "bytes"), ('{"a": 1}', ""),
    ],
)  # fmt: skip
def test_values_are_of_a_size_that_a_run_writes(tmp_path, text, sentence):
    file = tmp_path / "x.json"
    file.write_text(text)
    refused = pytest.raises(ValueError, match=rf"x\.json .*{sentence}|holds no JSON object")
    with refused if sentence else contextlib.nullcontext():
        read_json(file)
    file.write_text('{"a": 1}' * (1 << 22))
    with pytest.raises(ValueError, match=r"has no JSON in line 1|no end of line"):
        read_lines(file)


def test_a_log_of_terabytes_is_not_read(run_dir):
    stage = StageLog(run_dir, "report")
    os.truncate(stage.path, 8 << 40)
    with time_limit(SECONDS):
        log(run_dir)
        with pytest.raises(ValueError, match="no end of line"):
            stage.events()


def test_kilobytes_of_the_authors_tables_stay_small(made_run, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    long = pa.DictionaryArray.from_arrays(pa.array([0] * 2000, pa.int32()), ["x" * (64 << 20)])
    one, ids = pa.array([1] * 2000), pa.array([[0] * 16] * 2000)
    targets = pa.array([15] * 2000)
    columns = {"token_ids": ids, "origin": long, "origin_tag": one, "content_hash": long}
    columns |= {"split": pa.array(["train"] * 2000), "ref_loss": one, "n_response_tokens": targets}
    for name in ("part_00000.parquet", "refloss_train_000000000000.parquet"):
        pq.write_table(pa.table(columns), tmp_path / name, compression="zstd")
        assert (tmp_path / name).stat().st_size < 1 << 20
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for words in (
        ["blocks", tmp_path, tmp_path / "out", "tokenizer=byte"],
        ["references", tmp_path, tmp_path / "out", f"blocks={made_run / 'blocks'}", "role=replay",
         "model=x", "precision=bf16"],
    ):  # fmt: skip
        options = path_parser("import").parse_args(["import", *map(str, words)])
        with time_limit(SECONDS), pytest.raises(ValueError, match=r"too much|has a text of"):
            options.main(options)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < 500 << 10
    trace = tmp_path / "trace.jsonl"
    trace.touch()
    os.truncate(trace, 8 << 40)
    with time_limit(SECONDS), pytest.raises(ValueError, match=r"no end of line|no row of"):
        read_launch_rows(trace)


@pytest.mark.parametrize("files", ["", "../victim/.bashrc", "/etc/passwd", "file:///etc/passwd"])
def test_a_dataset_brings_no_script_and_no_file_of_the_reader(tmp_path, victim, files):
    pytest.importorskip("datasets")
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "data.py").write_text(f"open({str(tmp_path / 'PWNED')!r}, 'w')")
    if files:
        (folder / "a.txt").write_text("theirs")
        named = f"configs:\n- config_name: default\n  data_files: {files}\n"
        (folder / "README.md").write_text(f"---\n{named}---\n")
    spec = SourceSpec(name="x", role="replay", kind="huggingface", path=str(folder))
    with time_limit(SECONDS), pytest.raises(ValueError, match=r"dataset .* cannot be opened"):
        list(Documents(spec))
    assert not (tmp_path / "PWNED").exists()


def test_weights_of_nothing_are_refused(made_run, tmp_path):
    """Their file has terabytes, and takes none on the disk."""
    base = Path(shutil.copytree(made_run / "base" / "hf", tmp_path / "base"))
    size = 1 << 43
    tensor = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
    head = json.dumps({"a.weight": tensor}).encode()
    head += b" " * (-len(head) % 8)
    (base / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)
    os.truncate(base / "model.safetensors", 8 + len(head) + size)
    with time_limit(SECONDS), pytest.raises(ValueError, match="has holes, unlike any weights"):
        merge_checkpoints(base, made_run / "arms" / "no_replay" / "hf", tmp_path / "out", 0.5)
    (base / "model.safetensors").unlink()
    os.mkfifo(base / "model.safetensors")
    with time_limit(10), pytest.raises(ValueError, match="is not a regular file"):
        checkpoint_digest(base)


def test_a_merge_copies_the_files_of_a_checkpoint(made_run, tmp_path, victim):
    base = Path(shutil.copytree(made_run / "base" / "hf", tmp_path / "base"))
    for name in ("vocab.json", "weights.safetensors"):  # which makes no place one of weights
        (base / name).symlink_to(victim / ".bashrc")
    described = read_json(base / "config.json") | {"_name_or_path": "kept"}
    write_json(base / "config.json", described)
    for name in ("extra.json", "manifest.json", "tokenizer_config.json"):
        (base / name).write_text("{}")
    for name in ("setup.sh", "modeling.py", "LICENSE", "old.bin"):
        (base / name).write_text("")
    expected = {"config.json", "model.safetensors", "tokenizer_config.json", "LICENSE"}
    for words, code in (((), set()), (("trust_remote_code=true",), {"modeling.py"})):
        here("merge", base, made_run / "arms/no_replay/hf", tmp_path / "out", "lambda=0.5", *words)
        files = [*(tmp_path / "out").iterdir()]
        assert {file.name for file in files} == expected | code
        # safetensors writes files that a group cannot read
        assert len({file.stat().st_mode for file in files}) == 1
        assert read_json(tmp_path / "out" / "config.json") == described
        shutil.rmtree(tmp_path / "out")
    (base / "model.safetensors").rename(victim / "model.safetensors")
    weights = {"weight_map": {"a.weight": "../victim/model.safetensors"}}
    write_json(base / "model.safetensors.index.json", weights)
    with pytest.raises(ValueError, match="it has files of another folder"):
        merge_checkpoints(base, made_run / "arms" / "no_replay" / "hf", tmp_path / "other", 0.5)


# --- supply ---


def test_workflows_may_only_read_and_name_actions_by_commit():
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        flow = yaml.safe_load(file.read_text())
        assert flow["permissions"] == {"contents": "read"}, file.name
        for used in re.findall(r"uses: (\S+)", file.read_text()):
            assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", used), used
