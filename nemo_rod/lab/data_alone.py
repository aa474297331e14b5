"""A folder of somebody else, as data: consent is typed, and never read from the folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf

from nemo_rod import parts
from nemo_rod.files import flat, interpreting, read_bytes, read_json
from nemo_rod.lab.merging import Checkpoint
from nemo_rod.trust import UntrustedCodeError, is_secret

# of jobs alone, which a folder does not start: the programs, variables and files of their nodes
_OF_JOBS = re.compile(r"cluster\.(setup|python|env|image|mounts|(cpu_)?sbatch)|launcher\.nemo_rl")
# code by another name: definitions and options of lm-eval's, keys of NeMo-RL's, kernels of the hub
_CODE = re.compile(r"tasks\.(include|arguments)|nemo_rl|model\..*implementation\w*")
_MOST_EVENTS = 200_000  # YAML has about two a value
_DEEPEST = 64
_RESOLVED = re.compile(r"(?<!\\)(\\\\)*\$\{")  # a reference that OmegaConf would replace
# keys that name parts -> their kind, and what is left of their section for any that is not ours
_NAMES: dict[Any, tuple[str, dict[str, Any]]] = {
    "policy": ("policies", {}),
    "score": ("scores", {}),
    "kind": ("readers", {"kind": "text", "files": ["?"]}),
    "launcher.kind": ("launchers", {}),
}


def read_settings(file: Path) -> dict[str, Any]:
    """Reads the configuration of a launch, `RUN_DIR/launch/LAUNCHER/config.yaml`, as data.

    Raises:
        ValueError: the file is damaged, a link, or has anchors, which stand for any amount of
            values.
    """
    with interpreting(file):
        text = read_bytes(file, below=file.parents[2]).decode()
        depth = 0  # the time that PyYAML takes grows with its square
        for number, event in enumerate(yaml.parse(text, yaml.SafeLoader)):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or number > _MOST_EVENTS or depth > _DEEPEST:
                raise ValueError("it has aliases, or more values than a launch writes")
        # OmegaConf takes 1e-06 for a number, and YAML does not
        values = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
        if not isinstance(values, dict):
            raise ValueError("it holds no keys")
        return {str(key): value for key, value in values.items()}


def without_code(
    values: dict[str, Any], *, trusted: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Returns a folder's own configuration with nothing in it that runs code or reads secrets.

    Parts that a package or a file provides count only where the person at the keyboard, or the
    recipe of the command, names them; so do code beside a checkpoint and lines of the shell. Keys
    that would name them keep their defaults.

    Args:
        values: keys and values, as the file has them.
        trusted: whether this command lets the code beside a checkpoint run.

    Returns:
        The values, and what was left out and may be missed, as users type it.

    Raises:
        ValueError: a value refers to another, which a launch does not write.
    """
    left: list[str] = []

    def clean(value: Any, where: str) -> Any:
        if isinstance(value, str) and _RESOLVED.search(value):
            raise ValueError(f"{where} has the reference {value[:80]!r}")
        if isinstance(value, list):
            return [clean(item, where) for item in value]
        if not isinstance(value, dict):
            return value
        kept: dict[str, Any] = {}
        for key, item in value.items():
            place = f"{where}.{key}".removeprefix(".")
            kind, instead = _NAMES.get(place) or _NAMES.get(key) or ("", {})
            if isinstance(item, str) and kind and item not in _ours(kind):
                left.append(f"{place}={item}")
                return {"role": value.get("role"), **instead} if kind == "readers" else instead
            if place.endswith("train.terms") and isinstance(item, dict):
                left.extend(f"{place}.{term}" for term in item if term not in _ours("terms"))
                item = {term: item[term] for term in item if term in _ours("terms")}
            loggers = (item if isinstance(item, list) else [item]) if place == "logger" else []
            if key == "trust_remote_code":
                left.extend([place] if item and not trusted else [])
            elif _CODE.fullmatch(place):
                left.extend([place] if item else [])
            elif not {None, *_ours("loggers")}.issuperset(loggers):
                left.append(f"{place}={item}")
            elif not _OF_JOBS.fullmatch(place):
                kept[key] = clean(item, place)
        return kept

    return clean(values, ""), left


def without_secrets(values: Any, key: str = "") -> Any:
    """Returns a configuration to be shown, without the environment and the shell of its jobs."""
    if isinstance(value := values, dict):
        inner = {name: f"{key}.{name}".removeprefix(".") for name in value}
        return {
            name: without_secrets(value[name], place)
            for name, place in inner.items()
            if place not in ("cluster.env", "cluster.setup")
        }
    if isinstance(value, list):
        return [without_secrets(item, key) for item in value]
    return "(left out)" if is_secret(key, value) else value


def refuse_code(checkpoint: Path) -> None:
    """Refuses a checkpoint that asks for kernels of the hub, which are code.

    Raises:
        UntrustedCodeError: its `config.json` names such kernels.
    """
    for key, value in flat(read_json(checkpoint / "config.json")).items():
        if "implementation" in key and "/" in str(value):
            raise UntrustedCodeError(
                f"{checkpoint / 'config.json'} has {key}={value}, code of the "
                "hub that would run here: remove the key"
            )


def refuse_unlike_weights(checkpoint: Path) -> None:
    """Refuses a checkpoint that would take any time or memory to load.

    Raises:
        ValueError: its configuration has a far larger model than its weights, or these are none.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if odd := [path for path in checkpoint.iterdir() if not (path.is_file() or path.is_dir())]:
        raise ValueError(f"{odd[0]} is not a regular file, expected a file: remove it")
    with Checkpoint.open(checkpoint) as weights:
        tensors = len(weights.stored)
    file = checkpoint / "config.json"
    held = sum(shard.stat().st_size for shard in checkpoint.glob("*.safetensors"))
    values = flat(read_json(file))
    layers = [n for key, n in values.items() if re.search(r"\b(n|num)_(hidden_)?layers?$", key)]
    is_larger = any(isinstance(n, int) and n > tensors for n in layers)
    if not is_larger:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint))
        is_larger = sum(weight.numel() for weight in model.parameters()) > 4 * held
    if is_larger:
        raise ValueError(
            f"{file} describes a far larger model than the {tensors} tensors beside it: restore it "
            "from a copy"
        )


def _ours(kind: str) -> set[str]:
    return {*parts.HOUSE[kind], *parts.beside(kind), *parts.SHIPPED}
