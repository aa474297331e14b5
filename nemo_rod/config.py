"""The configuration: every key, its type, default, bound and meaning, in one place.

Hydra composes a recipe (`recipes/`) and the groups it names (`hydra_configs/`) into `Config`, and
refuses unknown keys. A recipe sets only what differs from these defaults.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, TypeVar

from omegaconf import MISSING

from nemo_rod import parts
from nemo_rod.bounds import Bound, key, name_bound, one_of, same
from nemo_rod.corpus.sources import SourceSpec, parse_sources
from nemo_rod.loggers import are_loggers
from nemo_rod.selection.arms import Arm

Part = TypeVar("Part")
# low-precision GEMM alignment: (tokens and weight rows, columns)
LOW_PRECISIONS = {"fp8": (8, 16), "mxfp8": (32, 32)}
MAX_LOGITS_BYTES = 512 * 2**20  # fp32 logits that scoring holds at once on one rank
# dense peak TFLOP/s by `cluster.gpu` and `model.precision`, of NVIDIA's data sheets (H100, H200 and
# A100: SXM; B200: DGX; B300: HGX) and white papers (RTX, with FP32 accumulation)
PEAK_TFLOPS = {
    "H100": {"bf16": 989.0, "fp32": 67.0},
    "H200": {"bf16": 989.0, "fp32": 67.0},
    "B200": {"bf16": 2250.0, "fp32": 75.0},
    "B300": {"bf16": 2250.0, "fp32": 75.0},
    "GH200": {"bf16": 989.0, "fp32": 67.0},
    "A100": {"bf16": 312.0, "fp32": 19.5},
    "L40S": {"bf16": 362.0, "fp32": 91.6},
    "RTX_4090": {"bf16": 165.2, "fp32": 82.6},
    "RTX_5090": {"bf16": 209.5, "fp32": 104.8},
}
TIME = Bound(
    "HH:MM:SS or D-HH:MM:SS, in YAML in quotes",
    lambda found: re.fullmatch(r"(\d+-)?\d{1,2}(:[0-5]\d){2}", found) is not None,
)
SHARE = Bound(
    "a share in [0, 1], or a trained arm",
    lambda found: isinstance(found, str) or (type(found) in (int, float) and 0 <= found <= 1),
)
LAUNCHER, POLICY, SCORE = map(name_bound, ("launchers", "policies", "scores"))
SHOWN = Bound(
    f"some of {', '.join(parts.names('loggers'))}, such as [tensorboard,wandb]",
    are_loggers,
    parts.names("loggers"),
)


@dataclass
class Parallel:
    """The parallel layout of one model."""

    data: int = key(1, ">= 1")  # replicas of the model, each with its share of a batch
    tensor: int = key(1, ">= 1")  # processes that share every matrix
    pipeline: int = key(1, ">= 1")  # processes that share the layers
    context: int = key(1, ">= 1")  # processes that share the positions of every block
    virtual_pipeline: int = key(1, ">= 1")  # model chunks of a pipeline process, interleaved
    expert: int = key(1, ">= 1")  # processes that share the experts, out of data x tensor x context
    sequence: bool = False  # sequence parallelism: activations between matrices are split, too
    distributed_optimizer: bool | None = None  # shard its state over replicas; null: only on CUDA

    @property
    def world_size(self) -> int:
        """Total number of processes."""
        return self.data * self.tensor * self.pipeline * self.context


@dataclass
class Optimisation:
    """Adam under a warm-up, stable, decay schedule (paper, appendix B.3)."""

    steps: int = key(MISSING, "in [1, 2**31)")  # number of updates
    batch_size: int = key(MISSING, ">= 1")  # blocks per update (k)
    micro_batch_size: int = key(MISSING, ">= 1")  # blocks per forward-backward pass of one replica
    lr: float = key(MISSING, "> 0")  # peak learning rate
    min_lr_ratio: float = key(0.1, "in [0, 1]")  # final learning rate as a share of the peak
    warmup_fraction: float = key(0.05, "in [0, 1)")  # share of the steps spent on linear warm-up
    warmup_steps: int | None = key(None, ">= 0")  # the same in steps; null: by warmup_fraction
    decay_fraction: float = key(0.3, "in [0, 1]")  # share of the steps spent on final cosine decay
    decay_steps: int | None = key(None, ">= 0")  # 0: no decay; null: decay_fraction says
    adam_beta1: float = key(0.9, "in [0, 1)")  # decay rate of the first moment
    adam_beta2: float = key(0.95, "in [0, 1)")  # decay rate of the second moment
    adam_eps: float = key(1e-8, "> 0")  # added to the root of the second moment
    weight_decay: float = key(0.1, ">= 0")  # decoupled weight decay of matrices (AdamW)
    clip_grad: float = key(1.0, ">= 0")  # maximum norm of the gradient; 0: no limit
    recompute: str = one_of("none", "selective", "full")  # activations recomputed: attention's, all
    grad_reduce: str = one_of("fp32", "bf16")  # dtype in which gradients are added up
    precision_aware_optimizer: bool = False  # TransformerEngine's Adam, on gradients as reduced
    optimizer_offload: bool = False  # its state and update on the host; needs the one above
    terms: dict[str, float] = field(default_factory=dict)  # beside the loss: part -> weight

    @property
    def warmup(self) -> int:
        """Steps of the linear warm-up, at most all but the last."""
        given = self.warmup_steps
        steps = round(self.warmup_fraction * self.steps) if given is None else given
        return min(steps, self.steps - 1)

    @property
    def decay(self) -> int:
        """Steps of the final cosine decay; in a run cut short, at most all."""
        given = self.decay_steps
        if given is not None:
            return min(given, self.steps)
        return max(1, round(self.decay_fraction * self.steps))


@dataclass
class Selection:
    """How the batch is chosen from the candidate pool."""

    multiplier: float = same(Arm, "multiplier")  # candidates per trained block (m)
    balance: str = one_of("expected", "exact")  # halves of a pool: in the mean (paper), or exactly
    kappa: float = key(1.0, ">= 0")  # weight of the replay scores against the adaptation scores
    policy: str = key(Arm.policy_name, POLICY)  # chooses the batch; also FILE.py:NAME
    policy_options: dict[str, Any] = field(default_factory=dict)  # arguments of another policy
    score: str = key(Arm.score_name, SCORE)  # turns losses and reference losses into scores
    on_nonfinite: str = one_of("refuse", "exclude")  # non-finite score: end the run or drop a block


@dataclass
class Variant:
    """An arm derived from another one by the keys set here: the paper's ablations, and more.

    `hydra_configs/variants/paper.yaml` defines those of the paper; any recipe can train them.
    """

    of: str | None = None  # parent: an arm or a variant; null: the arm of the same name
    steps: int | None = key(None, ">= 1")  # updates; overrides budget and compute
    budget: float | None = key(None, "> 0")  # updates as a multiple of train.steps
    compute: float | None = key(None, "> 0")  # total compute, scoring included, in plain runs
    at: int | None = key(None, ">= 1")  # saved step of the parent at which it branches off
    anneal: int | None = key(None, ">= 1")  # steps of a branch's final decay; null: the parent's
    train: dict[str, Any] = field(default_factory=dict)  # overridden keys of train
    selection: dict[str, Any] = field(default_factory=dict)  # overridden keys of selection
    scoring: dict[str, Any] = field(default_factory=dict)  # overridden keys of scoring
    converge: bool | None = None  # stop once the adaptation loss has converged; steps is the limit
    retention: float | None = key(None, "in (0, 1]")  # share of replay kept by fixed_<percent>
    share: Any = key(None, SHARE)  # constant replay share of a batch, or an arm whose mean is used
    adaptation: str | None = one_of(None, "random", "rho")  # policy for a fixed share; null: random
    replay: str | None = one_of(None, "random", "rho")  # policy for a fixed share; null: random
    follow: str | None = None  # arm whose recorded counts are repeated, with blocks drawn at random
    follow_by: str | None = one_of(None, "role", "source", "block")  # null: role; block: the same
    curriculum: str | None = None  # folder of a run, or of its arm, whose batches are trained on
    reference: str | None = None  # folder of a run whose specialist counts; null: this run's


@dataclass
class Scoring:
    """The forward-only pass over candidates, and over whole corpora."""

    micro_batch_size: int = key(MISSING, ">= 1")  # blocks per forward pass of one replica
    prefix: str = same(Arm, "prefix")  # scored share of a candidate, from its start
    precision: str | None = one_of(
        None, *LOW_PRECISIONS
    )  # precision of scoring and of references; null: the model's


@dataclass
class Checkpoint:
    """When a training stage saves its state for a later resume."""

    every: int = key(200, ">= 1")  # steps between checkpoints; the last step is always saved
    keep: int = key(2, ">= 1")  # number of checkpoints kept


@dataclass
class Validation:
    """Held-out losses per source while an arm trains; the final evaluation uses all blocks."""

    every: int = key(0, ">= 0")  # steps between validations, and at the end; 0: never
    blocks: int = key(64, ">= 1")  # maximum number of held-out blocks per source


@dataclass
class Convergence:
    """When an arm with `converge` stops, judged by the losses of `validation`."""

    tolerance: float = key(0.002, ">= 0")  # decrease of the best loss that is an improvement, nats
    patience: int = key(3, ">= 1")  # consecutive validations without improvement
    decay_epochs: float = key(0.5, "> 0")  # epochs of its data in the learning-rate decay after it


# keys of `model.provider`: how tokens reach experts, which affects speed alone
PROVIDER = (
    *("moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "moe_hybridep_num_sms"),
    *("moe_deepep_num_sms", "moe_router_fusion", "moe_permute_fusion", "moe_shared_expert_overlap"),
)
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}  # model.precision -> PyTorch's name of it


@dataclass
class Model:
    """Where the base model comes from: a Hugging Face checkpoint, or training from scratch."""

    hf: str | None = None  # Hugging Face checkpoint: its folder, name, or NAME@REVISION
    trust_remote_code: bool = False  # run the code that a checkpoint or tokenizer comes with
    special_tokens: str = one_of("same", "renamed")  # their names, against the blocks' tokenizer
    architecture: dict[str, Any] | None = None  # Hugging Face config of a base trained from scratch
    shape: dict[str, Any] | None = None  # Hugging Face config of `hf`, for `plan` without a network
    precision: str = one_of(*DTYPES)  # precision of training and scoring
    provider: dict[str, Any] = field(default_factory=dict)  # Megatron's settings, of `PROVIDER`


@dataclass
class Domain:
    """The corpora: the new domain (adaptation) and the data not to be forgotten (replay)."""

    tokenizer: str = MISSING  # "byte", or a tokenizer's folder, name, or NAME@REVISION
    eod: int | None = key(None, ">= 0")  # id that ends documents; null: the tokenizer's EOS
    block_size: int = key(4096, ">= 8")  # tokens per block (S)
    holdout_fraction: float = key(0.01, "in [0, 1)")  # held-out share of each source's blocks
    holdout_seed: int = key(42, "in [0, 2**128)")  # determines which blocks are held out
    holdout_floor: int | None = key(None, ">= 0")  # held-out blocks of a source at least; null: 1
    replay_ratio: float | None = key(None, "> 0")  # replay blocks at most, per adaptation block
    workers: int = key(1, ">= 1")  # processes that read and tokenise
    sources: dict[Any, Any] = field(default_factory=dict)  # name -> keys (`corpus.SourceSpec`)

    @functools.cached_property
    def specs(self) -> list[SourceSpec]:
        """The sources, parsed once: `sources` does not change afterwards.

        Raises:
            ValueError: there is no source, or one is not valid.
        """
        return parse_sources(self.sources, holdout_floor=self.holdout_floor)


@dataclass
class Cluster:
    """The resources that the slurm and ray launchers request, and how they request them."""

    gpu: str | None = None  # name of the GPU, such as B200; null: CPU processes
    gpus_per_node: int = key(0, ">= 0")  # GPUs of a node, and processes that a job starts on it
    gpu_memory_gib: float = key(0.0, ">= 0")  # one GPU's, by CUDA; 0: unknown, all layouts fit
    cpu_cores: int = key(1, ">= 1")  # CPU cores of a node
    node_memory_gib: float = key(0.0, ">= 0")  # memory of a node; 0: unknown
    account: str | None = None  # sbatch --account
    partition: str | None = None  # sbatch --partition
    qos: str | None = None  # sbatch --qos
    time: str = key("4:00:00", TIME)  # time limit of one job
    gpu_option: str = one_of("gpus-per-node", "gres")  # sbatch option that requests GPUs
    exclusive: bool = True  # exclusive nodes for stages that use all GPUs of a node
    cpu_partition: str | None = None  # partition of stages without GPUs; null: partition
    cpu_stage_cores: int = key(16, ">= 1")  # cores of CPU stages; prepare: at least domain.workers
    cpu_stage_memory_gib: int = key(64, ">= 1")  # memory of a stage without GPUs
    sbatch: dict[str, Any] = field(default_factory=dict)  # sbatch options, stages with GPUs
    cpu_sbatch: dict[str, Any] = field(default_factory=dict)  # sbatch options, stages without GPUs
    image: str | None = None  # container image: a .sqsh or .sif file, or a registry address
    container: str = one_of("pyxis", "apptainer")  # program that starts the image
    mounts: list[str] = field(default_factory=list)  # container mounts besides run_dir and the cwd
    python: str | None = None  # Python with nemo_rod; null: the image's, or the submitting one
    setup: list[str] = field(default_factory=list)  # shell lines run on every node first
    env: dict[str, str] = field(default_factory=dict)  # process environment: network, caches


@dataclass
class Launcher:
    """How and where the stages run."""

    kind: str = key("local", LAUNCHER)  # torchrun here, Slurm, NeMo-RL on Ray, or a registered one
    threads: int = key(1, ">= 1")  # OMP threads per process
    stall_seconds: float = key(1800.0, ">= 0")  # time without progress that ends a job; 0: never
    # sbatch --signal takes at most that
    grace_seconds: int = key(300, "in [1, 65535]")  # time to save and stop after a stop signal
    numa_binding: str | None = None  # torchrun --numa-binding: node, or null for none
    requeues: int = key(100, ">= 0")  # times that a Slurm job may be requeued before it fails
    nemo_rl: str | None = None  # NeMo-RL checkout whose ray.sub is submitted by launcher=ray


@dataclass
class Config:
    """One recipe, with everything that a run needs."""

    recipe: str = MISSING  # name of the recipe
    run_dir: str = MISSING  # folder of all results
    arms: list[str] = field(default_factory=list)  # arms to compare
    arm: str | None = None  # arm of a single-stage command
    step: int | None = key(None, ">= 1")  # saved step of `arm` to export, or to evaluate
    variants: dict[str, Any] = field(default_factory=dict)  # name -> derivation of an arm (Variant)
    # Megatron refuses 0, and adds to it by rank where NumPy ends at 2**32
    seed: int = key(42, "in [1, 2**31)")  # random seed of every stage that is run
    dry_run: bool = False  # print what would run, without running it
    rebuild: list[str] = field(default_factory=list)  # finished stages to run again
    parallel: Parallel = field(default_factory=Parallel)
    model: Model = field(default_factory=Model)
    domain: Domain = field(default_factory=Domain)
    pretrain: Optimisation | None = None  # training of the base, in recipes that train one
    train: Optimisation = field(default_factory=Optimisation)
    selection: Selection = field(default_factory=Selection)
    scoring: Scoring = field(default_factory=Scoring)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    validation: Validation = field(default_factory=Validation)
    logger: Any = key(None, SHOWN)  # loggers besides metrics.jsonl; null: none
    convergence: Convergence = field(default_factory=Convergence)
    launcher: Launcher = field(default_factory=Launcher)
    cluster: Cluster = field(default_factory=Cluster)


@functools.cache
def config_class() -> type[Config]:
    """Returns `Config` with the sections of all registered parts, each by its name.

    Raises:
        ValueError: a package's section cannot be imported, or has the name of a key of ours.
    """
    kinds = {name: parts.load("sections", name) for name in parts.names("sections")}
    for name in kinds.keys() & {known.name for known in fields(Config)}:
        raise ValueError(
            f"A package registers the section '{name}' of the configuration, which is taken: "
            "rename it there, or remove the package."
        )
    sections = [
        (name, dict[str, Any] if kind is dict else kind, field(default_factory=kind))
        for name, kind in kinds.items()
    ]
    return make_dataclass("Config", sections, bases=(Config,))


def section(config: Config, kind: type[Part]) -> Part:
    """Returns the section of a configuration that belongs to a part, by its class."""
    value = next(value for value in vars(config).values() if type(value) is kind)
    assert isinstance(value, kind)
    return value


def blamed_key(error: BaseException | None) -> str:
    """Returns the dotted key that an error of OmegaConf's, or its cause, is about; "" for none."""
    while error is not None:
        if key := getattr(error, "full_key", None):
            return str(key)
        error = error.__cause__ or error.__context__
    return ""
