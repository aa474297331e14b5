"""Refuses a configuration that cannot run before anything starts, in one sentence."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from nemo_rod import parts
from nemo_rod.bounds import check_bounds
from nemo_rod.config import REFERENCE, Config, Optimisation, Parallel, Scoring
from nemo_rod.loggers import SECRETS, check_installed, logger_names
from nemo_rod.run.launch import launcher_of
from nemo_rod.run.variants import ArmSettings, arm_settings, trained_arms
from nemo_rod.selection.arms import registered_policy


def to_config(composed: DictConfig) -> Config:
    """Turns Hydra's composed tree into a `Config`; see `check`."""
    secrets = _without_references(composed)
    try:
        missing = sorted(OmegaConf.missing_keys(composed))
        OmegaConf.resolve(composed)
    except OmegaConfBaseException as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"Key '{error.full_key}' has no value that can be found ({reason}): set what its "
            "${...} refers to, or write a value there."
        ) from error
    if missing:
        raise ValueError(
            f"Key '{missing[0]}' has no value: set it on the command line or in the recipe."
        )
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    config.cluster.env |= secrets
    check(config)
    return config


def _without_references(composed: DictConfig) -> dict[str, str]:
    """Takes `${oc.env:NAME}`, secrets that are never resolved, out of `cluster.env`, as written."""
    env = OmegaConf.to_container(composed.cluster.env, resolve=False)
    assert isinstance(env, dict)
    found = {str(key): value for key, value in env.items() if REFERENCE.fullmatch(str(value))}
    with flag_override(composed, ["struct", "readonly"], [False, False]):
        for key in found:
            composed.cluster.env[key] = ""
    return found


def check(config: Config) -> None:
    """Refuses a configuration that cannot run.

    Raises:
        ValueError: naming the key, what was found, what was expected and what to do.
    """
    check_bounds(config)
    parallel, block_size = config.parallel, config.domain.block_size
    _check_parallel(parallel)
    if config.domain.sources:
        _ = config.domain.specs  # refuses sources that make no sense
    if block_size % (8 * parallel.context):
        raise ValueError(
            f"domain.block_size={block_size} is not valid: expected a multiple of 8, for the 8 "
            "partial sums of each block's loss, times parallel.context."
        )
    if not (config.domain.holdout_fraction or config.domain.holdout_floor):
        raise ValueError(
            "domain.holdout_fraction=0 leaves no block on which arms could be evaluated: set it to "
            "more than 0, such as 0.01, or set domain.holdout_floor."
        )
    _check_scoring("scoring", config.scoring, config)
    for value in vars(config).values():  # sections of other parts check themselves
        if hasattr(value, "check"):
            value.check()
    _check_optimisation("train", config.train, parallel)
    if config.pretrain is not None:
        _check_optimisation("pretrain", config.pretrain, parallel)
    _check_base(config)
    _check_loggers(config)
    for name in dict.fromkeys([*config.arms, *config.variants]):
        _check_arm(config, name)
    if config.arm is None:
        trained = trained_arms(config)
    else:  # other commands train what it needs
        trained = [arm_settings(config, config.arm)] if config.arm != "base" else []
    for arm in trained:
        _check_trained(config, arm)


def _check_base(config: Config) -> None:
    """Refuses a recipe without a base model, with two, or with one that cannot be built."""
    if (config.model.hf is None) == (config.model.architecture is None):
        raise ValueError(
            "The recipe must name its base model once: set model.hf to a Hugging Face checkpoint, "
            "or model.architecture (with pretrain) for a base that is trained here."
        )
    if config.model.architecture is not None and config.pretrain is None:
        raise ValueError("model.architecture is set without pretrain: say how the base is trained.")
    if config.model.architecture is not None:
        _check_architecture(config.model.architecture, config.parallel)


def _check_loggers(config: Config) -> None:
    """Refuses a logger that this environment lacks, and an account's secret in a file."""
    if launcher_of(config).environment:
        check_installed(logger_names(config.logger))
    for name in SECRETS:
        if name in config.cluster.env:
            raise ValueError(
                f"cluster.env.{name} would be written to the run's folder: leave it out and export "
                "it in the shell, or read it from a file of yours in a line of cluster.setup."
            )


def _check_trained(config: Config, arm: ArmSettings) -> None:
    """Refuses an arm of this run that its launcher, or its validation, cannot serve."""
    name, every = arm.name, config.validation.every
    launcher_of(config).check_arm(arm)
    if arm.scores and arm.variant.share is None:
        chosen = arm.selection
        registered_policy(chosen.policy, chosen.policy_options, kappa=chosen.kappa)
        parts.load("scores", chosen.score, key="selection.score")
    if arm.scores and arm.scoring.precision is not None:
        _check_low_precision(name, arm, config)
    if arm.variant.converge and every == 0:
        raise ValueError(
            f"validation.every=0 is not valid: expected >= 1, so that {name} can converge."
        )


def _check_low_precision(name: str, arm: ArmSettings, config: Config) -> None:
    """Refuses to score an arm in a precision that its layout, or its scores, do not have."""
    scoring, parallel = arm.scoring, config.parallel
    if scoring.every != 1:
        raise ValueError(
            f"{name} has scoring.precision={scoring.precision} and scoring.every={scoring.every}, "
            "which compares losses of training with references of another precision: set one of "
            "them."
        )
    ranks = parallel.context * (parallel.tensor if parallel.sequence else 1)
    tokens = config.domain.block_size * scoring.eighths // 8
    if tokens % (8 * ranks):
        raise ValueError(
            f"scoring.precision={scoring.precision} needs a multiple of {8 * ranks} scored tokens "
            f"per block in this layout, found {tokens}: choose a longer scoring.prefix or "
            "domain.block_size, or leave scoring.precision unset."
        )


def _check_arm(config: Config, name: str) -> None:
    """Refuses an arm that does not exist, or a variant that cannot be trained."""
    arm = arm_settings(config, name)
    if name not in config.variants:
        return
    _check_optimisation(f"variants.{name}.train", arm.train, config.parallel)
    _check_scoring(f"variants.{name}.scoring", arm.scoring, config)
    if arm.scoring.precision != config.scoring.precision:
        raise ValueError(
            f"variants.{name}.scoring.precision={arm.scoring.precision} is not valid: a run has "
            "references of one precision; set scoring.precision for all its arms."
        )
    row = [name]
    while (before := arm_settings(config, row[-1]).recorded_by) is not None:
        if before in row:
            raise ValueError(f"variants.{name} waits for itself: {' -> '.join([*row, before])}.")
        row.append(before)
        followed = arm_settings(config, before)
        if followed.kind != "trained":
            raise ValueError(f"variants.{row[-2]} follows {before}, which is not a trained arm.")
        if followed.train.steps < arm.train.steps and arm.variant.follow:
            raise ValueError(
                f"variants.{name} has {arm.train.steps} steps, but follows {before} with "
                f"{followed.train.steps}: set variants.{name}.steps to that, or to fewer."
            )


def _check_scoring(where: str, value: Scoring, config: Config) -> None:
    if value.every != 1 and value.prefix != "1":
        raise ValueError(
            f"{where} sets every={value.every} and prefix={value.prefix}: set one of them, since "
            "averages by source are of whole blocks."
        )
    parallel, block_size = config.parallel, config.domain.block_size
    # context parallelism needs pairs of runs of positions, sequence parallelism one run per rank
    shares = (2 * parallel.context if parallel.context > 1 else 1) * (
        parallel.tensor if parallel.sequence else 1
    )
    length = block_size * value.eighths // 8
    if value.eighths < 8 and length % shares:
        raise ValueError(
            f"{where}.prefix={value.prefix} leaves {length} tokens of domain.block_size="
            f"{block_size}, which this layout cannot share out: parallel.context="
            f"{parallel.context} and parallel.tensor={parallel.tensor} with sequence="
            f"{str(parallel.sequence).lower()} need a multiple of {shares}; choose a longer prefix "
            "or another layout."
        )


def _check_parallel(parallel: Parallel) -> None:
    sharing = parallel.data * parallel.tensor * parallel.context
    for wrong, keys, why in (
        (parallel.virtual_pipeline > 1 and parallel.pipeline == 1,
         f"virtual_pipeline={parallel.virtual_pipeline}", "needs parallel.pipeline > 1"),
        (parallel.sequence and parallel.tensor == 1, "sequence=true", "needs parallel.tensor > 1"),
        (sharing % parallel.expert, f"expert={parallel.expert}",
         f"must divide data x tensor x context = {sharing}"),
        (parallel.expert > 1 and parallel.tensor > 1 and not parallel.sequence,
         f"expert={parallel.expert}", "with parallel.tensor > 1 needs parallel.sequence=true"),
    ):  # fmt: skip
        if wrong:
            raise ValueError(f"parallel.{keys} {why}: choose another parallel layout.")


def _check_optimisation(name: str, value: Optimisation, parallel: Parallel) -> None:
    share = value.micro_batch_size * parallel.data
    if value.batch_size % share:
        raise ValueError(
            f"{name}.batch_size={value.batch_size} does not divide into micro-batches: "
            f"{name}.micro_batch_size={value.micro_batch_size} on parallel.data={parallel.data} "
            f"replicas needs a multiple of {share}; change one of the three."
        )
    if value.optimizer_offload and not value.precision_aware_optimizer:
        raise ValueError(
            f"{name}.optimizer_offload=true needs {name}.precision_aware_optimizer=true, as "
            "Megatron updates nothing else on the host: set both, or neither."
        )
    rounds = value.batch_size // share
    if parallel.virtual_pipeline > 1 and rounds % parallel.pipeline:
        raise ValueError(
            f"parallel.virtual_pipeline={parallel.virtual_pipeline} needs a number of micro-"
            f"batches per replica that parallel.pipeline={parallel.pipeline} divides, but "
            f"{name}.batch_size={value.batch_size} makes {rounds}: change one of them."
        )


def _check_architecture(architecture: dict[str, Any], parallel: Parallel) -> None:
    """Refuses a layout that does not divide the model, and sizes that are no numbers."""
    architecture = {"num_experts": 1, **architecture}
    stages = parallel.pipeline * parallel.virtual_pipeline
    axis = "pipeline" if parallel.virtual_pipeline == 1 else "pipeline x virtual_pipeline"
    rules = {
        "num_hidden_layers": (axis, stages),
        "num_attention_heads": ("tensor", parallel.tensor),
        "num_key_value_heads": ("tensor", parallel.tensor),
        "intermediate_size": ("tensor", parallel.tensor),
        "vocab_size": ("tensor", parallel.tensor),
        "num_experts": ("expert", parallel.expert),
    }
    for key, (axis, size) in rules.items():
        value = architecture.get(key, size)
        if type(value) is not int or value < 0:
            raise ValueError(
                f"model.architecture.{key}={value} is not valid: expected a whole number >= 0."
            )
        if value % size:
            raise ValueError(
                f"parallel.{axis}={size} does not divide the model: {key}={value} "
                f"must be a multiple of it; choose another parallel layout."
            )
