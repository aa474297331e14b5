"""A package's parts work through the command line: those of the example in docs/extending.md.

Its run also has branches of an arm, which are the unbroken arms with their schedules.
"""

import importlib
import json
import math
import re
from itertools import islice
from types import SimpleNamespace
from typing import Any

import modules_logger
import numpy as np
import pytest
from command_line import nemo_rod, with_packages
from places import ROOT
from tiny_recipe import (
    ARMS,
    BATCH,
    BRANCHES,
    EXAMPLE,
    EXTENDED,
    SHARE,
    STEPS,
    WHOLE,
    assert_is_the_unbroken_arm,
    write_rows,
)

from nemo_rod import parts
from nemo_rod.corpus import BlockStore
from nemo_rod.files import read_json, read_lines
from nemo_rod.hosts import swap_in
from nemo_rod.run import branches
from nemo_rod.selection import Curriculum, Pool, References, TakeAll, competition
from nemo_rod.selection.arms import make_arm
from nemo_rod.selection.choice import choose


def test_policy_and_score(small_run):
    arm = small_run / "arms" / "rod"
    folders = [small_run / "references" / name for name in ("specialist", "base")]
    references = References.open(folders, BlockStore(small_run / "blocks"))
    with Curriculum.open(arm / "curriculum.rod", read_only=True) as curriculum:
        records, is_replay = list(curriculum), curriculum.header.is_replay
        assert curriculum.header.score == "relative"
    assert [record.step for record in records] == list(range(STEPS))
    capped = 0
    for record in records:
        reference_C = references[record.block_ids]
        excess_C = (record.loss - reference_C) / np.maximum(reference_C, np.float32(0.1))
        assert np.array_equal(record.score, excess_C)
        is_replay_C, k = is_replay(record.block_ids), len(record.chosen)
        num_replay = int(is_replay_C[record.chosen].sum())
        assert k == BATCH and num_replay <= SHARE * BATCH
        assert record.threshold == record.score[record.chosen].min()
        better_C = record.score > record.threshold
        better_C[record.chosen] = False
        assert not (better_C & ~is_replay_C).any()
        if better_C.any():
            assert num_replay == SHARE * BATCH
            capped += 1
    assert capped, "the cap decided at no step"
    assert read_json(arm / "arm.json")["policy_name"] == "capped"


def test_reader(small_run):
    manifest = read_json(small_run / "blocks" / "adaptation" / "new" / "manifest.json")
    (file,) = manifest["files"]
    assert (file["name"], file["documents"]) == ("new.csv", 40)


def test_a_reader_resumes_at_a_record(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    csv_files: Any = importlib.import_module("nemo_rod_example.csv_files")
    write_rows(tmp_path / "new.csv")

    def opened() -> Any:
        spec = SimpleNamespace(text_field="body", filter=None, options={"delimiter": ";"})
        return csv_files.CsvFile(tmp_path / "new.csv", "new.csv", spec)

    texts = list(opened().records(None))
    assert len(texts) == 60 and texts[0].count("\n") == 39
    first = opened()
    begun = list(islice(first.records(None), 7))
    assert begun + list(opened().records(first.position())) == texts


def test_logger_and_launcher(small_run):
    for name in ("no_replay", "rod"):
        shown = read_lines(small_run / "arms" / name / "lines.jsonl")
        kept = read_lines(small_run / "arms" / name / "metrics.jsonl")
        assert [line["step"] for line in shown] == [row["step"] + 1 for row in kept]
        assert [line["at_a_glance/training_loss"] for line in shown] == [
            row["train/loss"] for row in kept
        ]
        assert {line["run"] for line in shown} == {f"toy_synthetic/{name}"}
    rows = [line.split("\t") for line in (small_run / "seconds.tsv").read_text().splitlines()]
    jobs = ["base", "references/base", "no_replay", "references/specialist", "rod", *BRANCHES]
    assert [name for name, _ in rows] == [*jobs, "evaluate"]
    assert all(float(seconds) > 0 for _, seconds in rows)


def test_measurement_section_and_stage(small_run):
    from safetensors.numpy import load_file

    for name in ARMS:
        hf = (small_run / "base" if name == "base" else small_run / "arms" / name) / "hf"
        tensors = [
            tensor for file in hf.glob("*.safetensors") for tensor in load_file(file).values()
        ]
        measured = read_json(small_run / "arms" / name / "parameters.json")["parameters"]
        assert measured == sum(tensor.size for tensor in tensors) > 100_000
    shares = [
        row["rod/replay_share"] for row in read_lines(small_run / "arms" / "rod" / "metrics.jsonl")
    ]
    means = [float(line) for line in (small_run / "shares" / "rod.txt").read_text().splitlines()]
    pairs = np.reshape(shares, (-1, 2)).mean(axis=1)
    assert means == pytest.approx(pairs.tolist(), abs=1e-4)


def test_no_training_imports_the_lab_or_the_hosts(small_run):
    for name in ("no_replay", "rod"):
        modules = modules_logger.imported(small_run / "arms" / name)
        assert {"nemo_rod.megatron.rod_selector", "nemo_rod_example.lines"} <= {*modules}
        assert not [m for m in modules if re.match(r"nemo_rod\.(lab|hosts)\b", m)]


def test_metric_and_figure(small_run):
    arm, report = small_run / "arms" / "rod", small_run / "report"
    with Curriculum.open(arm / "curriculum.rod", read_only=True) as curriculum:
        for record, row in zip(curriculum, read_lines(arm / "metrics.jsonl"), strict=True):
            is_chosen = np.isin(np.arange(len(record.score)), record.chosen)
            gap = record.score[is_chosen].mean() - record.score[~is_chosen].mean()
            assert row["margin/scores"] == pytest.approx(gap, abs=1e-6)
    assert all("margin/scores" in line for line in read_lines(arm / "lines.jsonl"))
    page = (report / "index.html").read_text()
    assert "<h3>margin/scores</h3>" in page and "<h2>Compute by arm</h2>" in page
    assert "compute (plain steps)" in page
    assert {"compute.svg", "compute.png"} <= {file.name for file in (report / "figures").iterdir()}


def test_a_branch_is_the_unbroken_arm(small_run):
    arms = [small_run / "arms" / arm for arm in (*BRANCHES, "rod")]
    assert_is_the_unbroken_arm(*arms, 2, 5)


def test_a_branch_that_was_killed_as_it_began_begins_again(small_run, tmp_path):
    (tmp_path / "checkpoints.partial/iter_0000002").mkdir(parents=True)
    (tmp_path / "curriculum.rod").write_bytes(b"cut")
    for _ in range(2):  # the second finds that all is there
        branches.begin(tmp_path, small_run / "arms/rod", 2, "digest")
    with Curriculum.open(tmp_path / "curriculum.rod") as curriculum:
        assert (len(curriculum), curriculum.header.config) == (2, "digest")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["iter_0000002"]
    with pytest.raises(ValueError, match=r"step=3 has no checkpoint .*one of 2, 4, 6;"):
        branches.begin(tmp_path / "other", small_run / "arms/rod", 3, "digest")


def test_command(small_run, installed):
    file = small_run / "arms" / "rod" / "curriculum.rod"
    rows = read_lines(small_run / "arms" / "rod" / "metrics.jsonl")
    share = sum(row["rod/replay_share"] for row in rows) / STEPS
    done = nemo_rod("replay-share", file, packages=installed)
    assert (done.returncode, done.stdout) == (0, f"{share:.4f}\n"), done.stderr
    helped = nemo_rod("help", packages=installed)
    assert "Of installed packages: replay-share, shares" in helped.stdout


def test_host(installed, monkeypatch):
    """It hands on the container of its job to our own host, which refuses that by a sentence."""
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.setattr(parts, "all_entry_points", parts.all_entry_points.__wrapped__)
    job = SimpleNamespace(container=None)
    with pytest.raises(ValueError, match=r"multiplier=0 is not valid: expected a number in"):
        swap_in.install("own_trainer", job, roles={"a": "replay"}, multiplier=0)


def test_a_second_run_has_nothing_to_do(small_run, installed):
    done = nemo_rod("run", *WHOLE, "dry_run=true", cwd=small_run.parent, packages=installed)
    assert done.returncode == 0, done.stderr
    # all but the report, which is made again
    assert done.stderr.count(": done  (") == 8 + len(BRANCHES)


FILE, ANY = "FILE.py:NAME", "or a name that a package registers."


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("selection.policy=nope", f"joint, fixed_share, mix, schedule, odm, capped, {FILE}, {ANY}"),
        ("selection.score=nope", f"expected reducible_loss, relative, {FILE}, {ANY}"),
        ("launcher.kind=nope", f"expected local, slurm, nemo_rl, ray, timed, {ANY}"),
        ("logger=[nope]", "expected some of tensorboard, wandb, mlflow, lines, modules, such as"),
        (
            "domain.sources.chain_0.kind=nope",
            f"huggingface, megatron, synthetic, generated, csv, {FILE}, {ANY}",
        ),
        ("+selection.policy_options.cap=1", "unexpected keyword argument 'cap'): correct"),
        ("selection.policy_options.max_share=2", "max_share=2: expected a share in [0, 1]."),
    ],
)
def test_what_no_package_provides_is_refused(word, sentence, installed, tmp_path):
    done = nemo_rod("run", *EXTENDED, word, cwd=tmp_path, packages=installed)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert sentence in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("points", "answers"),
    [
        ({"policies": "bad = no_such_module:Policy", "loggers": "bad = json:Logger",
          "recipe_commands": "bad = json:run", "commands": "worse = json:main"},
         {"run selection.policy=bad":
          "selection.policy=bad is registered as no_such_module:Policy, which cannot be imported "
          "(No module named 'no_such_module'): correct or remove the package that registers it.",
          "run logger=bad": "logger=bad is registered as json",
          "bad": "'bad' is registered as json:run", "worse": "'worse' is registered as json:main"}),
        ({"sections": "bad = json:Section"}, {"plan": "'bad' is registered as json:Section"}),
        ({"sections": "train = json:JSONDecoder"}, {"plan": "the section 'train'"}),
    ],
)  # fmt: skip
def test_parts_that_cannot_be_imported_are_refused(points, answers, tmp_path):
    register(tmp_path, "bad", **points)
    # a broken section keeps a process that has imported all from starting
    how = {"env": with_packages(tmp_path)} if "sections" in points else {"packages": tmp_path}
    for line, sentence in answers.items():
        command, *more = line.split()
        done = nemo_rod(command, "recipe=toy_synthetic", *more, cwd=tmp_path, **how)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert sentence in done.stderr


def register(folder, package, **points):
    """Installs a package that registers points, each `group=line`."""
    (info := folder / f"{package}-1.0.dist-info").mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lists = (f"[nemo_rod.{kind}]\n{point}\n" for kind, point in points.items())
    (info / "entry_points.txt").write_text("".join(lists))


def test_names_that_two_packages_register_or_that_nothing_reads_are_told(tmp_path, monkeypatch):
    register(tmp_path, "one", metrics="margin = json:dumps", polices="mine = json:dumps")
    register(tmp_path, "two", metrics="margin = json:loads", policies="joint = json:loads")
    register(tmp_path, "three", scores="same = json:loads")
    register(tmp_path, "four", scores="same = json:loads")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(parts, "all_entry_points", parts.all_entry_points.__wrapped__)
    with pytest.raises(ValueError, match=r"^'margin' is registered as json:dumps and json:loads"):
        parts.load("metrics", "margin")
    assert parts.load("scores", "same") and parts.load("policies", "joint").__name__ == "Joint"
    assert sorted(parts.unused()) == [
        "The package one registers 'mine' in nemo_rod.polices, which nothing reads (did you mean "
        "policies?): rename it.",
        "The package two registers 'joint' in nemo_rod.policies, but that name stays nemo_rod's "
        "own: rename it.",
    ]


@pytest.mark.parametrize(
    ("kind", "code", "sentence"),
    [
        ("policy", "raise SystemExit(0)", "cannot be imported (SystemExit: 0): correct the file."),
        ("policy", "part = 3", "is an object of int, expected a class or a function"),
        ("score", "part = 'text'", "is an object of str, expected a class or a function"),
        ("policy", "def part(pool, score_C, k): pass", "or name a class or a function that makes"),
        ("policy", "def part(): raise KeyError('x')", "(KeyError: 'x'): correct the options, or"),
        ("policy", "def part(): raise SystemExit(0)", "(SystemExit: 0): correct the options, or"),
        ("policy", "def part(): raise ValueError('its own')", "its own"),
    ],
)
def test_a_file_that_provides_no_part_is_refused(kind, code, sentence, tmp_path):
    (tmp_path / "mine.py").write_text(code)
    values: dict[str, Any] = {f"{kind}_name": f"{tmp_path}/mine.py:part"}
    config = {"num_adaptation": 9, "num_replay": 9, "batch_size": 1, "seed": 0, "kappa": 1.0}
    arm = make_arm("rod", **config, balance="exact", multiplier=2, prefix="1", **values)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        assert arm.needs


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (None, "'mine' fail at step 7 (AttributeError: 'NoneType' object has no attribute 'items'"),
        ({"mine/a": "high"}, "'mine' fail at step 7 (TypeError: must be real number, not str): co"),
        (SystemExit(0), "'mine' fail at step 7 (SystemExit: 0): correct the package"),
        (ValueError("own"), "'mine' fail at step 7 (ValueError: own): correct the package"),
        (
            {"rod/replay_share": 1.0},
            "'mine' fail at step 7 (ValueError: 'rod/replay_share', expected a n",
        ),
        ({3: 1.0}, "'mine' fail at step 7 (AttributeError: 'int' object has no attribute"),
    ],
)
def test_metrics_that_cannot_be_logged_are_refused(values, sentence, monkeypatch):
    def measure(*_):
        if isinstance(values, BaseException):
            raise values
        return values

    choice = choose(Pool(7, np.arange(2), np.arange(2) > 0), TakeAll(), 2)
    monkeypatch.setattr(competition, "registered_metrics", lambda: {"mine": measure})
    with pytest.raises(ValueError, match=f"^{re.escape('The registered metrics ' + sentence)}"):
        competition.all_metrics(choice, np.arange(2), ["new", "old"])


def test_metrics_of_numpy_are_plain_and_no_package_takes_the_name_of_ours(tmp_path, monkeypatch):
    choice = choose(Pool(7, np.arange(2), np.arange(2) > 0), TakeAll(), 2)
    values = {"mine/a": np.float32(0.5), "mine/b": np.int64(3), "mine/c": math.nan, "mine/d": 3}
    monkeypatch.setattr(competition, "registered_metrics", lambda: {"mine": lambda *_: values})
    assert json.dumps(competition.all_metrics(choice, np.arange(2), ["new", "old"])) == (
        '{"mine/a": 0.5, "mine/b": 3.0, "mine/c": null, "mine/d": 3}'
    )
    monkeypatch.undo()
    register(tmp_path, "one", metrics="train = json:dumps")
    words = ("run", "recipe=toy_synthetic", "dry_run=true")
    done = nemo_rod(*words, cwd=tmp_path, env=with_packages(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "registers the metrics 'train', a name of ours: rename them there." in done.stderr


@pytest.mark.parametrize(
    ("code", "status", "sentence"),
    [
        ("return None", 2, "returns no list of inputs (TypeError: 'NoneType' object is not iter"),
        ("return ['text']", 2, "returns no list of inputs (AttributeError: 'str' object has no"),
        ("raise KeyError('x')", 2, "returns no list of inputs (KeyError: 'x'): correct it."),
        ("exit(0)", 2, "returns no list of inputs (SystemExit: 0): correct it."),
        ("return [Exits()]", 1, "prepare was left by sys.exit(0): correct the part that calls it."),
    ],
)
def test_a_reader_that_reads_nothing_is_refused(code, status, sentence, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from nemo_rod.corpus.formats import Input\nclass Exits(Input):\n"
        "    def __init__(self): super().__init__('a', 1)\n    def read(self, start): exit(0)\n"
        f"def read(spec): {code}\n".replace("exit(0)", "raise SystemExit(0)")
    )
    source = "domain.sources.chain_0={role: adaptation, kind: 'mine.py:read'}"
    done = nemo_rod("prepare", "recipe=toy_synthetic", source, cwd=tmp_path)
    assert done.returncode == status and sentence in done.stderr.splitlines()[-1], done.stderr


def test_a_file_is_imported_once_for_all_of_its_parts(tmp_path):
    (tmp_path / "mine.py").write_text("def policy(): pass\ndef score(): pass\n")
    policy = parts.load("policies", f"{tmp_path}/mine.py:policy")
    score = parts.load("scores", f"{tmp_path}/mine.py:score")
    assert policy.__globals__ is score.__globals__


def test_the_page_shows_the_code_of_the_example():
    page = (ROOT / "docs" / "extending.md").read_text()
    blocks = re.findall(r"^```(?:python|toml)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    code = [path.read_text() for path in EXAMPLE.rglob("*") if path.suffix in (".py", ".toml")]
    assert len(blocks) > 5
    for part in [part for block in blocks for part in block.split("\n...\n")]:
        assert any(part.strip("\n") in text for text in code), part
