"""The configuration: every key, its type, its default and its meaning, in one place.

Hydra composes a recipe (`recipes/`) and the groups it names (`hydra_configs/`) into `Config`, and
refuses unknown keys. A recipe sets only what differs from these defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING


@dataclass
class Parallel:
    """The parallel layout of one model."""

    data: int = 1  # replicas of the model, each with its share of a batch
    tensor: int = 1  # processes that share every matrix
    pipeline: int = 1  # processes that share the layers
    context: int = 1  # processes that share the positions of every block
    virtual_pipeline: int = 1  # model chunks of each pipeline process (interleaved schedule)
    expert: int = 1  # processes that share a layer's experts, drawn from data x tensor x context
    sequence: bool = False  # sequence parallelism: activations between matrices are split, too
    distributed_optimizer: bool | None = None  # shard its state over replicas; null: only on CUDA

    @property
    def world_size(self) -> int:
        """Total number of processes."""
        return self.data * self.tensor * self.pipeline * self.context


@dataclass
class Optimisation:
    """Adam under a warm-up, stable, decay schedule (paper, appendix B.3)."""

    steps: int = MISSING  # number of updates
    batch_size: int = MISSING  # blocks per update (k)
    micro_batch_size: int = MISSING  # blocks per forward-backward pass of one replica
    lr: float = MISSING  # peak learning rate
    min_lr_ratio: float = 0.1  # final learning rate as a share of the peak
    warmup_fraction: float = 0.05  # share of the steps spent on linear warm-up
    decay_fraction: float = 0.3  # share of the steps spent on the final cosine decay
    adam_beta1: float = 0.9  # decay rate of the first moment
    adam_beta2: float = 0.95  # decay rate of the second moment
    adam_eps: float = 1e-8  # added to the root of the second moment
    weight_decay: float = 0.1  # decoupled weight decay of matrices (AdamW)
    clip_grad: float = 1.0  # maximum norm of the gradient


@dataclass
class Selection:
    """How the batch is chosen from the candidate pool."""

    multiplier: float = 2.0  # candidates per trained block (m)
    balance: str = "expected"  # "expected" as in the paper, or "exact" halves in every pool
    kappa: float = 1.0  # weight of the replay scores against the adaptation scores
    target_share: float | None = None  # steers kappa to this share of replay in a batch
    target_forgetting: float | None = None  # steers kappa to this F_val on held-out replay, nats
    gain: float = 0.1  # change of ln kappa per step or validation if the error equals the target
    replay_score: str = "loss"  # replay: "loss" minus the base's, or "distillation" from the base
    on_nonfinite: str = "refuse"  # non-finite score: "refuse" (end the run) or "exclude" the block


@dataclass
class Variant:
    """An arm derived from another one by the keys set here: the paper's ablations, and more.

    `hydra_configs/variants/paper.yaml` defines those of the paper; any recipe can train them.
    """

    of: str | None = None  # parent: an arm or a variant; null: the arm of the same name
    steps: int | None = None  # updates; overrides budget and compute
    budget: float | None = None  # updates as a multiple of train.steps
    compute: float | None = None  # total compute, scoring included, as a multiple of a plain run
    train: dict[str, Any] = field(default_factory=dict)  # overridden keys of train
    selection: dict[str, Any] = field(default_factory=dict)  # overridden keys of selection
    scoring: dict[str, Any] = field(default_factory=dict)  # overridden keys of scoring
    converge: bool | None = None  # stop once the adaptation loss has converged; steps is the limit
    retention: float | None = None  # share of the replay blocks kept by fixed_<percent>
    share: Any = None  # constant replay share of a batch, or the arm whose recorded mean is used
    adaptation: str | None = None  # with share: adaptation blocks by "random" (default) or "rho"
    replay: str | None = None  # with share: replay blocks by "random" (default) or "rho"
    follow: str | None = None  # arm whose recorded counts are repeated, with blocks drawn at random
    follow_by: str | None = None  # counts per step of each "role" (default) or of each "source"
    curriculum: str | None = None  # folder of a run, or of its arm, whose batches are trained on
    references: list[str] | None = None  # lowest loss counts: specialist, base, another run


@dataclass
class Scoring:
    """The forward-only pass over candidates, and over whole corpora."""

    micro_batch_size: int = MISSING  # blocks per forward pass of one replica
    prefix: str = "1"  # scored share of a candidate, from its start: 1, 1/2, 1/4 or 1/8
    every: int = 1  # steps between scoring passes (0: first only); source averages in between
    teacher_top_k: int = 16  # tokens kept per prediction for distillation; one value per run

    @property
    def eighths(self) -> int:
        """Eighths of every candidate that are scored; references store losses in eighths, too."""
        return PREFIXES[self.prefix]


PREFIXES = {"1": 8, "1/2": 4, "1/4": 2, "1/8": 1}  # scoring.prefix -> eighths of a block
MAX_LOGITS_BYTES = 250 * 2**20  # fp32 logits that scoring holds at once on one rank


@dataclass
class Checkpoint:
    """When a training stage saves its state for a later resume."""

    every: int = 200  # steps between checkpoints; the last step is always saved
    keep: int = 2  # number of checkpoints kept


@dataclass
class Validation:
    """Held-out losses per source while an arm trains; the final evaluation uses all blocks."""

    every: int = 0  # steps between validations; 0: never
    blocks: int = 64  # maximum number of held-out blocks per source


@dataclass
class Convergence:
    """When an arm with `converge` stops, judged by the losses of `validation`."""

    tolerance: float = 0.002  # decrease below the best loss that counts as an improvement, nats
    patience: int = 3  # consecutive validations without improvement
    decay_epochs: float = 0.5  # epochs of the arm's data in the learning-rate decay that follows


@dataclass
class Model:
    """Where the base model comes from: a Hugging Face checkpoint, or training from scratch."""

    hf: str | None = None  # name or folder of a Hugging Face checkpoint
    architecture: dict[str, Any] | None = None  # Hugging Face config of a base trained from scratch
    shape: dict[str, Any] | None = None  # Hugging Face config of `hf`, for `plan` without a network
    precision: str = "bf16"  # "bf16" or "fp32"


@dataclass
class Domain:
    """The corpora: the new domain (adaptation) and what must not be forgotten (replay)."""

    tokenizer: str = MISSING  # "byte", or the name or folder of a Hugging Face tokenizer
    block_size: int = 4096  # tokens per block (S)
    holdout_fraction: float = 0.01  # held-out share of each source's blocks
    holdout_seed: int = 42  # determines which blocks are held out
    workers: int = 1  # processes that read and tokenise
    sources: dict[str, Any] = field(default_factory=dict)  # name -> how to read it (SourceSpec)


@dataclass
class Cluster:
    """The resources that the slurm and ray launchers request, and how they request them."""

    gpu: str | None = None  # name of the GPU, such as B200; null: CPU processes
    gpus_per_node: int = 0  # GPUs of a node, and processes that a job starts on it
    gpu_memory_gib: float = 0.0  # memory of one GPU as CUDA reports it; 0: unknown, all layouts fit
    cpu_cores: int = 1  # CPU cores of a node
    node_memory_gib: float = 0.0  # memory of a node
    account: str | None = None  # sbatch --account
    partition: str | None = None  # sbatch --partition
    qos: str | None = None  # sbatch --qos
    time: str = "4:00:00"  # time limit of one job, HH:MM:SS or D-HH:MM:SS, quoted in YAML
    gpu_option: str = "gpus-per-node"  # sbatch option that requests GPUs: "gpus-per-node" or "gres"
    exclusive: bool = True  # exclusive nodes for stages that use all GPUs of a node
    cpu_partition: str | None = None  # partition of stages without GPUs; null: partition
    cpu_stage_cores: int = 16  # cores of a stage without GPUs; at least domain.workers for prepare
    cpu_stage_memory_gib: int = 64  # memory of a stage without GPUs
    sbatch: dict[str, Any] = field(default_factory=dict)  # sbatch options, stages with GPUs
    cpu_sbatch: dict[str, Any] = field(default_factory=dict)  # sbatch options, stages without GPUs
    image: str | None = None  # container image: a .sqsh file or a registry address
    mounts: list[str] = field(default_factory=list)  # container mounts besides run_dir and the cwd
    python: str | None = None  # Python with nemo_rod; null: the image's, or the submitting one
    setup: list[str] = field(default_factory=list)  # shell lines run on every node first
    env: dict[str, str] = field(default_factory=dict)  # process environment: network, caches


@dataclass
class Launcher:
    """How and where the stages run."""

    kind: str = "local"  # "local" (torchrun), "slurm", "ray", or "nemo_rl" (its workers on Ray)
    threads: int = 1  # OMP threads per process
    stall_seconds: float = 1800.0  # time without progress after which a job is ended; 0: never
    grace_seconds: int = 300  # time for a job to save and stop after a stop signal
    requeues: int = 100  # times that a Slurm job may be requeued before it fails
    nemo_rl: str | None = None  # NeMo-RL checkout whose ray.sub is submitted by launcher=ray


@dataclass
class Tasks:
    """Benchmarks that lm-eval runs on every arm, by capability (paper, appendix B.5).

    `tasks=paper` is the paper's list, `tasks=held_out` needs no network, `tasks=none` runs nothing.
    """

    capabilities: dict[str, list[str]] = field(default_factory=dict)  # capability -> lm-eval tasks
    held_out: int = 0  # questions from each replay source's held-out blocks; 0: none
    backend: str = "hf"  # model backend of lm-eval: "hf" or "vllm"
    arguments: dict[str, Any] = field(default_factory=dict)  # options, such as tensor_parallel_size
    batch_size: int = 16  # requests per forward pass
    few_shot: int | None = None  # examples before a question; null: the task's default
    limit: int | None = None  # maximum number of questions per task, for trials; null: all
    seed: int = 1234  # determines the choice of examples


@dataclass
class Report:
    """What the report shows beside this run. These folders are only read."""

    seeds: list[str] = field(default_factory=list)  # runs of the same recipe with other seeds
    settings: list[str] = field(default_factory=list)  # runs of other recipes, shown side by side


@dataclass
class Plan:
    """Assumptions of `nemo-rod plan`. All of them are estimates, so all of them are keys.

    A null value is taken from the processor's profile in nemo_rod/plan/speed.py, with its source.
    """

    adaptation_tokens: float | None = None  # corpus size in tokens; null: counted, or source caps
    replay_tokens: float | None = None  # corpus size in tokens; null: counted, or source caps
    peak_tflops: float | None = None  # peak TFLOP/s of one GPU in the model's precision, dense
    utilisation: float | None = None  # share of the peak that training reaches
    backward: float | None = None  # time of a backward pass, as a multiple of a forward pass
    expert_imbalance: float = 1.5  # tokens of the busiest expert-parallel GPU over the mean
    memory_reserve: float = 0.1  # share of GPU memory reserved for CUDA, NCCL and fragmentation
    tokenise_rate: float = 450_000.0  # tokens made of text per second and core
    read_rate: float = 100e6  # bytes of text read per second


@dataclass
class Config:
    """One recipe, with everything that a run needs."""

    recipe: str = MISSING  # name of the recipe
    run_dir: str = MISSING  # folder of all results
    arms: list[str] = field(default_factory=list)  # arms to compare
    arm: str | None = None  # arm of a single-stage command
    variants: dict[str, Any] = field(default_factory=dict)  # name -> derivation of an arm (Variant)
    seed: int = 42  # random seed of every stage that is run
    dry_run: bool = False  # print what would run, without running it
    rebuild: list[str] = field(default_factory=list)  # finished stages to run again
    parallel: Parallel = field(default_factory=Parallel)
    model: Model = field(default_factory=Model)
    domain: Domain = field(default_factory=Domain)
    pretrain: Optimisation | None = None  # training of the base, in recipes that train one
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
    nemo_rl: dict[str, Any] = field(default_factory=dict)  # keys of NeMo-RL, for launcher=nemo_rl


def config_folder() -> Path:
    """Returns the folder of Hydra's groups: the installed package's, or the checkout's."""
    packaged = Path(__file__).parent / "_configs"
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / "hydra_configs"
