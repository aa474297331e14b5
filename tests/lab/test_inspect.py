"""Commands that take paths: each kind of file is shown, decoded, compared, or refused in a line."""

import importlib.metadata
import json
import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from command_line import here
from corpus_cases import S, run, source, texts, train_bpe, write
from random_curriculum import write_curriculum
from test_build import create

from nemo_rod.commands.text import table
from nemo_rod.corpus import BlockStore, load_tokenizer
from nemo_rod.lab import curriculum_tools, doctor
from nemo_rod.lab.block_text import END_OF_DOCUMENT, block_text, block_texts, find_tokenizer
from nemo_rod.lab.inspect.command import inspect
from nemo_rod.lab.text import tenths
from nemo_rod.run.processes.pythons import MEGATRON_WORKER
from nemo_rod.selection import Choice, Curriculum, Pool, ReferenceWriter, SourceRow
from nemo_rod.selection.arms import Arm
from nemo_rod.selection.references.folder import role_manifest


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run folder with everything but models in it."""
    folder = tmp_path_factory.mktemp("run")
    news = source("news", [write(folder / "news.jsonl", texts(300, 1))], role="adaptation")
    web = source("web", [write(folder / "web.jsonl", texts(200, 2))])
    store = run(folder / "blocks", [news, web])
    manifest = role_manifest(
        store, "replay", model="model-1", lengths=(S, S // 4), precision="fp32"
    )
    for name in ("base", "unfinished"):
        writer = ReferenceWriter(folder / "references" / name, manifest, store.hashes)
        first, second = np.array_split(writer.missing, 2)
        writer.append(first, np.full((len(first), 2), [4.0, 5.0]))
        if name == "base":
            writer.append(second, np.full((len(second), 2), [8.0, 9.0]))
            writer.close()
    for seed, arm in enumerate(("rod", "rod_again", "fixed_20")):
        path, scored = folder / "arms" / arm / "curriculum.rod", arm != "fixed_20"
        write_curriculum(path, store, steps=25, batch_size=4, scored=scored, seed=seed)
    evaluation = {
        "loss": {"adaptation": {"news": 1.5}, "replay": {"web": 2.25}},
        "blocks": {"adaptation": {"news": 7}, "replay": {"web": 1234}},
    }
    (folder / "arms" / "rod" / "evaluation.json").write_text(json.dumps(evaluation))
    made = {"stage": "rod", "inputs": {"train.lr": 0.5}, "outputs": {"weights": "abc"}}
    (folder / "arms" / "rod" / "manifest.json").write_text(json.dumps(made))
    (folder / "arms" / "fixed_50.partial").mkdir()
    return folder


def lines(text: str) -> list[list[str]]:
    """Cells of every line: columns are at least two spaces apart."""
    return [[c.strip() for c in line.split("  ") if c.strip()] for line in text.splitlines()]


# --- what is shown


def test_a_run_that_was_rendered_alone_is_a_run_folder(tmp_path):
    config = tmp_path / "launch" / "slurm" / "config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("recipe: toy\n")
    shown = lines(inspect(tmp_path))
    assert ["base", "to do"] in shown and ["blocks", "to do"] in shown


def test_a_store_and_its_sources(run_dir):
    store, held = BlockStore(run_dir / "blocks"), BlockStore(run_dir / "blocks", "holdout")
    shown = lines(inspect(run_dir / "blocks"))
    assert ["digest", store.digest] in shown
    assert ["blocks", f"{len(store):,} of {S} tokens = {len(store) * S:,} tokens"] in shown
    counts = [f"{n:,}" for n in (store.num_adaptation, store.num_replay, held.num_replay)]
    assert ["replay", "web", *counts] in [row[:5] for row in shown]
    assert inspect(run_dir / "blocks" / "store.json") == inspect(run_dir / "blocks")
    for folder, split in (("web", "train"), ("web/holdout", "holdout")):
        shown = lines(inspect(run_dir / "blocks" / "replay" / folder))
        assert ["source", "web"] in shown and ["split", split] in shown
        assert ["web.jsonl", f"{(run_dir / 'web.jsonl').stat().st_size}", "200"] in shown


def test_blocks_as_text(run_dir):
    store = BlockStore(run_dir / "blocks")
    whole = "\0".join(texts(300, 1)) + "\0"
    shown = inspect(run_dir / "blocks", block=0)
    head, _, text = shown.partition("\n\n")
    assert ["hash", store.hashes([0])[0].tobytes().hex()] in lines(head)
    decoded = text.replace(END_OF_DOCUMENT, "\0")
    assert len(decoded) == S and decoded in whole
    assert decoded.count("\0") == (store.tokens([0])[0] == store.eod_id).sum()
    # in a source, its own blocks are counted
    first = store.num_adaptation
    of_source = inspect(run_dir / "blocks" / "replay" / "web", block=3)
    assert of_source == inspect(run_dir / "blocks", block=first + 3)
    assert f"{first + 3} of the train split, number 3 of replay/web" in of_source
    held = inspect(run_dir / "blocks" / "replay" / "web" / "holdout", block=0)
    number = BlockStore(run_dir / "blocks", "holdout").num_adaptation
    assert f"{number} of the holdout split, number 0 of replay/web" in held


def test_a_report_has_the_beginnings_of_blocks_of_its_store_alone(run_dir):
    blocks, store = run_dir / "blocks", BlockStore(run_dir / "blocks")
    whole = inspect(blocks, block=3).partition("\n\n")[2]
    assert block_texts(blocks, store.digest, [3]) == [whole]
    first = block_text(store, find_tokenizer(store), 3, length=5)
    assert whole.startswith(first) and len(first.replace(END_OF_DOCUMENT, "\0")) == 5
    with pytest.raises(ValueError, match="is not the store that the curriculum was recorded with"):
        block_texts(blocks, "another", [0])
    with pytest.raises(ValueError, match=r"no complete block store in .*nowhere"):
        block_texts(run_dir / "nowhere", store.digest, [0])


def test_text_of_a_block_cannot_steer_a_terminal(tmp_path):
    web = source("web", [write(tmp_path / "web.jsonl", ["a\x1b]0;title\x07\x1b[2J\tb\nc"] * 40)])
    run(tmp_path / "blocks", [web], holdout_fraction=0)
    shown = inspect(tmp_path / "blocks", block=0)
    assert "\x1b" not in shown and "\x07" not in shown
    assert "a\\x1b]0;title\\x07\\x1b[2J\tb\nc" in shown


def test_a_damaged_block_is_not_shown(run_dir, tmp_path):
    shutil.copytree(run_dir / "blocks", tmp_path / "blocks")
    folder = tmp_path / "blocks" / "replay" / "web"
    tokens = np.memmap(folder / "tokens-00000.bin", "<i4", "r+").reshape(-1, S)
    tokens[3, 2] ^= 1  # opening does not look at it
    tokens.flush()
    damaged = r"web/tokens-00000\.bin: block 3 does not match its hash in hash\.npy"
    with pytest.raises(ValueError, match=damaged):
        inspect(folder, block=3)
    first = BlockStore(run_dir / "blocks").num_adaptation
    with pytest.raises(ValueError, match=damaged):
        inspect(tmp_path / "blocks", block=first + 3)
    shown = inspect(tmp_path / "blocks", block=first + 4)
    assert shown == inspect(run_dir / "blocks", block=first + 4)


def test_the_tokenizer_is_found_beside_or_named(tmp_path):
    bpe = train_bpe(tmp_path / "bpe", 300)
    web = source("web", [write(tmp_path / "web.jsonl", ["the cat sat on the mat"] * 40)])
    run(tmp_path / "blocks", [web], tokenizer=load_tokenizer(str(bpe)), holdout_fraction=0)
    with pytest.raises(ValueError, match=r"does not lie beside it: name it with tokenizer=NAME"):
        inspect(tmp_path / "blocks", block=0)
    with pytest.raises(ValueError, match="made by a different tokenizer"):
        inspect(tmp_path / "blocks", block=0, tokenizer="byte")
    named = inspect(tmp_path / "blocks", block=0, tokenizer=str(bpe))
    assert "the cat sat on the mat\n--- end of document ---\nthe cat" in named
    shutil.copytree(bpe, tmp_path / "base" / "hf")
    assert inspect(tmp_path / "blocks", block=0) == named


def test_overlap_of_the_holdout(run_dir):
    shown = lines(inspect(run_dir / "blocks", overlap=8))
    assert [row[0] for row in shown[3:]] == ["news", "web"]
    assert all(0 <= int(row[2]) <= int(row[1]) for row in shown[3:])


def test_references_finished_and_not(run_dir):
    store = BlockStore(run_dir / "blocks")
    shown = lines(inspect(run_dir / "references" / "base"))
    start, count = store.num_adaptation, store.num_replay
    about = {"start": start, "stop": start + count, "block_size": S, "model": "model-1"}
    for key, value in (about | {"precision": "fp32"}).items():
        assert [key, str(value)] in shown
    assert shown[-1][0] == "4.0000" and shown[-1][-1] == "8.0000"
    mean = (9 * (count // 2) + 5 * (count - count // 2)) / count
    assert [f"of the first {S // 4} tokens", f"{mean:.4f}"] in shown
    state = f"0 of {count:,} blocks (0.0%); `nemo-rod reference` resumes"
    assert ["scored", state] in lines(inspect(run_dir / "references" / "unfinished"))


def test_curricula(run_dir):
    path = run_dir / "arms" / "rod" / "curriculum.rod"
    with Curriculum.open(path, read_only=True) as curriculum:
        arrays, header = curriculum_tools.arrays(curriculum), curriculum.header
        shown = lines(inspect(path))
        assert ["a step", f"4 of 8 blocks of {S} tokens"] in shown
        ids = arrays.block_ids
        last = slice(22, 25)
        (row,) = [row for row in shown if row[:2] == ["22", "3"]]
        assert row[2:] == [
            f"{header.is_replay(ids[last][arrays.chosen[last]]).mean():.1%}",
            f"{arrays.threshold[last].mean():.4f}",
            f"{arrays.loss[last].mean():.4f}",
            f"{arrays.score[last].mean():.4f}",
        ]
        taken = int(header.is_replay(ids[arrays.chosen]).sum())
        assert ["replay", "web", "100", str(taken), f"{taken / 100:.3f}"] in shown
    shown = lines(inspect(run_dir / "arms" / "fixed_20" / "curriculum.rod"))
    assert ["from step", "steps", "replay"] in shown


def test_means_of_a_curriculum_are_over_what_was_scored(tmp_path):
    """A score of -inf is of an excluded candidate; beside an estimated score there is no loss."""
    path, pool = tmp_path / "curriculum.rod", Pool(0, np.arange(3), np.arange(3) > 1)
    score = np.array([1, 2, -np.inf], np.float32)
    sources = (SourceRow("new", "adaptation", 0, 2), SourceRow("old", "replay", 2, 1))
    for loss, mean in ((score + 1, ["2.5000", "1.5000"]), (score * np.nan, ["1.5000"])):
        path.unlink(missing_ok=True)
        with create(path, sources, 3, 1) as curriculum:
            curriculum.append(Choice(pool, loss, score, np.array([1]), 2.0))
        assert ["0", "1", "0.0%", "2.0000", *mean] in lines(inspect(path))


def test_stages_and_runs(run_dir, capsys):
    shown = lines(inspect(run_dir / "arms" / "rod" / "manifest.json"))
    assert ["state", "done"] in shown and ["train.lr", "0.5"] in shown
    assert ["weights", "abc"] in shown and ["replay", "web", "2.2500", "1,234"] in shown
    here("inspect", run_dir)
    shown = lines(capsys.readouterr().out)
    assert ["RoD", "done"] in shown and ["fixed 50 %", "running"] in shown


def test_metrics_by_tenths(tmp_path):
    rows = [
        {"step": step, "train/loss": 3 - step / 10, "rod/replay_share": None if step < 2 else 0.5}
        for step in range(20)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    shown = lines(inspect(tmp_path / "metrics.jsonl"))
    assert shown[0] == ["20 steps"] and len(shown) == 14
    assert shown[2] == ["from step", "steps", "train/loss", "rod/replay_share"]
    assert shown[3] == ["0", "2", "2.95"]
    assert shown[4] == ["2", "2", "2.75", "0.5"] and shown[-1] == ["all", "20", "2.05", "0.5"]


# --- curricula: export, verify, diff


def test_curricula_are_compared(run_dir, capsys):
    paths = [str(run_dir / "arms" / arm / "curriculum.rod") for arm in ("rod", "rod_again")]
    here("curriculum", "diff", paths[0], str(run_dir / "arms" / "rod"))
    shown = lines(capsys.readouterr().out)
    assert shown[-1][:3] == ["all", "25", "100.0%"] and shown[-1][-2:] == ["+0.0", "100%"]
    assert len([row for row in shown if row and row[0].isdecimal()]) == 10
    here("curriculum", "diff", *paths)
    overlap = lines(capsys.readouterr().out)[-1][2]
    assert 0 < float(overlap.rstrip("%")) < 100


def test_curricula_are_checked_and_exported(run_dir, tmp_path, capsys):
    path = run_dir / "arms" / "rod" / "curriculum.rod"
    here("curriculum", "verify", path)  # the run's blocks are found
    assert f"25 steps, whole and of the blocks in {run_dir / 'blocks'}" in capsys.readouterr().out
    other = run(tmp_path / "blocks", [source("web", [run_dir / "web.jsonl"])])
    with pytest.raises(ValueError, match=f"but the block store has '{other.digest}'"):
        here("curriculum", "verify", path, tmp_path / "blocks")
    here("curriculum", "export", path, tmp_path / "c.parquet")
    assert "200 candidates of 25 steps" in capsys.readouterr().out
    import pyarrow.parquet as pq

    assert pq.read_table(tmp_path / "c.parquet").num_rows == 200
    before = path.read_bytes()
    for words in ([path, path], [path, path.with_name("arm.json"), "--format", "authors"]):
        with pytest.raises(ValueError, match=r" is no name for this export: expected one that "):
            here("curriculum", "export", *words)
    assert path.read_bytes() == before


def test_a_cut_curriculum_of_a_finished_arm_is_refused(run_dir, tmp_path):
    arm = Path(shutil.copytree(run_dir / "arms" / "rod", tmp_path / "rod"))
    cut = arm / "curriculum.rod"
    cut.write_bytes(cut.read_bytes()[:-500])
    assert ["steps", "21, from 0"] in lines(inspect(cut))  # a run may be in progress
    (arm / "arm.json").write_text('{"kind": "trained", "steps": 25}')
    transfer = Arm(
        name="transfer", num_adaptation=1, num_replay=1, batch_size=4, seed=1,
        balance="corpus", recorded=str(cut),
    )  # fmt: skip
    for use in (
        partial(here, "inspect", cut),
        partial(here, "curriculum", "export", cut),
        partial(here, "curriculum", "verify", cut, run_dir / "blocks"),
        partial(here, "curriculum", "diff", run_dir / "arms" / "rod" / "curriculum.rod", cut),
        transfer.pools,
    ):
        with pytest.raises(ValueError, match=r"rod holds 21 steps, but its arm\.json has steps=25"):
            use()
    assert not (arm / "curriculum.parquet").exists()


# --- the doctor


@pytest.mark.slow
def test_the_doctor_looks_at_everything(run_dir, capsys):
    here("doctor", run_dir / "blocks")
    shown = {row[1]: row[0] for row in lines(capsys.readouterr().out)}
    needed = {"python", "hydra", "torch", "megatron-core", "megatron-bridge", "transformers"}
    works = {"devices", "trainer", "megatron functions", "torchrun, gloo", "block store"}
    works.add(str(run_dir / "blocks"))
    assert {name for name, state in shown.items() if state == "ok"} >= needed | works
    assert shown.keys() == needed | works | {"datasets", "lm-eval", "pyarrow", "zstandard", "apt"}


def test_the_doctor_says_what_to_do(tmp_path, capsys, monkeypatch):
    def fails(command: object) -> None:
        raise RuntimeError("no  network\nhere")

    monkeypatch.setattr(doctor, "_run", fails)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit) as left:
        here("doctor", tmp_path)
    assert left.value.code == 1
    shown = capsys.readouterr().out
    states = {row[1]: (row[0], row[2]) for row in lines(shown)}
    cause = "no network here: several processes cannot communicate here"
    assert states["torchrun, gloo"] == ("NO", cause)
    assert states["apt"] == ("-", "apt-get and dpkg-deb missing: use recipe=toy_synthetic")
    assert states[str(tmp_path)][0] == "NO"
    assert f"there is no complete block store in {tmp_path}" in shown


def test_the_doctor_names_versions_that_are_newer_than_tested():
    remark = {"0.20.0rc1": ", untested: the newest tested is 0.19.2"}
    for version in ("0.19.2", "0.16.1", "0.20.0rc1", "there, but pip does not list it"):
        finding = doctor._mark_untested(doctor.Finding("megatron-core", True, version))
        assert finding.result == version + remark.get(version, "")


def test_the_doctor_speaks_while_it_works(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    finding = doctor._attempt("forward pass", lambda: capsys.readouterr().err, "")
    assert finding.result == "\r\033[K   forward pass ..."


@pytest.mark.parametrize("status", [0, 1])
def test_the_doctor_looks_at_the_workers_of_nemo_rl(tmp_path, capfd, monkeypatch, status):
    """In NeMo-RL's image the driver's environment has no Megatron, and needs none."""
    python = tmp_path / MEGATRON_WORKER / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "ran $*, ${{NEMO_RL_VENV_DIR-alone}}"\nexit {status}\n')
    python.chmod(0o755)
    monkeypatch.setenv("NEMO_RL_VENV_DIR", str(tmp_path))

    def version(package: str) -> str:
        if package.startswith("megatron"):
            raise importlib.metadata.PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr(doctor, "_run", lambda command: "")
    monkeypatch.setattr(doctor, "can_be_found", lambda module: False)
    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    with pytest.raises(SystemExit) if status else nullcontext():
        here("doctor")
    shown = capfd.readouterr().out
    states = {row[1]: row[0] for row in lines(shown) if len(row) > 1}
    assert states["torch"] == "ok" and states["megatron-core"] == states["megatron-bridge"] == "-"
    assert "trainer" not in states
    title = f"NeMo-RL's Megatron workers, {python}:"
    assert shown.splitlines()[-2:] == [title, "ran -P -m nemo_rod.cli doctor, alone"]


def test_the_doctor_finds_what_pip_lacks(tmp_path, monkeypatch):
    (tmp_path / "sources_on_a_path").mkdir()
    (tmp_path / "sources_on_a_path" / "core.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    installed = partial(doctor._check_package, "x", "sources-on-a-path", "install it")
    finding = installed(module="sources_on_a_path.core")
    assert (finding.fine, finding.result) == (True, "there, but pip does not list it")
    for module in ("sources_on_a_path.other", "nowhere_at_all.core", None):
        assert installed(module=module).fine is False


# --- what is refused


@pytest.mark.parametrize("block", [-1, 10000000])
def test_blocks_that_are_not_there(run_dir, block):
    with pytest.raises(ValueError, match=f"^block={block} is not"):
        inspect(run_dir / "blocks", block=block)


def test_a_manifest_of_another_kind_is_named(run_dir, tmp_path):
    source = run_dir / "blocks" / "replay" / "web" / "manifest.json"
    references = Path(shutil.copytree(run_dir / "references", tmp_path / "references")) / "base"
    shutil.copy(source, references)
    with pytest.raises(ValueError, match=r"base/manifest.json describes the source replay/web of"):
        inspect(references)
    blocks = Path(shutil.copytree(run_dir / "blocks", tmp_path / "blocks"))
    shutil.copytree(source.parent, other := blocks / "replay" / "other")
    manifest = json.loads(source.read_text())
    (other / "manifest.json").write_text(json.dumps({**manifest, "source": "other"}))
    sentence = r"replay/other of .* has only adaptation/news, replay/web"
    with pytest.raises(ValueError, match=sentence):
        inspect(other)


def test_text():
    assert table(("a",), [["\x1b[31mred\n"]]).splitlines()[1] == "\\x1b[31mred\\n"
    shown = table(("name", ">count"), [["a", 5], ["long name", None], ["b", "1,234"]])
    assert shown == "name       count\na              5\nlong name\nb          1,234"
    assert tenths(0) == [] and tenths(3) == [slice(0, 1), slice(1, 2), slice(2, 3)]
    for count in (10, 11, 101):
        parts = tenths(count)
        assert [i for p in parts for i in range(p.start, p.stop)] == list(range(count))
        assert len(parts) == 10
