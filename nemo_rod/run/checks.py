"""Refuses a configuration that cannot run before anything starts, in one sentence."""

from __future__ import annotations

import functools
from fractions import Fraction
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from nemo_rod import parts
from nemo_rod.bounds import check_bounds
from nemo_rod.config import (
    LOW_PRECISIONS,
    PROVIDER,
    Config,
    Optimisation,
    Parallel,
    Scoring,
    config_class,
)
from nemo_rod.corpus.tokenizer import BYTE
from nemo_rod.installation import config_folder
from nemo_rod.layout import check_parallel, sequence_shares
from nemo_rod.loggers import check_installed, logger_names
from nemo_rod.roles import ROLES
from nemo_rod.run.launch import launcher_of
from nemo_rod.run.variants import (
    SPECIALIST,
    ArmSettings,
    add_registered_arms,
    arm_settings,
    trained_arms,
)
from nemo_rod.selection.competition import registered_metrics
from nemo_rod.selection.policies import reference_roles, waits_for_update
from nemo_rod.trust import REFERENCE, refuse_secrets

_AXES = {  # sizes of model.architecture -> axis of the layout that divides them
    "num_hidden_layers": "pipeline",
    "num_attention_heads": "tensor",
    "num_key_value_heads": "tensor",
    "intermediate_size": "tensor",
    "vocab_size": "tensor",
    "num_experts": "expert",
}


@functools.cache  # it takes a fifth of the time of composing
def declare_keys() -> None:
    """Gives Hydra all keys with their types and defaults, as the `schema` of config.yaml."""
    schema = OmegaConf.structured(config_class())
    with flag_override(schema, "struct", False):
        for name in OmegaConf.load(config_folder() / "sections.yaml"):
            if name not in schema:
                schema[name] = {}
    ConfigStore.instance().store(name="schema", node=schema)


def to_config(composed: DictConfig) -> Config:
    """Turns Hydra's composed tree into a `Config`; see `check`."""
    values = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(values, dict)
    refuse_secrets(values)
    if not isinstance(env := values["cluster"]["env"], dict):
        raise ValueError(f"cluster.env={env} is not valid: expected names and values, in braces.")
    # `${oc.env:NAME}` may be a secret: it is never resolved
    secrets = {str(key): text for key, text in env.items() if REFERENCE.fullmatch(str(text))}
    with flag_override(composed, ["struct", "readonly"], [False, False]):
        composed.cluster.env.update(dict.fromkeys(secrets, ""))
    missing: list[str] = []
    try:
        missing = sorted(OmegaConf.missing_keys(composed))
        # The only resolution: another would take the result of `\${...}` for a reference.
        config = OmegaConf.to_object(composed)
    except MissingMandatoryValue as error:
        missing = missing or [str(error.full_key)]
    except OmegaConfBaseException as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"Key '{error.full_key}' has a reference that cannot be resolved ({reason}): set the "
            "key in its ${...}, or write a value there."
        ) from error
    if missing:
        layouts = []
        if HydraConfig.initialized():  # the layouts of a large model have its micro-batches
            folder = config_folder() / "parallel" / str(HydraConfig.get().runtime.choices["model"])
            layouts = sorted(f"{folder.name}/{file.stem}" for file in folder.glob("*.yaml"))
        also = f", or choose parallel={' or '.join(layouts)}" if layouts else ""
        raise ValueError(
            f"Key '{missing[0]}' has no value: set it on the command line or in the recipe{also}."
        )
    assert isinstance(config, Config)
    check_bounds(config)  # what follows needs sections where references may have put others
    config.cluster.env |= secrets
    add_registered_arms(config)
    for value in vars(config).values():  # sections of other parts add what they stand for
        if hasattr(value, "complete"):
            value.complete(config)
    check(config)
    return config


def check(config: Config) -> None:
    """Refuses a configuration that cannot run.

    Raises:
        ValueError: a key is at fault; the message has its value, the accepted ones and the remedy.
    """
    check_bounds(config)
    run_dir, place = config.run_dir, Path(config.run_dir).absolute()
    if not run_dir.strip():
        raise ValueError("run_dir is empty: name the folder of the run, such as runs/toy.")
    if "$" in run_dir:  # single quotes keep it literal
        raise ValueError(
            f"run_dir={run_dir} has a variable that the shell did not replace: put the word in "
            "double quotes."
        )
    if files := [f for f in (place, *place.parents) if f.exists() and not f.is_dir()]:
        raise ValueError(f"run_dir={run_dir}: {files[0]} is a file, not a folder.")
    domain, parallel = config.domain, config.parallel
    check_parallel(parallel, ())
    roles = {spec.role for spec in domain.specs} if domain.sources else {*ROLES}
    known = (name := domain.tokenizer) == BYTE or Path(name).exists()
    if not known and parts.did_you_mean(name, [BYTE]):
        raise ValueError(f"domain.tokenizer={name} is no tokenizer: did you mean {BYTE}?")
    if not (domain.holdout_fraction or domain.holdout_floor):
        raise ValueError(
            "domain.holdout_fraction=0 leaves no block on which arms could be evaluated: set it to "
            "more than 0, such as 0.01, or set domain.holdout_floor."
        )
    _check_scoring("scoring", config.scoring, config)
    add_registered_arms(config)
    for value in vars(config).values():  # sections of other parts check themselves
        if hasattr(value, "check"):
            value.check()
    _check_optimisation("train", config.train, parallel)
    if config.pretrain is not None:
        _check_optimisation("pretrain", config.pretrain, parallel)
    _check_model(config)
    registered_metrics()
    if launcher_of(config).environment:
        check_installed(logger_names(config.logger))
    if len(names := {*config.arms, *config.variants}) > 500:
        raise ValueError(
            f"arms and variants are {len(names)}, expected at most 500: take some out."
        )
    if twice := [name for name in config.arms if config.arms.count(name) > 1]:
        raise ValueError(f"arms has {twice[0]} twice: name each arm once.")
    for name in dict.fromkeys([*config.arms, *config.variants]):
        _check_arm(config, name)
    if config.arm is None:
        trained = trained_arms(config)
    else:  # other commands train its prerequisites
        trained = [arm_settings(config, config.arm)] if config.arm != "base" else []
    trained += [arm_settings(config, "base")] if config.model.hf is None else []
    trains_on = {SPECIALIST: ROLES[:1], "base": ROLES[1:]}
    for arm in trained:
        if lacking := [role for role in trains_on.get(arm.of, ROLES) if role not in roles]:
            writes = " (kind=generated lets the base write replay), or take that arm out"
            cure = ", or name a base that is trained (model.hf)" if arm.name == "base" else writes
            reason = f"has no source with role={lacking[0]}, which {arm.name} trains on"
            raise ValueError(f"domain.sources {reason}: add one{cure}.")
        _check_trained(config, arm)


def _check_model(config: Config) -> None:
    """Refuses a base model that is named never or twice, or that the layout cannot divide."""
    model = config.model
    if (model.hf is None) == (model.architecture is None):
        raise ValueError(
            "The recipe must name its base model once: set model.hf to a Hugging Face checkpoint, "
            "or model.architecture (with pretrain) for a base that is trained here."
        )
    if unknown := sorted(model.provider.keys() - {*PROVIDER}):
        raise ValueError(
            f"model.provider.{unknown[0]} is not among the settings that leave the training as it "
            f"is: expected some of {', '.join(PROVIDER)}."
        )
    if model.architecture is not None:
        if config.pretrain is None:
            raise ValueError(
                "model.architecture is set without pretrain: set the schedule that trains the base."
            )
        sizes = {"num_experts": 1, **model.architecture}
        divided = [(axis, key, sizes[key]) for key, axis in _AXES.items() if key in sizes]
        for key, size in sizes.items():
            is_size = key in _AXES or key.endswith("_size")
            if is_size and (type(size) is not int or size < 0):
                raise ValueError(
                    f"model.architecture.{key}={size} is not valid: expected a whole number >= 0."
                )
        check_parallel(config.parallel, divided)


def _check_trained(config: Config, arm: ArmSettings) -> None:
    """Refuses an arm that the launcher, the layout or the validation of this run does not fit."""
    scoring, parallel = arm.scoring, config.parallel
    launcher_of(config).check_arm(arm, config)
    policy, needs = arm.planned_arm.policy(), arm.planned_arm.needs
    if hasattr(policy, "check_sources") and config.domain.sources:
        policy.check_sources(config.domain.specs)
    if arm.variant.converge and config.validation.every == 0:
        raise ValueError(
            f"validation.every=0 is not valid: expected >= 1, so that {arm.name} can converge."
        )
    if "held_out" in needs and config.validation.every == 0:
        raise ValueError(
            f"validation.every=0 is not valid: expected >= 1, as {arm.name} needs held-out losses."
        )
    if waits_for_update(policy) and reference_roles(needs):
        for key, default in (("precision", None), ("prefix", "1")):
            if (value := getattr(scoring, key)) != default:
                raise ValueError(
                    f"{arm.name} has scoring.{key}={value} and selection.policy="
                    f"{arm.selection.policy}, which compares losses of training with references, "
                    "of whole blocks and in its precision: set one of them."
                )
    if not arm.scores or scoring.precision is None:
        return
    multiple = (
        LOW_PRECISIONS[scoring.precision][0]
        * parallel.context
        * (parallel.tensor if parallel.sequence else 1)
    )
    tokens = arm.planned_arm.scored_length(config.domain.block_size)
    if tokens % multiple:
        raise ValueError(
            f"scoring.precision={scoring.precision} needs a multiple of {multiple} scored tokens "
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
    while (before := arm_settings(config, row[-1]).waits_for) is not None:
        if before in row or len(row) > 50:
            what = "itself" if before in row else "more than 50 arms"
            raise ValueError(f"variants.{name} waits for {what}: {' -> '.join([*row, before])}.")
        row.append(before)
        followed = arm_settings(config, before)
        if followed.kind != "trained":
            raise ValueError(f"variants.{row[-2]} follows {before}, which is not a trained arm.")
        if arm.trunk == before:
            _check_saved(f"variants.{name}", config, arm.variant.at or 0, followed)
        if followed.train.steps < arm.train.steps and arm.variant.follow:
            raise ValueError(
                f"variants.{name} has {arm.train.steps} steps, but follows {before} with "
                f"{followed.train.steps}: set variants.{name}.steps to that, or to fewer."
            )


def _check_saved(where: str, config: Config, at: int, trunk: ArmSettings) -> None:
    """Refuses a branch at a step of its trunk that is not saved or not kept."""
    every, keep = config.checkpoint.every, config.checkpoint.keep
    if not launcher_of(config).exports(trunk.name):
        raise ValueError(f"{where}.at={at} needs launcher=local or slurm: NeMo-RL has no branches.")
    if at % every:
        raise ValueError(
            f"{where}.at={at} is not saved, as checkpoint.every={every}: choose a multiple of it, "
            "or another checkpoint.every."
        )
    if (needed := -(-trunk.train.steps // every) - at // every + 1) > keep:
        raise ValueError(
            f"{where}.at={at} is not kept, as checkpoint.keep={keep}: set checkpoint.keep={needed}."
        )


def _check_scoring(where: str, scoring: Scoring, config: Config) -> None:
    parallel, block_size = config.parallel, config.domain.block_size
    length, shares = int(block_size * Fraction(scoring.prefix)), sequence_shares(parallel)
    if length % shares:
        raise ValueError(
            f"{where}.prefix={scoring.prefix} leaves {length} tokens of domain.block_size="
            f"{block_size}, which this layout cannot divide: parallel.context={parallel.context} "
            f"and parallel.tensor={parallel.tensor} with sequence={str(parallel.sequence).lower()} "
            f"need a multiple of {shares}; choose a longer prefix or another layout."
        )


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
    for term, weight in value.terms.items():
        parts.load("terms", term, key=f"{name}.terms")
        if weight <= 0:
            raise ValueError(f"{name}.terms.{term}={weight} is not valid: expected > 0.")
    rounds = value.batch_size // share
    if parallel.virtual_pipeline > 1 and rounds % parallel.pipeline:
        raise ValueError(
            f"parallel.virtual_pipeline={parallel.virtual_pipeline} needs a number of micro-"
            f"batches per replica that parallel.pipeline={parallel.pipeline} divides, but "
            f"{name}.batch_size={value.batch_size} makes {rounds}: change one of them."
        )
