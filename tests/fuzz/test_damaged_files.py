"""Every reader of every kind of file, given damaged ones: one sentence, no hang, nothing lost.

`make test-fuzz` prints how many cases there were; FUZZ_CASES=100:200 runs some of each reader's.
A reader may take a damaged file for a whole one where nothing could tell; what it may never do is
end in another exception than those that the command line makes a sentence of, name no file, take
long, or change a file that it only reads.
"""

import contextlib
import io
import os
import resource
import shutil
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
from authors_files import cache_rows, trace_rows, write_blocks, write_cache, write_lines
from command_line import here
from corpus_cases import BYTE
from damage import HOSTILE, damaged, drawn
from made_up_run import MEASURED_WITH, make_texts, recipe
from sandbox import Hangs, Sandbox, time_limit

from nemo_rod.config import Config, Domain
from nemo_rod.corpus import BlockStore, SourceSpec, load_tokenizer
from nemo_rod.corpus.documents import Documents
from nemo_rod.files import interpreting, read_lines, write_whole
from nemo_rod.jobs import TrainJob, read_job
from nemo_rod.lab.authors.blocks import import_blocks
from nemo_rod.lab.authors.references import import_references
from nemo_rod.lab.authors.trace import import_trace
from nemo_rod.lab.inspect.command import inspect
from nemo_rod.lab.launches import in_place_of_recipe, read_launch
from nemo_rod.lab.materialise import materialise
from nemo_rod.lab.merging import merge_checkpoints
from nemo_rod.lab.prepare.file_tokens import FileTokens
from nemo_rod.lab.prepare.tasks import run_task
from nemo_rod.lab.report.build_report import Files, build_report, judged_results
from nemo_rod.lab.report.explorer import explore
from nemo_rod.lab.report.job_folder import build_job_report
from nemo_rod.lab.report.provenance import provenance_of
from nemo_rod.lab.report.run_files import read_run
from nemo_rod.lab.status import last_progress, standing_text, training_progress
from nemo_rod.run import held_out_losses
from nemo_rod.run.base_model import checkpoint_digest
from nemo_rod.run.launch import queue
from nemo_rod.run.stage_log import StageLog
from nemo_rod.run.stages import Stages
from nemo_rod.selection import Curriculum, References
from nemo_rod.selection.arms import Arm, curriculum_header
from nemo_rod.selection.curriculum.journal import Journal
from nemo_rod.selection.references import ReferenceWriter
from nemo_rod.selection.references.folder import Folder, role_manifest
from nemo_rod.selection.schedule import Schedule

pytestmark = pytest.mark.fuzz

SECONDS = 10  # a case takes milliseconds
MEMORY = 500 << 20  # beyond what the process has, for a count or a file that was made huge
# One word of the file's path has to be in the sentence.
SAYS_WHERE = 2000  # letters of a sentence, at most
BETWEEN_LOOKS = 20  # cases of a reader that writes nothing, between two looks for changed files


@dataclass(frozen=True)
class Reader:
    """What reads files of a folder, of which these are damaged, so many times."""

    files: tuple[str, ...]  # patterns
    read: Callable[[Path], object]
    cases: int
    writes: bool = False  # such as one that resumes


def read_store(root: Path) -> None:
    for split in ("train", "holdout"):
        store = BlockStore(root / "run/blocks", split)
        store.verify()


def read_references(root: Path) -> None:
    store = BlockStore(root / "run/blocks")
    folders = [root / "run/references" / name for name in ("base", "specialist")]
    references = References.open(folders, store)
    opened = map(Folder.open, folders)
    drawn = [each.manifest.start + np.flatnonzero(each.present()) for each in opened]
    assert np.isfinite(references[np.concatenate(drawn)]).all()


def resume_references(root: Path) -> None:
    store = BlockStore(root / "run/blocks")
    manifest = role_manifest(
        store, "replay", model="x", lengths=[store.block_size], precision="fp32"
    )
    ReferenceWriter(root / "run/references/unfinished", manifest, store.hashes)


def resume_evaluation(root: Path) -> None:
    held_out_losses.valid_losses(root / "run/evaluation.partial", {"rod": dict(MEASURED_WITH)})


def read_curricula(root: Path) -> None:
    arms = root / "run/arms"
    here("curriculum", "verify", arms / "rod/curriculum.rod")
    here("curriculum", "diff", arms / "rod/curriculum.rod", arms / "no_replay/curriculum.rod")


def follow_curriculum(root: Path) -> None:
    store = BlockStore(root / "run/blocks")
    with Curriculum.open(root / "run/arms/rod/curriculum.rod", read_only=True) as recorded:
        width, steps = recorded.header.num_chosen, len(recorded)
    arm = Arm(
        name="x", num_adaptation=store.num_adaptation, num_replay=store.num_replay,
        batch_size=width, seed=1, balance="expected",
        recorded=str(root / "run/arms/rod/curriculum.rod"),
    )  # fmt: skip
    pools = arm.pools(store)
    for step in range(min(steps, 6)):
        pools.pool(step)


def resume_training(root: Path) -> None:
    """Opens the journal of the interrupted arm, at the step of its last checkpoint."""
    folder, store = root / "run/arms/max.partial", BlockStore(root / "run/blocks")
    job = read_job(folder / "job.json")
    if not isinstance(job, TrainJob):  # another stage's whole file: the worker does what it says,
        return  # and a stage writes its job.json anew before it starts a worker
    folders = [root / "run/references" / name for name in ("base", "specialist")]
    references = References.open(folders, store)
    header = curriculum_header(job.arm, store, references, config=job.config_digest)
    before = begin(folder / "curriculum.rod")
    Journal(folder, header, step=4)
    after = begin(folder / "curriculum.rod")
    assert before.startswith(after), "a resumed curriculum lost what was before its step"


def begin(path: Path) -> bytes:
    if not path.is_file():  # a pipe
        return b""
    with path.open("rb") as file:
        return file.read(1 << 20)


def read_metrics(root: Path) -> None:
    read_lines(root / "run/arms/rod/metrics.jsonl")
    training_progress(root / "run/arms/max.partial")


def read_report(root: Path) -> None:
    judged_results(read_run(root / "run"))


def read_hand_over(root: Path) -> None:
    for stage in Stages(composed_once(root / "run")).all():
        stage.is_there()
        stage.is_done()


@cache
def composed_once(run_dir: Path) -> Config:
    return recipe(run_dir)


def inspect_all(root: Path) -> None:
    for path in (
        *("run", "run/blocks", "run/blocks/replay/chain_0", "run/references/base"),
        *("run/references/unfinished", "run/arms/rod", "run/arms/rod/curriculum.rod"),
        *("run/arms/max.partial", "run/base"),
    ):
        with interpreting(root / path, besides=(ValueError,)):  # as the command does
            inspect(root / path)


def read_parts(root: Path) -> None:
    """Reads what a task of `prepare` has made of a file."""
    for folder in (root / "text_parts").glob("*/*"):
        made = FileTokens(folder)
        for batch, (tokens, lengths) in made.batches(0, np.zeros(len(made.sizes_D), dtype=bool)):
            assert len(tokens) == lengths.sum() and len(batch.texts) == len(lengths)


def read_records(root: Path) -> None:
    for file in (root / "run/launch/stages").glob("*.jsonl"):
        StageLog(root / "run", file.stem).events()
    queue.read_jobs(root / "run")


def merge(root: Path) -> None:
    out = root / "out"
    shutil.rmtree(out, ignore_errors=True)
    merge_checkpoints(root / "run/base/hf", root / "run/arms/no_replay/hf", out, 0.5)


def make_foreign(folder: Path) -> None:
    """Makes files of the authors' code, what is made of them, and other programs' files."""
    from datasets import Dataset

    rows = write_blocks(folder / "theirs" / "blocks", 24, size=16)
    steps = [row for step in range(3) for row in trace_rows(rows, step, 4)]
    write_lines(folder / "theirs" / "selected_samples.jsonl", steps)
    write_cache(folder / "theirs" / "cache", cache_rows(rows, 1))
    import_blocks(folder / "theirs" / "blocks", folder / "imported", BYTE)
    BYTE.save_pretrained(folder / "tokenizer")
    (folder / "schedule.csv").write_text("step,replay\n0,0.25\n3,0.5\n")
    (folder / "victim").write_text('{"mine": 1}\n')
    for name in ("curriculum.rod", "metrics.jsonl"):  # of a job of one's own
        write_whole(folder / "job" / name, (folder / "run/arms/rod" / name).read_bytes())
    Dataset.from_dict({"text": ["one", "two"] * 20}).save_to_disk(str(folder / "texts" / "saved"))
    for name in ("launch", "logs", "arms/max.partial"):  # of a run under way, without a queue
        shutil.copytree(folder / "run" / name, folder / "watched" / name.replace("max", "rod"))
    (folder / "watched/launch/slurm/jobs.tsv").unlink()
    spec = {"role": "replay", "kind": "jsonl", "files": [f"{folder}/texts/plain.jsonl"]}
    domain, parts = Domain(tokenizer="byte", sources={"x": spec}), folder / "text_parts"
    run_task(domain, 1, [parts], False, parts, 0)


def imports(what: str, root: Path) -> None:
    """Imports one kind of the authors' files, anew."""
    theirs, store, out = root / "theirs", root / "imported", root / "out"
    shutil.rmtree(out, ignore_errors=True)
    if what == "blocks":
        import_blocks(theirs / "blocks", out, BYTE)
    elif what == "cache":
        scored = {"role": "replay", "model": "x", "precision": "bf16"}
        import_references(theirs / "cache", BlockStore(store), out, **scored)
    else:
        out.mkdir()
        import_trace([theirs], BlockStore(store), out / "made.rod").close()


def write_again(root: Path) -> None:
    """Writes a recorded curriculum for other trainers."""
    shutil.rmtree(root / "out", ignore_errors=True)
    with Curriculum.open(root / "run/arms/rod/curriculum.rod", read_only=True) as recorded:
        materialise(recorded, BlockStore(root / "run/blocks"), root / "out", format="parquet")


def read_logs(root: Path) -> None:
    for log in (root / "run/logs").glob("*.log"):
        last_progress(log)


def read_page_of_before(root: Path) -> None:
    Files(root / "run/report").finish()


def read_texts(kind: str, pattern: str, root: Path) -> None:
    path = str(root / pattern)
    where = {"path": path} if kind == "huggingface" else {"files": [path]}
    spec = SourceSpec(name="x", role="replay", kind=kind, **where)
    for _ in Documents(spec):
        pass


OF_NO_ARM = {"arms": {}, "sources": {"adaptation": {"dialect": 1}, "replay": {"chain_0": 1}}}
READERS = {
    "block store": Reader(("run/blocks/**/*",), read_store, 6_000),
    "references": Reader(("run/references/*/*.npy", "run/references/*/manifest.json"),
                         read_references, 12_000),
    "unfinished references": Reader(("run/references/unfinished/*",), resume_references, 10_000,
                                    writes=True),
    "curricula": Reader(("run/arms/rod/curriculum.rod", "run/arms/rod/arm.json"),
                        read_curricula, 8_000),
    "followed curriculum": Reader(("run/arms/rod/curriculum.rod",), follow_curriculum, 6_000),
    "resumed training": Reader(("run/arms/max.partial/*",), resume_training, 6_000, writes=True),
    "resumed evaluation": Reader(("run/evaluation.partial/*",), resume_evaluation, 6_000,
                                 writes=True),
    "metrics": Reader(("run/arms/*/metrics.jsonl", "run/arms/max.partial/job.json"),
                      read_metrics, 16_000),
    "report": Reader(("run/arms/*/*.json*", "run/arms/*/*.npy", "run/arms/*/curriculum.rod",
                      "run/blocks/*/*/manifest.json"), read_report, 3_000),
    "manifests of stages": Reader(("run/*/manifest.json", "run/*/*/manifest.json",
                                   "run/arms/*/*.json", "run/references/*/*"),
                                  read_hand_over, 1_500),
    "inspect": Reader(("run/arms/**/*", "run/references/*/*", "run/blocks/**/*.json",
                       "run/blocks/**/hash.npy", "run/base/*"), inspect_all, 5_000),
    "jobs": Reader(("run/arms/*/job.json",), lambda r: read_job(r / "run/arms/rod/job.json"),
                   10_000),
    "records of stages": Reader(("run/launch/stages/*", "run/launch/slurm/jobs.tsv"),
                                read_records, 10_000),
    "launched configuration": Reader(("run/launch/slurm/config.yaml",),
                                     lambda root: read_launch(root / "run"), 200),
    "Hugging Face checkpoints": Reader(("run/*/hf/*", "run/arms/no_replay/hf/*"),
                                       merge, 4_000, writes=True),
    "jsonl": Reader(("texts/plain.jsonl",), partial(read_texts, "jsonl", "texts/*.jsonl"), 6_000),
    "jsonl.gz": Reader(("texts/*.gz",), partial(read_texts, "jsonl", "texts/*.gz"), 5_000),
    "jsonl.zst": Reader(("texts/*.jsonl.zst",), partial(read_texts, "jsonl", "texts/*.jsonl.zst"),
                        5_000),
    "text": Reader(("texts/*.txt*",), partial(read_texts, "text", "texts/*.txt*"), 5_000),
    "megatron": Reader(("run/blocks/replay/chain_0/tokens*",),
                       partial(read_texts, "megatron", "run/blocks/replay/chain_0/tokens-00000"),
                       3_000),
    "saved datasets": Reader(("texts/saved/*",), partial(read_texts, "huggingface", "texts/saved"),
                             300),
    "authors' blocks": Reader(("theirs/blocks/*",), partial(imports, "blocks"), 2_000, writes=True),
    "authors' losses": Reader(("theirs/cache/*",), partial(imports, "cache"), 2_000, writes=True),
    "authors' choices": Reader(("theirs/*.jsonl",), partial(imports, "trace"), 3_000, writes=True),
    "tokenizers": Reader(("tokenizer/*",), lambda root: load_tokenizer(f"{root}/tokenizer"), 100),
    "written again": Reader(("run/arms/rod/curriculum.rod", "run/blocks/*/*/*"), write_again, 1_000,
                            writes=True),
    "folder for a recipe": Reader(
        ("run/launch/slurm/config.yaml",),
        lambda r: in_place_of_recipe(r / "run/launch/slurm/config.yaml", [f"{r}/run"]), 200,
    ),
    "provenance": Reader(("run/launch/*/co*", "run/launch/stages/*", "run/blocks/*/*/*.json"),
                         lambda root: provenance_of(root / "run", OF_NO_ARM), 150),
    "explorer": Reader(("run/arms/rod/*",),
                       lambda root: explore(root / "run/arms/rod/curriculum.rod"), 1_000),
    "logs": Reader(("run/logs/*.log",), read_logs, 3_000),
    "earlier pages": Reader(("run/report/files.json",), read_page_of_before, 500, writes=True),
    "status": Reader(("watched/*/*/*",), lambda r: standing_text(r / "watched"), 300),
    "text parts": Reader(("text_parts/*/*/*",), read_parts, 4_000),
    "schedules": Reader(("schedule.csv",), lambda r: Schedule(file=f"{r}/schedule.csv"), 3_000),
    "weights": Reader(("run/base/hf/*",), lambda r: checkpoint_digest(r / "run/base/hf"), 3_000),
    "pages": Reader(("run/arms/*/*", "run/report/*.json", "run/launch/*/*", "run/blocks/*/*/*"),
                    lambda root: build_report(root / "run"), 50, writes=True),
    "pages of jobs": Reader(("job/*",), lambda r: build_job_report(r / "job"), 50, writes=True),
    "parquet": Reader(("texts/*.parquet",), partial(read_texts, "parquet", "texts/*.parquet"),
                      5_000),
}  # fmt: skip


@pytest.fixture(scope="module")
def sandbox(made_run):
    root = made_run.parent
    make_texts(root / "texts")
    make_foreign(root)
    return Sandbox(root)


@pytest.fixture(scope="module")
def counted():
    """Counts the cases of every reader, and prints them at the end."""
    counts: dict[str, int] = {}
    yield counts
    for name, count in counts.items():
        print(f"\n{count:>8,}  {name}", end="")
    print(f"\n{sum(counts.values()):>8,}  damaged files in all")


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Bounds the memory of all cases."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)  # maps of files do not count
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    assert not Path("PWNED").exists(), "a file's own code ran"


@pytest.mark.parametrize("name", READERS)
def test_damaged_files_are_a_sentence(name, sandbox, counted):
    reader = READERS[name]
    files = sandbox.files(*reader.files)
    others = [content for content in sandbox.content.values() if content]
    assert not outcome(reader, sandbox.root, None), "the whole files are refused"

    first, _, last = os.environ.get("FUZZ_CASES", f"0:{reader.cases}").rpartition(":")
    with limited():
        for number in range(int(first or 0), min(int(last), reader.cases)):
            damage = drawn(f"{name} {number}")
            path = files[damage.file % len(files)]
            content = sandbox.content[path]
            if damage.kind in HOSTILE:
                sandbox.write(path, partial(HOSTILE[damage.kind], path, sandbox.root / "victim"))
            else:
                sandbox.write(path, damaged(damage, content, others) if content else None)
            counted[name] = counted.get(name, 0) + 1
            is_last = reader.writes or number % BETWEEN_LOOKS == BETWEEN_LOOKS - 1
            try:
                wrong = outcome(reader, sandbox.root, path)
                assert not wrong, f"{number}: {path.relative_to(sandbox.root)}, {damage}: {wrong}"
            finally:
                changed = sandbox.changed() if is_last else []
                sandbox.restore(path, *changed)
            assert reader.writes or not changed, f"it changed {changed} by case {number}"


def outcome(reader: Reader, root: Path, path: Path | None) -> str:
    """Runs a reader; returns what is wrong with how it ended, "" if nothing is."""
    try:
        with time_limit(SECONDS if path else 300), contextlib.redirect_stdout(io.StringIO()):
            reader.read(root)
    except (ValueError, OSError) as error:
        sentence = " ".join(str(error).split())
        if path is None:
            return sentence
        named = {*path.relative_to(root).parts} - {"run", "arms", "references"}
        named |= {"block store"} if "blocks" in named else set()  # two that differ in a digest
        if not any(part in sentence for part in named) or len(sentence) > SAYS_WHERE:
            return f"it says only {type(error).__name__}: {sentence[:SAYS_WHERE]}"
    except (Exception, Hangs) as error:
        frames = traceback.extract_tb(error.__traceback__)[-8:]
        places = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
        return "\n".join([f"{type(error).__name__}: {error}", *places])
    return ""
