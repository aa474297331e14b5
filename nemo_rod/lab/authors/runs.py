"""The authors' configurations as a recipe: an arm for each of their runs.

    configs/default.yaml, configs/experiments/<setting>/<run>.yaml ... -> recipe/<name>.yaml

The recipe inherits the model, the data and the machine of one of ours. Their scheduler counts pools
where selection is on: its steps are multiplied by m = pool / k.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_rod.files import flat, write_whole
from nemo_rod.lab.composing import composed

_ADAM = "policy.megatron_cfg.optimizer"
# key of theirs -> ours, of the same meaning and unit
_SAME = {
    "sft.seed": "seed",
    "sft.val_period": "validation.every",
    "data_mixer.max_val_samples_per_origin": "validation.blocks",
    "checkpointing.save_period": "checkpoint.every",
    "checkpointing.keep_top_k": "checkpoint.keep",
    "policy.logprob_batch_size": "scoring.micro_batch_size",
    "policy.max_total_sequence_length": "domain.block_size",
    "policy.train_micro_batch_size": "train.micro_batch_size",
    "policy.max_grad_norm": "train.clip_grad",
    f"{_ADAM}.lr": "train.lr",
    f"{_ADAM}.weight_decay": "train.weight_decay",
    f"{_ADAM}.adam_beta1": "train.adam_beta1",
    f"{_ADAM}.adam_beta2": "train.adam_beta2",
    f"{_ADAM}.adam_eps": "train.adam_eps",
    f"{_ADAM}.use_precision_aware_optimizer": "train.precision_aware_optimizer",
    f"{_ADAM}.optimizer_cpu_offload": "train.optimizer_offload",
}
_STEPS, _SCHEDULE = "sft.max_num_steps", "policy.megatron_cfg.scheduler"
_POOL, _BATCH = "policy.train_global_batch_size", "rod.top_k"
_REDUCE = "policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32"
_RECOMPUTE = "policy.megatron_cfg.activation_checkpointing"
# all else that the import reads
_READ = {
    *_SAME, _STEPS, _POOL, _BATCH, _REDUCE, _RECOMPUTE, "rod.enable_selection",
    "rod.selection_strategy", "rod.fixed_replay_ratio", "rod.curriculum_trace_dirs",
    "data_mixer.replay_share", f"{_ADAM}.min_lr",
    *(f"{_SCHEDULE}.lr_{key}" for key in ("warmup_iters", "wsd_decay_iters", "decay_iters")),
    *(f"{_SCHEDULE}.lr_{key}" for key in ("decay_style", "wsd_decay_style")),
}  # fmt: skip
_ABLATIONS = {  # their strategy -> the arm, and how it chooses of adaptation and replay
    "fixed_ratio": ("random_random", "random", "random"),
    "replay_only_rho": ("random_rho", "random", "rho"),
    "fixed_ratio_rho": ("rho_rho", "rho", "rho"),
}


def import_runs(
    default: Path, runs: Sequence[Path], out: Path, *, recipe: str, curriculum: str | None
) -> tuple[list[str], list[str]]:
    """Writes a recipe.

    Args:
        default: their configs/default.yaml, which every run is merged onto.
        runs: the files of runs of one setting.
        out: file of the recipe, in a folder named recipe.
        recipe: recipe of ours to inherit from.
        curriculum: folder of the run whose curriculum a transfer trains on.

    Returns:
        The arms, and the settings of the runs that have no counterpart.

    Raises:
        ValueError: a file is none of theirs, or has a value that no key of ours has; nothing is
            written.
    """
    if out.suffix != ".yaml" or out.parent.name != "recipe":
        raise ValueError(f"{out} is no file of a recipe: name it FOLDER/recipe/NAME.yaml")
    if out.exists():
        raise ValueError(f"{out} exists: choose another name, or remove it")
    common: dict[str, Any] = {}
    variants: dict[str, Any] = {}
    unused: set[str] = set()
    for file in runs:
        values = _values(default, file)
        name, arm = _arm(file, values, curriculum)
        if name in variants:
            raise ValueError(f"{file} is the arm {name}, as is a file before it: import it alone")
        settings = dict(_settings(file, values))
        common = common or settings
        for key, value in settings.items():
            if common.get(key) == value:
                continue
            section, _, inner = key.rpartition(".")
            if section not in ("train", "selection", "scoring"):
                unused.add(f"{key}={value} of {file.name}, as {runs[0].name} has {common.get(key)}")
                continue
            arm.setdefault(section, {})[inner] = value
        if "steps" in arm.get("train", {}):
            arm["steps"] = arm["train"].pop("steps")
        variants[name] = {key: value for key, value in arm.items() if value != {}}
        mine = flat(_load(file))
        unused |= {f"{key}={mine[key]}" for key in mine if key not in _READ}
    made = OmegaConf.create({"defaults": [recipe, "_self_"], "arms": ["base", *variants]})
    for key, value in common.items():
        OmegaConf.update(made, key, value)
    made.variants = variants
    text = f"# @package _global_\n# Imported from {', '.join(file.name for file in runs)}\n"
    write_whole(out, (text + OmegaConf.to_yaml(made)).encode())
    try:
        composed(f"recipe={out.stem}", folder=out.parent.parent)
    except BaseException:
        out.unlink()
        raise
    return ["base", *variants], sorted(unused)


def _load(file: Path) -> dict[str, Any]:
    try:
        loaded = OmegaConf.load(file)
    except Exception as error:  # of YAML, or of the file system
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{file} cannot be read ({reason}): name a YAML file of theirs") from error
    if not isinstance(loaded, DictConfig) or not {"sft", "policy"} & {*loaded}:
        raise ValueError(f"{file} has no section sft or policy: name a configuration of a run")
    loaded.pop("defaults", None)  # of NeMo-RL, in the container
    values = OmegaConf.to_container(loaded)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _values(default: Path, file: Path) -> dict[str, Any]:
    """Returns the values of a run by their dotted keys; of an environment, if it is set here."""
    merged = OmegaConf.merge(OmegaConf.create(_load(default)), OmegaConf.create(_load(file)))
    values = {}
    for key in _READ:
        try:
            values[key] = OmegaConf.select(merged, key)
        except Exception as error:  # an interpolation of a missing key
            raise ValueError(f"{file}: {key} cannot be resolved ({error}): set it there") from error
    for key in (_STEPS, _POOL, _BATCH, f"{_ADAM}.lr"):
        if values[key] is None:
            raise ValueError(f"{file} and {default} have no {key}: name configs/default.yaml first")
    return values


def _settings(file: Path, values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the keys of ours and their values."""
    for theirs, ours in _SAME.items():
        if values[theirs] is not None:
            yield ours, values[theirs]
    pool, selects = int(values[_POOL]), bool(values["rod.enable_selection"])
    batch = int(values[_BATCH]) if selects else pool
    multiplier = pool / batch
    yield "train.steps", int(values[_STEPS])
    yield "train.batch_size", batch
    if selects:
        yield "selection.multiplier", multiplier
    least = values[f"{_ADAM}.min_lr"] or 0.0
    yield "train.min_lr_ratio", round(least / values[f"{_ADAM}.lr"], 9)
    styles = [values[f"{_SCHEDULE}.lr_{key}"] for key in ("decay_style", "wsd_decay_style")]
    if styles != ["WSD", "cosine"]:
        raise ValueError(
            f"{file}: the learning rate decays by {styles[0]} and {styles[1]}, and here by WSD and "
            "cosine alone: correct lr_decay_style and lr_wsd_decay_style"
        )
    for theirs, ours in (("warmup_iters", "warmup_steps"), ("wsd_decay_iters", "decay_steps")):
        yield f"train.{ours}", round(values[f"{_SCHEDULE}.lr_{theirs}"] * multiplier)
    yield "train.grad_reduce", "fp32" if values[_REDUCE] in (None, True) else "bf16"
    yield "train.recompute", "full" if values[_RECOMPUTE] else "none"


def _arm(file: Path, values: dict[str, Any], curriculum: str | None) -> tuple[str, dict[str, Any]]:
    """Returns the name of a run's arm, and the keys of its variant besides those of sections."""
    if not values[_STEPS]:
        raise ValueError(
            f"{file} trains for 0 steps: leave it out, arms such as merge_0.4 are merged here"
        )
    share, strategy = values["data_mixer.replay_share"], values["rod.selection_strategy"]
    if values["rod.enable_selection"]:
        if strategy in (None, "top_k"):
            multiplier = values[_POOL] / values[_BATCH]
            suffix = re.fullmatch(r"rod-(m[\d.]+|beyond)", file.stem)
            return (f"rod_m{multiplier:g}", {"of": "rod"}) if suffix else ("rod", {})
        if strategy not in _ABLATIONS:
            raise ValueError(
                f"{file}: rod.selection_strategy={strategy} is unknown: expected top_k, "
                f"{', '.join(_ABLATIONS)}"
            )
        name, adaptation, replay = _ABLATIONS[strategy]
        ratio = values["rod.fixed_replay_ratio"]
        return name, {"of": "rod", "share": ratio, "adaptation": adaptation, "replay": replay}
    if values["rod.curriculum_trace_dirs"]:
        if curriculum is None:
            raise ValueError(
                f"{file} trains on a recorded stream: import its trace (nemo-rod import "
                "curriculum), and give the folder of the arm that it lies in as curriculum="
            )
        return "rod_transfer", {"of": "rod", "curriculum": curriculum}
    if not share:
        return "no_replay", {}
    if file.stem.startswith("max-replay"):
        return "max_replay", {}
    percent = re.match(r"fixed-replay-(\d+)", file.stem)
    name = f"fixed_{percent[1] if percent else round(100 * share / (1 + share))}"
    if file.stem.endswith("-long"):
        return f"{name}_long", {"of": name, "retention": share}
    return name, {"retention": share}
