"""Refuses recipes that would run code: a recipe is values, and may come from someone else.

Hydra imports and calls what a configuration names: callbacks, parts of logging, `_target_`. All of
that happens before a command sees its configuration, so it is looked at as soon as Hydra has
composed it. `cluster.setup` is shell on purpose, and `dry_run=true` shows it first. What Hydra
cannot compose, such as a key that does not exist, is refused in one sentence, too, even where Hydra
itself did not foresee it and would end with a traceback.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

ALLOW = "NEMO_ROD_ALLOW_CODE"  # in the environment: any value allows recipes to run code
_ALL_KEYS = "`nemo-rod run recipe=NAME --cfg job` prints all keys and their values"


@contextmanager
def values_only(refuse: Callable[[str], Any]) -> Iterator[None]:
    """Looks at every configuration that Hydra composes within the block.

    Args:
        refuse: called with a sentence about a configuration that would run code, or that Hydra
            cannot compose; does not return.
    """
    load, read = ConfigLoaderImpl.load_configuration, ConfigRepository.load_config

    def load_and_look(
        loader: ConfigLoaderImpl, config_name: str | None, overrides: list[str], **more: Any
    ) -> DictConfig:
        try:
            composed = load(loader, config_name, overrides, **more)
        except HydraException as error:  # Hydra itself would leave with status 1 and many lines
            refuse(in_one_sentence(error))
            raise
        except Exception as error:  # what Hydra did not foresee: it would print a traceback
            unforeseen = f"Hydra cannot compose the recipe ({_reason(error)}): {_ALL_KEYS}."
            refuse(_nameless(loader, overrides) or unforeseen)
            raise
        if ALLOW not in os.environ and (found := code_in(composed)):
            refuse(
                f"The recipe sets {found}, which can run code: remove it, or, if you have read "
                f"the recipe and trust it, set {ALLOW}=1."
            )
        return composed

    def read_by_name(repository: ConfigRepository, config_path: str) -> Any:
        try:
            return read(repository, config_path)
        except (HydraException, OmegaConfBaseException):
            raise
        except Exception as error:  # most name no file
            raise ConfigCompositionException(
                f"{config_path}.yaml is no configuration ({_reason(error)}): correct the file"
            ) from None

    ConfigLoaderImpl.load_configuration = load_and_look  # type: ignore[assignment, method-assign]
    ConfigRepository.load_config = read_by_name  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        ConfigLoaderImpl.load_configuration = load  # type: ignore[method-assign]
        ConfigRepository.load_config = read  # type: ignore[method-assign]


def _nameless(loader: ConfigLoaderImpl, overrides: list[str]) -> str:
    """Returns a sentence about the first override that has a value for a file's name, or ""."""
    for word in OverridesParser.create().parse_overrides(overrides):
        group, value = word.key_or_group, word.value()
        names = value if isinstance(value, list) else [value]
        named = isinstance(value, dict) or all(isinstance(name, str) for name in names)
        if not named and loader.repository.group_exists(group):
            return (
                f"{word.input_line} is a value where Hydra expects the name of a file: choose one "
                f"of {', '.join(loader.repository.get_group_options(group))}; a name of digits "
                f"needs quotes inside of quotes, \"{group}='1'\"."
            )
    return ""


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


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
        said += [cause, _ALL_KEYS]
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
        if hydra.get(part) not in (None, {}, *_shipped(part)):
            return f"hydra.{part}"
    return next((key for key, _ in _leaves(values, "") if key.endswith("_target_")), "")


def _shipped(part: str) -> list[Any]:
    """Returns Hydra's own configurations of logging.

    Any other is refused, since Python's `dictConfig` imports and calls what it names in many
    places: factories, classes of formatters, queues, streams, and files that it empties.
    """
    folder = files("hydra") / "conf" / "hydra" / part
    texts = [file.read_text("utf-8") for file in folder.iterdir() if file.name.endswith(".yaml")]
    return [OmegaConf.to_container(OmegaConf.create(text), resolve=False) for text in texts]


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
