"""A whole run folder in a second: every stage is the real one, only what trains is made up.

The losses are random numbers, the weights a few zeros; all files are written by the code that
writes them in a real run, so that their readers can be given damaged ones by the ten thousands.
"""

import gzip
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
from command_line import composed
from corpus_cases import texts, write

from nemo_rod.commands import run_stages
from nemo_rod.config import Config
from nemo_rod.corpus import BlockStore
from nemo_rod.jobs import EvaluateJob, Job, ReferenceJob, TrainJob, write_job
from nemo_rod.lab.merging import merge_checkpoints
from nemo_rod.run import base_model
from nemo_rod.run.launch.render import write_files
from nemo_rod.run.launch.slurm import Slurm
from nemo_rod.run.model_jobs import ModelJobs
from nemo_rod.run.stages import Stages
from nemo_rod.selection import References, ReferenceWriter, Selector
from nemo_rod.selection.arms import curriculum_header
from nemo_rod.selection.curriculum.journal import Journal
from nemo_rod.selection.references.folder import role_manifest

RECIPE = (
    *("recipe=toy_synthetic", "arms=[base,no_replay,fixed_32,merge_0.6,rod]"),
    "domain.sources.dialect.max_bytes=6000",
    *(f"domain.sources.chain_{number}.max_bytes=5000" for number in range(2)),
    *(f"~domain.sources.chain_{number}" for number in range(2, 9)),
    *("domain.block_size=16", "domain.holdout_fraction=0.1"),
    *("pretrain.steps=4", "pretrain.batch_size=8", "pretrain.micro_batch_size=4"),
    *("train.steps=6", "train.batch_size=8", "train.micro_batch_size=4", "checkpoint.every=2"),
)
ON_A_CLUSTER = (
    *("launcher=slurm", "cluster.gpu=B200", "cluster.gpus_per_node=2", "cluster.partition=work"),
)

MEASURED_WITH = {"model.precision": "fp32"}  # of the interrupted evaluation


def recipe(run_dir: Path, *more: str) -> Config:
    """The configuration of the made-up run."""
    return composed(*RECIPE, f"run_dir={run_dir}", *more)


def make_run(run_dir: Path) -> None:
    """Makes a finished run, what a second launch of it on Slurm left, and interrupted stages."""
    with made_up_training():
        run_stages.run(recipe(run_dir))
    config = recipe(run_dir, *ON_A_CLUSTER)
    stages = Stages(config).all()
    write_files(run_dir / "launch" / "slurm", Slurm().render(config, stages))
    jobs = [f"{stage.name}\t{101 + number}\n" for number, stage in enumerate(stages)]
    (run_dir / "launch" / "slurm" / "jobs.tsv").write_text("".join(jobs))
    interrupted = Path(shutil.copytree(run_dir / "arms" / "rod", run_dir / "arms" / "max.partial"))
    for name in ("manifest.json", "arm.json", "evaluation.json", "held_out_losses.npy"):
        (interrupted / name).unlink()
    shutil.copy(run_dir / "arms" / "rod" / "manifest.json", interrupted / "inputs.json")
    measured = run_dir / "evaluation.partial"
    measured.mkdir()
    shutil.copy(run_dir / "arms" / "rod" / "evaluation.json", measured / "rod.json")
    (measured / ".inputs.json").write_text(json.dumps({"rod": MEASURED_WITH}))
    unfinished = run_dir / "references" / "unfinished"
    _write_references(run_dir / "blocks", unfinished, "replay", "x")


def make_texts(folder: Path) -> None:
    """Makes the same few documents in every format that a source may have."""
    import pyarrow
    import pyarrow.parquet
    import zstandard

    documents = texts(40, 1)
    plain = write(folder / "plain.jsonl", documents).read_bytes()
    (folder / "packed.jsonl.gz").write_bytes(gzip.compress(plain, mtime=0))
    (folder / "packed.jsonl.zst").write_bytes(zstandard.compress(plain))
    (folder / "plain.txt").write_text("\n".join(documents))
    (folder / "packed.txt.zst").write_bytes(zstandard.compress("\n".join(documents).encode()))
    table = pyarrow.table({"text": documents, "language": ["de"] * len(documents)})
    pyarrow.parquet.write_table(table, folder / "table.parquet", row_group_size=16)


@contextmanager
def made_up_training() -> Iterator[None]:
    with (
        patch.object(ModelJobs, "run", _run),
        patch.object(base_model, "initialise_base", lambda *_, **__: None),
        patch.object(base_model, "check_tokenizer", lambda *_, **__: None),
        patch("nemo_rod.lab.merge.merge_checkpoints", _merge),
    ):
        yield


def _run(jobs: ModelJobs, job: Job, folder: Path) -> None:
    write_job(job, folder / "job.json")
    log = jobs.results.log(job.name)
    log.parent.mkdir(exist_ok=True)
    log.write_text("progress: made up  1/1\n")
    if isinstance(job, TrainJob):
        _train(job, folder)
    elif isinstance(job, ReferenceJob):
        _write_references(
            jobs.results.blocks, folder, job.role, job.model_digest, np.load(job.wanted)
        ).close()
    else:
        _evaluate(job, folder)


def _train(job: TrainJob, folder: Path) -> None:
    arm, store = job.arm, BlockStore(job.blocks)
    references = References.open(job.references, store) if job.references else None
    selector = Selector.for_arm(arm, store, references)
    journal = Journal(
        folder, curriculum_header(arm, store, references, config=job.config_digest), step=0
    )
    timing = {"timing/train/total": 0.5, "timing/train/update": 0.25}
    timing["throughput/model_tflops_per_gpu"] = 0.01
    for step in range(job.config.train.steps):
        choice = selector.choose(step, _Random(step))
        journal.begin(choice)
        journal.append(step, choice, {"train/loss": 2.0, "train/lr": 1e-3, **timing})
    _write_weights(folder / "hf", float(len(arm.name)))


def _write_weights(folder: Path, value: float) -> None:
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 256}))
    tensors = {"a.weight": np.full((4, 3), value, "f4"), "b.bias": np.full(5, value, "f4")}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _merge(base: Path, adapted: Path, out: Path, lam: float, **options) -> None:
    if options["origin"]:  # the real one: its weights are added up, not made up
        return merge_checkpoints(base, adapted, out, lam, **options)
    _write_weights(Path(out), lam)


def _write_references(
    blocks: Path, folder: Path, role: str, model: str, required: np.ndarray | None = None
) -> ReferenceWriter:
    store = BlockStore(blocks)
    lengths = [store.block_size]
    manifest = role_manifest(store, role, model=model, lengths=lengths, precision="fp32")
    if required is not None:
        required = required[manifest.start : manifest.stop]
    writer = ReferenceWriter(folder, manifest, store.hashes, required)
    ids = writer.missing
    writer.append(ids, _Random(7).losses(ids)[:, None])
    return writer


def _evaluate(job: EvaluateJob, folder: Path) -> None:
    store = BlockStore(job.blocks, "holdout")
    for number, name in enumerate(job.models):
        result: dict[str, dict] = {"loss": {}, "blocks": {}}
        for source in store.sources:
            loss = 2.0 + number / 10 + source.start / 100
            result["loss"].setdefault(source.role, {})[source.name] = loss
            result["blocks"].setdefault(source.role, {})[source.name] = source.count
        losses = [2.0 + number / 10 + s.start / 100 for s in store.sources for _ in range(s.count)]
        np.save(folder / f"{name}.npy", np.array(losses, dtype=np.float32))
        (folder / f"{name}.json").write_text(json.dumps(result))


class _Random:
    """Scores of no model."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def losses(self, block_ids: np.ndarray) -> np.ndarray:
        return self.random.random(len(block_ids), dtype=np.float32) * 4
