"""The configuration of a NeMo-RL run: NeMo-RL's sections and our own, `rod`.

NeMo-RL's examples/configs/sft.yaml  <-  our rod.yaml  <-  a recipe  <-  key=value
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_rod.bounds import check_bounds, one_of, same
from nemo_rod.config import (
    Config,
    Domain,
    Launcher,
    Optimisation,
    Scoring,
    Selection,
    Validation,
    config_folder,
)
from nemo_rod.hosts.nemo_rl import compat


@dataclass
class RoD:
    """The `rod` section."""

    blocks: str = MISSING  # folder of the block store, visible to every node
    out: str = MISSING  # folder for curriculum.rod and metrics.jsonl, or for reference losses
    arm: str = "rod"  # arm to train: rod, no_replay, fixed_<percent> ...
    variant: dict[str, Any] | None = None  # pools and policy as our own recipes resolve them
    config_digest: str | None = None  # of the job's configuration; null: of the keys here
    references: list[str] = field(default_factory=list)  # folders of reference losses
    steps: int = same(Optimisation, "steps")  # number of updates
    warmup_fraction: float = same(Optimisation, "warmup_fraction")  # share of the steps
    decay_fraction: float = same(Optimisation, "decay_fraction")  # share of the steps
    warmup_steps: int | None = same(Optimisation, "warmup_steps")  # the same in steps
    decay_steps: int | None = same(Optimisation, "decay_steps")  # the same in steps
    seed: int = same(Config, "seed")  # seed of the candidate stream
    hf: bool = False  # whether to write a Hugging Face checkpoint to <out>/hf at the end
    role: str | None = one_of(None, "adaptation", "replay")  # role of the blocks to score
    tokenizer: str | None = None  # of the blocks; null: policy.tokenizer.name
    eod: int | None = same(Domain, "eod")  # id that ends documents; null: the tokenizer's EOS
    trust_remote_code: bool = False  # NeMo-RL runs code beside a checkpoint: true if you trust it
    wanted: str | None = None  # file of the blocks to score, bool [blocks of the store]; null: all
    lengths: list[int] = field(default_factory=list)  # tokens of scored prefixes, in references
    model_digest: str | None = None  # digest of the scored weights, for the references' manifest
    worker: str | None = MISSING  # full name of the Ray worker class
    stall_seconds: float = same(Launcher, "stall_seconds")  # without an answer
    selection: Selection = field(default_factory=Selection)
    scoring: Scoring = field(default_factory=Scoring)
    validation: Validation = field(default_factory=Validation)


SECTIONS = ("policy", "rod", "logger", "cluster", "checkpointing")
# keys of the optimizer that only save memory
SAVES_MEMORY = (
    "use_distributed_optimizer", "use_precision_aware_optimizer", "optimizer_cpu_offload",
    "optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d",
)  # fmt: skip


def load(recipe: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Reads a recipe as NeMo-RL reads its own; returns its checked sections, as plain values.

    The `defaults:` of the YAML file lists the paths of files it inherits from; overrides are
    assignments `key=value` in Hydra's grammar.

    Raises:
        ValueError: a value is not valid.
    """
    compat.check_supported()
    from nemo_rl.utils.config import OverridesError, load_config, parse_hydra_overrides

    if not Path(recipe).is_file():
        raise ValueError(f"There is no recipe {recipe}: give the path of a YAML file.")
    try:
        config = parse_hydra_overrides(_on_defaults(load_config(recipe)), list(overrides))
    except (OverridesError, OmegaConfBaseException) as error:
        raise ValueError(f"{recipe}: {error}") from None
    return resolve(config)


def compose(values: dict[str, Any]) -> dict[str, Any]:
    """Applies values composed by Hydra to the defaults; otherwise like `load`."""
    compat.check_supported()
    return resolve(_on_defaults(OmegaConf.create(values)))


def _on_defaults(config: DictConfig) -> DictConfig:
    """Merges NeMo-RL's defaults, ours, and a recipe, in this order."""
    from nemo_rl.utils.config import load_config, merge_with_override

    merged = load_config(compat.example_config())
    merged.rod = OmegaConf.structured(RoD)
    for layer in (load_config(config_folder() / "nemo_rl" / "rod.yaml"), config):
        try:
            merged = merge_with_override(merged, layer)
        except OmegaConfBaseException as error:
            sentence = " ".join(str(error).split())
            raise ValueError(sentence) from None
    return merged


def resolve(config: DictConfig) -> dict[str, Any]:
    """Resolves a merged tree to plain values, and checks them."""
    from nemo_rl.utils.config import register_omegaconf_resolvers

    register_omegaconf_resolvers()
    OmegaConf.register_new_resolver("rod_part", schedule_part, replace=True)
    try:
        resolved: dict[str, Any] = {
            name: OmegaConf.to_container(config[name], resolve=True, throw_on_missing=True)
            for name in SECTIONS
        }
    except OmegaConfBaseException as error:
        raise ValueError(
            f"{' '.join(str(error).split())}: set it in the recipe or on the command line."
        ) from None
    if resolved["policy"].get("generation") is None:
        resolved["policy"].pop("generation", None)  # NeMo-RL expects a section or no key
    check(resolved)
    compat.run_config(resolved)  # NeMo-RL's own validation
    return resolved


def schedule_part(name: str, given: int | None, share: float, steps: int) -> int:
    """Returns the steps of the "warmup" or the "decay", as our own recipes count them."""
    keys: dict[str, Any] = {f"{name}_steps": given, f"{name}_fraction": share}
    return int(getattr(Optimisation(steps=steps, **keys), name))


def check(config: dict[str, Any]) -> None:
    """Refuses, by a ValueError, settings that cannot run or would change the training."""
    policy, rod, cluster = config["policy"], config["rod"], config["cluster"]
    check_bounds(OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RoD), rod)), "rod.")
    megatron = policy["megatron_cfg"]
    context = megatron["context_parallel_size"]
    for valid, name, value, expected in (
        (rod["scoring"]["every"] == 1, "rod.scoring.every", rod["scoring"]["every"],
         "1: NeMo-RL's workers do not report the loss of each block in training"),
        (rod["scoring"]["precision"] is None, "rod.scoring.precision", rod["scoring"]["precision"],
         "null: NeMo-RL's workers score in the model's precision"),
        (megatron["enabled"], "policy.megatron_cfg.enabled", False,
         "true: workers of NeMo-RL's other backend cannot choose"),
        (rod["worker"], "rod.worker", rod["worker"], "a worker class with RoD's methods"),
        (not policy["sequence_packing"]["enabled"], "policy.sequence_packing.enabled", True,
         "false: it reorders blocks, and they are full already"),
        (not policy["dynamic_batching"]["enabled"], "policy.dynamic_batching.enabled", True,
         "false: it reorders blocks, and they have one length"),
        ("generation" not in policy, "policy.generation", "a section",
         "null: its temperature would scale the losses"),
        (context == 1, "context_parallel_size", context, "1: it splits the blocks to be scored"),
        *(
            (not megatron.get(key), f"policy.megatron_cfg.{key}", True,
             "false: it changes the output of the model's forward pass")
            for key in compat.FUSED_LOSS
        ),
    ):  # fmt: skip
        if not valid:
            raise ValueError(f"{name} is {value!r}: expected {expected}.")
    world = cluster["gpus_per_node"] * cluster["num_nodes"]
    size = megatron["tensor_model_parallel_size"] * megatron["pipeline_model_parallel_size"]
    if world % size:
        raise ValueError(
            f"cluster.num_nodes={cluster['num_nodes']} x gpus_per_node={cluster['gpus_per_node']} "
            f"is not a multiple of the {size} processes of one model: change the cluster or the "
            "tensor and pipeline sizes."
        )
    blocks, micro_batch_size = policy["train_global_batch_size"], policy["train_micro_batch_size"]
    replicas = world // size
    if blocks % (micro_batch_size * replicas):
        raise ValueError(
            f"policy.train_global_batch_size={blocks} does not divide into micro-batches: "
            f"policy.train_micro_batch_size={micro_batch_size} on {replicas} replicas needs a "
            f"multiple of {micro_batch_size * replicas}; change one of the three."
        )
