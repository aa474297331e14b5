"""Command lines in Hydra's grammar: from words to a checked `Config`, and a command on it."""

from __future__ import annotations

import os
import sys
import traceback
from codecs import BOM_UTF8
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from nemo_rod import parts
from nemo_rod.commands.errors import errors_in_one_sentence, leave
from nemo_rod.commands.run_stages import on_all_nodes, one_stage
from nemo_rod.config import Config, blamed_key, config_class, config_folder, former_key
from nemo_rod.run.checks import to_config

_ALL_KEYS = "`nemo-rod run recipe=NAME --cfg job` prints all keys and their values"


def run_recipe(command: str, words: Sequence[str]) -> None:
    """Composes the recipe that the words describe and carries out a command on it.

    Raises:
        SystemExit: after one sentence on standard error, if the words or the recipe are invalid.
        ValueError: if the command is registered by a package that cannot provide it.
    """
    _check_grammar(words)
    action: Callable[[Config], None] = partial(one_stage, command)
    if command in parts.names("recipe_commands"):
        action = parts.load("recipe_commands", command)

    def task(composed: DictConfig) -> None:
        try:
            with errors_in_one_sentence():
                config = to_config(composed)
                if not config.run_dir.strip():
                    raise ValueError("run_dir is empty: name the folder of the run: runs/toy, say.")
                job = HydraConfig.get()
                has_own = any(word.startswith("run_dir=") for word in job.overrides.task)
                if job.mode == RunMode.MULTIRUN and not has_own:  # a folder for each job of a sweep
                    config.run_dir = str(Path(config.run_dir) / job.job.override_dirname)
                on_all_nodes(action, config)
        except Exception:  # a bug of nemo-rod
            traceback.print_exc()
            raise SystemExit(1) from None

    sys.argv = [f"nemo-rod {command}", *words]
    ConfigStore.instance().store(name="schema", node=config_class())
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra's errors come here, not to the terminal
    start = hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="config")
    try:
        start(task)()
    except Exception as error:  # those of the task have ended there
        places = [
            word.partition("=")[2] or following
            for word, following in zip(words, [*words[1:], ""], strict=True)
            if word.startswith(("--config-dir", "-cd"))
        ]
        for file in sorted(file for place in places for file in Path(place).rglob("*.yaml")):
            if file.read_bytes().startswith(BOM_UTF8):  # Hydra then overlooks its "# @package"
                leave(f"{file} begins with a byte-order mark: save it as UTF-8 without one.")
        leave(_composition_error(error))


def _check_grammar(words: Sequence[str]) -> None:
    """Refuses words to which Hydra would respond with lexer jargon, or with a traceback."""
    parser = OverridesParser.create()
    options = ["", *words]
    for before, word in zip(options, words, strict=False):
        if word.startswith("-") or (before.startswith("-") and "=" not in before):
            continue  # an option, or its value
        try:
            override = parser.parse_override(word)
        except HydraException as error:
            reason = str(error).splitlines()[0]
            name, _, value = word.partition("=")
            leave(
                f"{word} is not an override in Hydra's grammar ({reason}): expected KEY=VALUE; "
                f"non-ASCII letters need nested quotes, \"{name}='{value}'\"."
            )
        group, chosen = override.key_or_group, override.value()
        names = chosen if isinstance(chosen, list) else [chosen]
        choices = sorted(file.stem for file in (config_folder() / group).glob("*.yaml"))
        if choices and any(isinstance(name, int | float) for name in names):
            leave(
                f"{word} is a number where Hydra expects the name of a file: choose one of "
                f"{', '.join(choices)}; a name of digits needs nested quotes, \"{group}='1'\"."
            )


def _composition_error(error: Exception) -> str:
    """Returns why Hydra cannot compose a configuration, and the options that it lists."""
    if former := former_key(blamed_key(error)):
        return former
    if not isinstance(error, HydraException):  # not foreseen by Hydra
        reason = f"{type(error).__name__}: {error}"
        for frame, _ in traceback.walk_tb(error.__traceback__):  # most of them name no file
            if frame.f_code.co_name == "load_config" and "config_path" in frame.f_locals:
                file = f"{frame.f_locals['config_path']}.yaml"
                return f"{file} is not a configuration ({reason}): correct the file."
        return f"Hydra cannot compose the recipe ({reason}): {_ALL_KEYS}."
    text = str(error).partition("\nConfig search path:")[0]
    lines = [line for line in text.splitlines() if line.strip()]
    options = [line.strip() for line in lines if line.startswith("\t")]
    reasons = [line.strip().rstrip(".:") for line in lines if not line.startswith("\t")]
    cause = str(error.__cause__ or "").partition("\n")[0].rstrip(".")
    if cause:
        if not cause.endswith("not in struct"):  # Hydra's "+KEY=VALUE" works in dictionaries alone
            del reasons[1:]
        reasons += [cause, _ALL_KEYS]
    return "; ".join(reasons) + (f": {', '.join(options)}." if options else ".")
