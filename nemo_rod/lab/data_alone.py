"""A folder of somebody else, as data: consent is typed, and never read from the folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from nemo_rod import parts
from nemo_rod.files import flat, interpreting, read_bytes, read_json
from nemo_rod.trust import REFERENCE, UntrustedCodeError, is_secret

_RESOLVED = re.compile(r"(?<!\\)(\\\\)*\$\{")  # a reference that OmegaConf would replace
# keys that name parts -> their kind, and what is left of their section for any that is not ours
_NAMES: dict[Any, tuple[str, dict[str, Any]]] = {
    "policy": ("policies", {}),
    "score": ("scores", {}),
    "kind": ("readers", {"kind": "text", "files": ["?"]}),
    "launcher.kind": ("launchers", {}),
}


def read_settings(file: Path) -> dict[str, Any]:
    """Reads a configuration that a folder holds, as data.

    Raises:
        ValueError: the file is damaged, or has anchors, which may stand for any amount of values.
    """
    with interpreting(file):
        text = read_bytes(file).decode()
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise ValueError("it has aliases")
        values = yaml.safe_load(text)
        if not isinstance(values, dict):
            raise ValueError("it holds no keys")
        return values


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
            if where.startswith("cluster.env.") and REFERENCE.fullmatch(value):
                return value
            raise ValueError(f"{where} has the reference {value[:80]!r}")
        if isinstance(value, list):
            return [clean(item, where) for item in value]
        if not isinstance(value, dict):
            return value
        kept: dict[str, Any] = {}
        for key, item in value.items():
            place = f"{where}.{key}".removeprefix(".")
            if place.startswith("cluster.env.") and is_secret(place, item):
                continue  # of an earlier version
            kind, instead = _NAMES.get(place) or _NAMES.get(key) or ("", {})
            if isinstance(item, str) and kind and item not in _ours(kind):
                left.append(f"{place}={item}")
                return {"role": value.get("role"), **instead} if kind == "readers" else instead
            loggers = (item if isinstance(item, list) else [item]) if place == "logger" else []
            if key == "trust_remote_code":
                left.extend([place] if item and not trusted else [])
            elif not {None, *_ours("loggers")}.issuperset(loggers):
                left.append(f"{place}={item}")
            elif place not in ("cluster.setup", "cluster.python"):  # for jobs alone
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


def _ours(kind: str) -> set[str]:
    return {*parts.HOUSE[kind], *parts.beside(kind)}
