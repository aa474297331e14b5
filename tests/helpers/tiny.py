"""A tiny setting made by the real stages, shared by the tests that train.

A Qwen3 of four layers learns a dialect of one Markov source while three sources are replay. The
store, the base, the specialist and both references are made once.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from places import WORKERS

from nemo_rod.config import (
    Checkpoint,
    Config,
    Domain,
    Launcher,
    Model,
    Optimisation,
    Parallel,
    Scoring,
    Validation,
)
from nemo_rod.corpus import BlockStore, SourceSpec, load_tokenizer, prepare
from nemo_rod.jobs import ModelJob, ReferenceJob, TrainJob, write_job
from nemo_rod.run.base_model import initialise_base
from nemo_rod.selection import Curriculum
from nemo_rod.selection.arms import Arm, make_arm
from nemo_rod.selection.held_out import Rule
from nemo_rod.selection.policies import reference_roles

STEPS, BATCH = 20, 8
LAYOUTS = {
    "single": Parallel(), "dp2": Parallel(data=2), "dp4": Parallel(data=4),
    "tp2": Parallel(tensor=2), "tp2_sp": Parallel(tensor=2, sequence=True),
    "pp2": Parallel(pipeline=2),
    "pp2_vpp2": Parallel(pipeline=2, virtual_pipeline=2), "tp2_pp2": Parallel(tensor=2, pipeline=2),
    "dp2_distopt": Parallel(data=2, distributed_optimizer=True),
    "tp2_dp2_distopt": Parallel(data=2, tensor=2, distributed_optimizer=True),
}  # fmt: skip
ARCHITECTURE = {
    "model_type": "qwen3", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
MOE_LAYOUTS = {
    "single": Parallel(),
    "dp2_ep2": Parallel(data=2, expert=2),
    "tp2_ep2": Parallel(tensor=2, expert=2, sequence=True),
}
MOE_ARCHITECTURE = {
    **ARCHITECTURE, "model_type": "qwen3_moe", "moe_intermediate_size": 32, "num_experts": 4,
    "num_experts_per_tok": 2, "norm_topk_prob": True,
}  # fmt: skip
WORKER = WORKERS / "jobs_worker.py"
Torchrun = Callable[..., list[str]]


def sources() -> list[SourceSpec]:
    def source(name: str, role: str, file: str, max_bytes: int) -> SourceSpec:
        return SourceSpec(name=name, role=role, kind="synthetic", files=[file], max_bytes=max_bytes)

    replay = [source(f"chain_{i}", "replay", f"markov:{i}", 20_000) for i in range(3)]
    return [source("dialect", "adaptation", "dialect:0:0.25", 30_000), *replay]


def prepare_beginning(root: Path) -> None:
    """Writes blocks of 64 tokens and an untrained model, for tests that train from it alone."""
    prepare(root / "blocks", sources(), tokenizer=load_tokenizer("byte"), block_size=64,
            holdout_fraction=0.1)  # fmt: skip
    initialise_base(ARCHITECTURE, root / "init", tokenizer="byte", seed=0)


def write_beginning(root: Path, name: str, train: dict[str, Any], arm: str, **keys: Any) -> Path:
    """Writes the job of an arm that trains from there to the folder of its name.

    `train` and `keys` are of its configuration; those of an arm that selects are in `selecting`.
    """
    store, selecting = BlockStore(root / "blocks"), keys.pop("selecting", {})
    config = configured(
        train=Optimisation(**{"batch_size": BATCH, "micro_batch_size": 2, **train}),
        **{"seed": 7, "scoring__micro_batch_size": 4, **keys},
    )
    made = make_arm(
        arm, num_adaptation=store.num_adaptation, num_replay=store.num_replay, batch_size=BATCH,
        seed=7, **selecting,
    )  # fmt: skip
    job = TrainJob(
        name=name, config=config, blocks=str(root / "blocks"), out=str(root / name),
        start=str(root / "init"), arm=made,
    )  # fmt: skip
    (root / name).mkdir(exist_ok=True)
    write_job(job, root / f"{name}.json")
    return root / f"{name}.json"


class Setting:
    """A store, a base, a specialist (the base after some steps) and both references.

    The base is made of an architecture and trained, or it is a checkpoint.
    """

    def __init__(
        self,
        root: Path,
        torchrun: Torchrun,
        model: dict[str, Any] | Path = ARCHITECTURE,
        precision: str = "fp32",
    ) -> None:
        self.root, self.torchrun, self.precision = root, torchrun, precision
        self._single: dict[str, list[Any]] = {}
        self.blocks = root / "blocks"
        prepare(
            self.blocks, sources(), tokenizer=load_tokenizer("byte"), block_size=64,
            holdout_fraction=0.1, holdout_seed=42,
        )  # fmt: skip
        self.store = BlockStore(self.blocks)
        if isinstance(model, Path):
            self.base, specialist_steps = model, 8
        else:
            initialise_base(model, root / "init", tokenizer="byte", seed=0)
            self.base = self.train("base", root / "init", steps=30, lr=1e-2) / "hf"
            specialist_steps = 30
        specialist = self.train("no_replay", self.base, steps=specialist_steps, lr=3e-3)
        self.specialist = specialist / "hf"
        self.references = [
            self.reference("specialist", self.specialist, "adaptation"),
            self.reference("base", self.base, "replay"),
        ]

    def arm(self, name: str, batch_size: int = BATCH, **scoring: Any) -> Arm:
        return make_arm(
            name, num_adaptation=self.store.num_adaptation, num_replay=self.store.num_replay,
            batch_size=batch_size, seed=7,
            **{"multiplier": 2, "balance": "expected", "kappa": 1.0, **scoring},
        )  # fmt: skip

    def train(self, name: str, model: Path, *, steps: int, lr: float) -> Path:
        out = self.root / name
        job = self._job(name, out, Parallel(), model=model, steps=steps, lr=lr, references=[])
        self.torchrun(1, "nemo_rod.megatron", job)
        return out

    def rod(self, layout: str, parallel: Parallel, *options: str, **scoring: Any) -> list[Any]:
        """Trains RoD in a layout; returns its records. Layout and scoring name the folder."""
        folder = self._folder(layout, scoring)
        job = self.rod_job(folder, parallel, scoring=scoring)
        self.torchrun(parallel.world_size, WORKER, job, *options, timeout=300)
        return list(Curriculum.open(folder / "curriculum.rod", read_only=True))

    def single(self, **scoring: Any) -> list[Any]:
        """The records of RoD in one process, which is trained once; see `weights`."""
        if (key := str(scoring)) not in self._single:
            option = f"--weights={self.weights(**scoring)}"
            self._single[key] = self.rod("single", Parallel(), option, **scoring)
        return self._single[key]

    def weights(self, **scoring: Any) -> Path:
        """The folder of the weights that the steps of `single` start from, each in its own."""
        return self._folder("weights", scoring)

    def _folder(self, name: str, scoring: dict[str, Any]) -> Path:
        return self.root / "_".join([name, *(f"{key}_{value}" for key, value in scoring.items())])

    def rod_job(
        self, out: Path, parallel: Parallel, *, arm: str = "rod", steps: int = STEPS, **options: Any
    ) -> Path:
        """Writes the job of a RoD run, or of another arm, with the references that it needs."""
        roles = reference_roles(self.arm(arm, **options.get("scoring", {})).needs)
        references = self.references[len(self.references) - len(roles) :]
        common = {"model": self.base, "steps": steps, "lr": 3e-3, "references": references}
        return self._job(arm, out, parallel, **{**common, **options})

    def rod_run(self, out: Path, parallel: Parallel, **options: Any) -> Path:
        """Trains the job of a RoD run in its layout."""
        job = self.rod_job(out, parallel, **options)
        self.torchrun(parallel.world_size, "nemo_rod.megatron", job)
        return out

    def reference(self, name: str, model: Path, role: str) -> Path:
        out, options = self.root / "references" / name, {"role": role, "model_digest": name}
        options["lengths"] = [64, 32, 16]
        job = self.write(ReferenceJob, name, out, start=str(model), **options)
        self.torchrun(1, "nemo_rod.megatron", job)
        return out

    def write(
        self,
        kind: type[ModelJob],
        name: str,
        out: Path,
        config: Config | None = None,
        **values: Any,
    ) -> Path:
        """Writes a job to its folder, by default of one process."""
        config = config or configured(model__precision=self.precision)
        values = {"blocks": str(self.blocks), "config": config, **values}
        out.mkdir(parents=True, exist_ok=True)
        job: Any = kind(name=name, out=str(out), **values)
        write_job(job, out / "job.json")
        return out / "job.json"

    def _job(
        self,
        arm: str,
        out: Path,
        parallel: Parallel,
        *,
        model: Path,
        steps: int,
        lr: float,
        references: list[Path],
        scoring: dict[str, Any] | None = None,
        convergence: Rule | None = None,
        batch_size: int = BATCH,
        **keys: Any,
    ) -> Path:
        """Writes a training job; `keys` are keys of its configuration, as in `configured`."""
        train = Optimisation(
            steps=steps, batch_size=batch_size, micro_batch_size=2, lr=lr, warmup_fraction=0.1
        )
        common = {"parallel": parallel, "seed": 7, "train": train, "scoring__micro_batch_size": 4}
        common["model__precision"] = self.precision
        return self.write(
            TrainJob, arm, out, configured(**{**common, **keys}), start=str(model),
            arm=self.arm(arm, batch_size, **(scoring or {})),
            references=[str(folder) for folder in references], convergence=convergence,
        )  # fmt: skip


def configured(**keys: Any) -> Config:
    """The configuration of a job: some keys, and SECTION__KEY for those of a section."""
    train = Optimisation(steps=1, batch_size=BATCH, micro_batch_size=2, lr=3e-3)
    config = Config(
        recipe="tiny", run_dir="nowhere", seed=0, model=Model(precision="fp32"),
        domain=Domain(tokenizer="byte", block_size=64), scoring=Scoring(micro_batch_size=BATCH),
        launcher=Launcher(stall_seconds=0), checkpoint=Checkpoint(every=10_000),
        validation=Validation(every=10, blocks=8), train=keys.pop("train", train),
    )  # fmt: skip
    for name, value in keys.items():
        section, _, key = name.rpartition("__")
        setattr(getattr(config, section) if section else config, key, value)
    return config


def printed(output: str) -> list[Any]:
    """The objects of JSON that a worker has printed, one a line."""
    return [json.loads(line) for line in output.splitlines() if line.startswith('{"')]


def metric(folder: Path, name: str) -> list[float]:
    """One metric of every step of a run."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)[name] for line in lines]
