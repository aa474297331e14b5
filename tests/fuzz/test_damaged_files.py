"""Every reader of every kind of file, given damaged ones: one sentence, no hang, nothing lost.

`make test-fuzz` prints how many cases there were. A reader may take a damaged file for a whole one
where nothing could tell; what it may never do is end in another exception than those that the
command line makes a sentence of, name no file, take long, or change a file that it only reads.
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
from damage import HOSTILE, Damage, damaged, damages
from hypothesis import given
from made_up_run import MEASURED_WITH, make_texts, recipe
from sandbox import Hangs, Sandbox, cases, time_limit

from nemo_rod.commands.arguments import Arguments
from nemo_rod.config import Config
from nemo_rod.corpus import BlockStore, SourceSpec
from nemo_rod.corpus.documents import Documents
from nemo_rod.files import interpreting, read_lines
from nemo_rod.jobs import TrainJob, read_job
from nemo_rod.lab import curricula as curriculum_command
from nemo_rod.lab.inspect.command import inspect
from nemo_rod.lab.launches import read_launch
from nemo_rod.lab.merging import merge_checkpoints
from nemo_rod.lab.report.build_report import judged
from nemo_rod.lab.report.run_files import read_run
from nemo_rod.lab.status import training_progress
from nemo_rod.run import held_out_losses
from nemo_rod.run.launch import queue
from nemo_rod.run.stage_log import StageLog
from nemo_rod.run.stages import Stages
from nemo_rod.selection import Curriculum, References
from nemo_rod.selection.arms import Arm, curriculum_header
from nemo_rod.selection.curriculum.journal import Journal
from nemo_rod.selection.references import ReferenceWriter
from nemo_rod.selection.references.folder import Folder, role_manifest

pytestmark = pytest.mark.fuzz

SECONDS = 10  # a case takes milliseconds
MEMORY = 500 << 20  # beyond what the process has, for a count or a file that was made huge
# One word of the file's path has to be in the sentence.
SAYS_WHERE = 2000  # letters of a sentence, at most


@dataclass(frozen=True)
class Reader:
    """A reader and its files.

    Attributes:
        files: patterns of the files that are damaged, below the folder.
        read: reads them; the folder is its argument.
        cases: number of damaged files that it is given.
        writes: whether it also writes, such as one that resumes.
    """

    files: tuple[str, ...]
    read: Callable[[Path], object]
    cases: int
    writes: bool = False


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
    for verb, other in (("verify", None), ("diff", arms / "no_replay/curriculum.rod")):
        words = [verb, str(arms / "rod/curriculum.rod"), *([str(other)] if other else [])]
        options = curriculum_parser().parse_args(words)
        options.main(options)


def curriculum_parser() -> Arguments:
    parser = Arguments(prog="nemo-rod curriculum")
    curriculum_command.declare(parser)
    return parser


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
    with path.open("rb") as file:
        return file.read(1 << 20) if path.stat().st_size < 1 << 30 else b""  # sparse


def read_metrics(root: Path) -> None:
    read_lines(root / "run/arms/rod/metrics.jsonl")
    training_progress(root / "run/arms/max.partial")


def read_report(root: Path) -> None:
    judged(read_run(root / "run"))


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


def read_records(root: Path) -> None:
    for file in (root / "run/launch/stages").glob("*.jsonl"):
        StageLog(root / "run", file.stem).events()
    queue.read_jobs(root / "run")


def merge(root: Path) -> None:
    out = root / "out"
    shutil.rmtree(out, ignore_errors=True)
    merge_checkpoints(root / "run/base/hf", root / "run/arms/no_replay/hf", out, 0.5)


def read_texts(kind: str, pattern: str, root: Path) -> None:
    spec = SourceSpec(name="x", role="replay", kind=kind, files=[str(root / "texts" / pattern)])
    for _ in Documents(spec):
        pass


READERS = {
    "block store": Reader(("run/blocks/**/*",), read_store, 14_000),
    "references": Reader(("run/references/*/*.npy", "run/references/*/manifest.json"),
                         read_references, 8_000),
    "unfinished references": Reader(("run/references/unfinished/*",), resume_references, 8_000,
                                    writes=True),
    "curricula": Reader(("run/arms/rod/curriculum.rod", "run/arms/rod/arm.json"),
                        read_curricula, 8_000),
    "followed curriculum": Reader(("run/arms/rod/curriculum.rod",), follow_curriculum, 4_000),
    "resumed training": Reader(("run/arms/max.partial/*",), resume_training, 6_000, writes=True),
    "resumed evaluation": Reader(("run/evaluation.partial/*",), resume_evaluation, 2_000,
                                 writes=True),
    "metrics": Reader(("run/arms/*/metrics.jsonl", "run/arms/max.partial/job.json"),
                      read_metrics, 12_000),
    "report": Reader(("run/arms/*/*.json*", "run/arms/*/*.npy", "run/arms/*/curriculum.rod",
                      "run/blocks/*/*/manifest.json"), read_report, 6_000),
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
                                     lambda root: read_launch(root / "run"), 500),
    "Hugging Face checkpoints": Reader(("run/*/hf/*", "run/arms/no_replay/hf/*"),
                                       merge, 3_000, writes=True),
    "jsonl": Reader(("texts/plain.jsonl",), partial(read_texts, "jsonl", "plain.jsonl"), 3_000),
    "jsonl.gz": Reader(("texts/packed.jsonl.gz",), partial(read_texts, "jsonl", "*.gz"), 2_000),
    "jsonl.zst": Reader(("texts/packed.jsonl.zst",), partial(read_texts, "jsonl", "*.jsonl.zst"),
                        2_000),
    "text": Reader(("texts/*.txt*",), partial(read_texts, "text", "*.txt*"), 3_000),
    "parquet": Reader(("texts/table.parquet",), partial(read_texts, "parquet", "*.parquet"), 2_000),
}  # fmt: skip


@pytest.fixture(scope="module")
def sandbox(made_run: Path) -> Sandbox:
    root = made_run.parent
    make_texts(root / "texts")
    (root / "victim").write_text('{"mine": 1}\n')
    return Sandbox(root)


@pytest.fixture(scope="module")
def counted() -> Iterator[dict[str, int]]:
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
def test_damaged_files_are_a_sentence(name: str, sandbox: Sandbox, counted: dict[str, int]) -> None:
    reader = READERS[name]
    files = sandbox.files(*reader.files)
    others = [content for content in sandbox.content.values() if content]
    assert not outcome(reader, sandbox, None), "the whole files are refused"

    @cases(int(os.environ.get("FUZZ_CASES", reader.cases)))
    @given(damages())
    def check(damage: Damage) -> None:
        path = files[damage.file % len(files)]
        content = sandbox.content[path]
        if damage.kind in HOSTILE:
            other = sandbox.root / "victim"
            sandbox.write(path, lambda: HOSTILE[damage.kind](path, other))
        else:
            sandbox.write(path, damaged(damage, content, others) if content else None)
        counted[name] = counted.get(name, 0) + 1
        try:
            wrong = outcome(reader, sandbox, path)
            assert not wrong, f"{path.relative_to(sandbox.root)} after {damage}: {wrong}"
        finally:
            sandbox.restore(path, *sandbox.changed())

    with limited():
        check()


def outcome(reader: Reader, sandbox: Sandbox, path: Path | None) -> str:
    """Runs a reader; returns what is wrong with how it ended, "" if nothing is."""
    try:
        with time_limit(SECONDS if path else 300), contextlib.redirect_stdout(io.StringIO()):
            reader.read(sandbox.root)
    except (ValueError, OSError) as error:
        sentence = " ".join(str(error).split())
        if path is None:
            return sentence
        named = {*path.relative_to(sandbox.root).parts} - {"run", "arms", "references"}
        if not any(part in sentence for part in named) or len(sentence) > SAYS_WHERE:
            return f"it says only {type(error).__name__}: {sentence[:SAYS_WHERE]}"
    except (Exception, Hangs) as error:
        frames = traceback.extract_tb(error.__traceback__)[-8:]
        places = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
        return "\n".join([f"{type(error).__name__}: {error}", *places])
    changed = sandbox.changed()
    if not reader.writes and path is not None and changed:
        return f"it changed {changed}"
    return ""
