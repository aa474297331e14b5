"""The configuration: every key, its type, its default and its meaning, in one place.

Hydra composes a recipe (`recipes/`) and the groups it names (`hydra_configs/`) into `Config`, and
refuses keys that are not here. A recipe holds only what differs from these defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING


@dataclass
class Parallel:
    """How one model is laid out over processes."""

    data: int = 1  # replicas of the model, each with its share of a batch
    tensor: int = 1  # processes that share every matrix
    pipeline: int = 1  # processes that share the layers
    context: int = 1  # processes that share every block's positions
    virtual_pipeline: int = 1  # runs of layers on every pipeline process (interleaved schedule)
    expert: int = 1  # processes that share a layer's experts; among those of data, tensor, context
    sequence: bool = False  # tensor-parallel processes split what lies between matrices, too
    distributed_optimizer: bool | None = None  # replicas share its state; null: where CUDA is

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return self.data * self.tensor * self.pipeline * self.context


@dataclass
class Optimisation:
    """Adam under a warm-up, stable, decay schedule (paper, appendix B.3)."""

    steps: int = MISSING  # updates
    batch_size: int = MISSING  # blocks trained on in one update (k)
    micro_batch_size: int = MISSING  # blocks in one forward-backward pass of one replica
    lr: float = MISSING  # peak learning rate
    min_lr_ratio: float = 0.1  # final learning rate / peak
    warmup_fraction: float = 0.05  # share of the steps with a linear warm-up
    decay_fraction: float = 0.3  # share of the steps with the final cosine decay
    adam_beta1: float = 0.9  # decay of the mean of gradients
    adam_beta2: float = 0.95  # decay of the mean of their squares
    adam_eps: float = 1e-8  # added to the root of the latter
    weight_decay: float = 0.1  # of matrices, apart from the gradient (AdamW)
    clip_grad: float = 1.0  # largest norm of the gradient


@dataclass
class Selection:
    """How the batch is chosen from the candidate pool."""

    multiplier: float = 2.0  # candidates per trained block (m)
    balance: str = "expected"  # "expected" as in the paper, or "exact" halves in every pool
    kappa: float = 1.0  # weight of the replay scores against the adaptation scores
    target_share: float | None = None  # steers kappa until this share of a batch is replay
    target_forgetting: float | None = None  # steers kappa to this F_val of held-out replay, nats
    gain: float = 0.1  # change of ln kappa for an error as large as the target: a step, or a look
    replay_score: str = "loss"  # of replay: "loss" less the base's, or "distillation" from the base
    on_nonfinite: str = "refuse"  # a score that is no number ends the run, or "exclude" its block


@dataclass
class Variant:
    """An arm that is another one but for what is set here: the paper's ablations, and more.

    `hydra_configs/variants/paper.yaml` names those of the paper; any recipe can train them.
    """

    of: str | None = None  # arm it varies, or a variant; null: the arm of this name itself
    steps: int | None = None  # updates; goes before budget and compute
    budget: float | None = None  # updates, in those of train.steps
    compute: float | None = None  # plain steps' worth of work, scoring included, in train.steps
    train: dict[str, Any] = field(default_factory=dict)  # keys of train with other values
    selection: dict[str, Any] = field(default_factory=dict)  # keys of selection with other values
    scoring: dict[str, Any] = field(default_factory=dict)  # keys of scoring with other values
    converge: bool | None = None  # end when the adaptation loss has converged; steps are the most
    retention: float | None = None  # share of the replay blocks kept, of fixed_<percent>
    share: Any = None  # constant share of replay in a batch, or the arm whose recorded mean it is
    adaptation: str | None = None  # with share: new blocks chosen at "random" (default) or by "rho"
    replay: str | None = None  # with share: the same of replay
    follow: str | None = None  # arm whose recorded counts it repeats, with blocks drawn at random
    follow_by: str | None = None  # counts of each "role" at a step (default), or of each "source"
    curriculum: str | None = None  # folder of a run, or of its arm, on whose batches it trains
    references: list[str] | None = None  # lowest of these counts: specialist, base, another run


@dataclass
class Scoring:
    """The forward-only pass over candidates, and over whole corpora."""

    micro_batch_size: int = MISSING  # blocks in one forward pass of one replica
    prefix: str = "1"  # share of a candidate that is scored, its beginning: 1, 1/2, 1/4 or 1/8
    every: int = 1  # steps between scoring passes, 0: only the first; else by averages of sources
    teacher_top_k: int = 16  # tokens of each prediction that distillation keeps; one for a run

    @property
    def eighths(self) -> int:
        """Of every candidate that are scored; the references have its loss in as many parts."""
        return PREFIXES[self.prefix]


PREFIXES = {"1": 8, "1/2": 4, "1/4": 2, "1/8": 1}  # scoring.prefix -> eighths of a block
MAX_LOGITS_BYTES = 250 * 2**20  # of fp32 logits that scoring holds at once on one rank


@dataclass
class Checkpoint:
    """When a training stage saves what it needs to go on after an interruption."""

    every: int = 200  # steps between checkpoints; the last step always saves
    keep: int = 2  # checkpoints kept


@dataclass
class Validation:
    """Held-out losses per source while an arm trains; the final evaluation uses all blocks."""

    every: int = 0  # steps between two looks; 0 for never
    blocks: int = 64  # held-out blocks looked at per source, at most


@dataclass
class Convergence:
    """When an arm with `converge` ends: its losses are those of `validation`."""

    tolerance: float = 0.002  # nats by which a loss must be below the best to be better
    patience: int = 3  # looks in a row that are not better
    decay_epochs: float = 0.5  # of the arm's own data with a decaying learning rate, afterwards


@dataclass
class Model:
    """Where the base model comes from: a Hugging Face checkpoint, or trained here from nothing."""

    hf: str | None = None  # name or folder of a Hugging Face checkpoint
    architecture: dict[str, Any] | None = None  # Hugging Face config of a model to train as base
    shape: dict[str, Any] | None = None  # Hugging Face config of `hf`, for `plan` without a network
    precision: str = "bf16"  # "bf16" or "fp32"


@dataclass
class Domain:
    """The corpora: what is new (adaptation) and what must not be forgotten (replay)."""

    tokenizer: str = MISSING  # "byte", or a Hugging Face name or folder
    block_size: int = 4096  # tokens per block (S)
    holdout_fraction: float = 0.01  # share of each source's blocks that is held out
    holdout_seed: int = 42  # which blocks those are
    workers: int = 1  # processes that read and tokenise
    sources: dict[str, Any] = field(default_factory=dict)  # name -> how to read it (SourceSpec)


@dataclass
class Cluster:
    """The machines that the slurm and ray launchers ask for, and how they ask."""

    gpu: str | None = None  # name of the GPU, such as B200; none: CPU processes
    gpus_per_node: int = 0  # also the processes that a job starts on a node
    gpu_memory_gib: float = 0.0  # of one GPU, as CUDA reports it; 0: not known, all layouts fit
    cpu_cores: int = 1  # of a node
    node_memory_gib: float = 0.0  # of a node
    account: str | None = None  # sbatch --account
    partition: str | None = None  # sbatch --partition
    qos: str | None = None  # sbatch --qos
    time: str = "4:00:00"  # limit of one job, HH:MM:SS or D-HH:MM:SS; in YAML in quotes
    gpu_option: str = "gpus-per-node"  # sbatch option that asks for GPUs, or "gres"
    exclusive: bool = True  # nodes to itself for a stage that uses all GPUs of its nodes
    cpu_partition: str | None = None  # of stages without GPU; none: the same partition
    cpu_stage_cores: int = 16  # of a stage without GPU; as many as domain.workers if that is more
    cpu_stage_memory_gib: int = 64  # of stages without GPU
    sbatch: dict[str, Any] = field(default_factory=dict)  # more options, of stages with GPUs
    cpu_sbatch: dict[str, Any] = field(default_factory=dict)  # and of stages without
    image: str | None = None  # container: a .sqsh file or a registry's address
    mounts: list[str] = field(default_factory=list)  # into the container, besides run_dir and cwd
    python: str | None = None  # that has nemo_rod; none: the image's python, or the submitting one
    setup: list[str] = field(default_factory=list)  # shell lines on every node before the command
    env: dict[str, str] = field(default_factory=dict)  # of every process: network, caches


@dataclass
class Launcher:
    """Where the stages run."""

    kind: str = "local"  # torchrun here, or "slurm", "ray", or "nemo_rl": its workers on Ray
    threads: int = 1  # OMP threads of each process
    stall_seconds: float = 1800.0  # time without progress after which a job is ended; 0 for never
    grace_seconds: int = 300  # time that a job has to save and stop when it is asked to
    requeues: int = 100  # times that a Slurm job may go back into the queue; then it fails
    nemo_rl: str | None = None  # NeMo-RL's checkout, whose ray.sub launcher=ray submits


@dataclass
class Tasks:
    """Benchmarks that every arm is asked through lm-eval, by capability (paper, appendix B.5).

    `tasks=paper` is the paper's list, `tasks=held_out` needs no network, `tasks=none` asks nothing.
    """

    capabilities: dict[str, list[str]] = field(default_factory=dict)  # names of lm-eval's tasks
    held_out: int = 0  # questions from the held-out blocks of each replay source; 0 for none
    backend: str = "hf"  # lm-eval's model: "hf", or "vllm"
    arguments: dict[str, Any] = field(default_factory=dict)  # of it, such as tensor_parallel_size
    batch_size: int = 16  # requests in one forward pass
    few_shot: int | None = None  # examples before a question; null: each task's own number
    limit: int | None = None  # questions of each task, at most, for trials; null: all
    seed: int = 1234  # of the choice of examples


@dataclass
class Report:
    """What the report shows beside this run. The folders are only read."""

    seeds: list[str] = field(default_factory=list)  # more runs of the recipe, with other seeds
    settings: list[str] = field(default_factory=list)  # runs of other recipes, drawn side by side


@dataclass
class Plan:
    """What `nemo-rod plan` takes for granted. All of it is estimate, so all of it is a key.

    What is null is taken from the processor's profile in nemo_rod/plan/speed.py, with its source.
    """

    adaptation_tokens: float | None = None  # of the corpus; null: counted, or the sources' caps
    replay_tokens: float | None = None  # the same of replay
    peak_tflops: float | None = None  # of one GPU in the model's precision, without sparsity
    utilisation: float | None = None  # share of the peak that training reaches
    backward: float | None = None  # time of a backward pass, in forward passes
    expert_imbalance: float = 1.5  # tokens of the busiest expert-parallel GPU, over the mean
    memory_reserve: float = 0.1  # share of GPU memory for CUDA, NCCL and fragmentation
    tokenise_rate: float = 450_000.0  # tokens that a core makes of text in a second
    read_rate: float = 100e6  # bytes of text that arrive in a second


@dataclass
class Config:
    """One recipe with everything a run needs."""

    recipe: str = MISSING  # its name
    run_dir: str = MISSING  # where all results go
    arms: list[str] = field(default_factory=list)  # the training runs to compare
    arm: str | None = None  # the one arm of a single-stage command
    variants: dict[str, Any] = field(default_factory=dict)  # name -> how it varies an arm (Variant)
    seed: int = 42  # of every draw of the stages that are run
    dry_run: bool = False  # show what would run, and stop
    rebuild: list[str] = field(default_factory=list)  # stages to do again although they are there
    parallel: Parallel = field(default_factory=Parallel)
    model: Model = field(default_factory=Model)
    domain: Domain = field(default_factory=Domain)
    pretrain: Optimisation | None = None  # how the base is trained, where the recipe makes one
    train: Optimisation = field(default_factory=Optimisation)
    selection: Selection = field(default_factory=Selection)
    scoring: Scoring = field(default_factory=Scoring)
    tasks: Tasks = field(default_factory=Tasks)
    report: Report = field(default_factory=Report)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    validation: Validation = field(default_factory=Validation)
    convergence: Convergence = field(default_factory=Convergence)
    launcher: Launcher = field(default_factory=Launcher)
    cluster: Cluster = field(default_factory=Cluster)
    plan: Plan = field(default_factory=Plan)
    nemo_rl: dict[str, Any] = field(default_factory=dict)  # its own keys, for launcher=nemo_rl


def config_folder() -> Path:
    """Folder of Hydra's groups: inside the installed package, or the checkout's own."""
    packaged = Path(__file__).parent / "_configs"
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / "hydra_configs"
