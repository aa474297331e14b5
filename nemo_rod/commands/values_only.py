"""Refuses recipes that would run code: a recipe is values, and may come from someone else.

Hydra imports and calls what a configuration names: callbacks, factories of log handlers,
`_target_`. All of that happens before a command sees its configuration, so it is looked at as soon
as Hydra has composed it. `cluster.setup` is shell on purpose, and `dry_run=true` shows it first.
What Hydra cannot compose, such as a key that does not exist, is refused in one sentence, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

ALLOW = "NEMO_ROD_ALLOW_CODE"  # in the environment: any value allows recipes to run code


@contextmanager
def values_only(refuse: Callable[[str], Any]) -> Iterator[None]:
    """Looks at every configuration that Hydra composes within the block.

    Args:
        refuse: called with a sentence about a configuration that would run code, or that Hydra
            cannot compose; does not return.
    """
    load = ConfigLoaderImpl.load_configuration

    def load_and_look(*args: Any, **kwargs: Any) -> DictConfig:
        try:
            composed = load(*args, **kwargs)
        except HydraException as error:  # Hydra itself would leave with status 1 and many lines
            refuse(in_one_sentence(error))
            raise
        if ALLOW not in os.environ and (found := code_in(composed)):
            refuse(
                f"The recipe sets {found}, which would run code: remove it, or, if you have read "
                f"the recipe and trust it, set {ALLOW}=1."
            )
        return composed

    ConfigLoaderImpl.load_configuration = load_and_look  # type: ignore[method-assign]
    try:
        yield
    finally:
        ConfigLoaderImpl.load_configuration = load  # type: ignore[method-assign]


def in_one_sentence(error: HydraException) -> str:
    """Returns what Hydra says of a configuration that it cannot compose, its options included."""
    text = str(error).partition("\nConfig search path:")[0]
    lines = [line for line in text.splitlines() if line.strip()]
    options = [line.strip() for line in lines if line.startswith("\t")]
    said = [line.strip().rstrip(".:") for line in lines if not line.startswith("\t")]
    cause = str(error.__cause__ or "").partition("\n")[0].rstrip(".")
    if cause:
        if not cause.endswith("not in struct"):  # Hydra's "+KEY=VALUE" works in dictionaries alone
            del said[1:]
        said += [cause, "`nemo-rod run recipe=NAME --cfg job` prints all keys and their values"]
    return "; ".join(said) + (f": {', '.join(options)}." if options else ".")


def code_in(composed: DictConfig) -> str:
    """Returns the first key of a composed configuration that would run code; "" if none does."""
    values: Any = OmegaConf.to_container(composed, resolve=False)
    hydra = values.pop("hydra", {})
    if hydra.get("callbacks"):
        return "hydra.callbacks"
    if (hydra.get("job") or {}).get("env_set"):
        return "hydra.job.env_set"
    for part in ("job_logging", "hydra_logging"):
        for key, value in _leaves(hydra.get(part), f"hydra.{part}"):
            name = key.rpartition(".")[2]
            if name == "()" or (name == "class" and not str(value).startswith("logging.")):
                return key
    return next((key for key, _ in _leaves(values, "") if key.endswith("_target_")), "")


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yields all values inside of dictionaries and lists, with their dotted keys."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{key}.{number}")
    else:
        yield key, value
