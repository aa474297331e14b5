"""Command lines in Hydra's grammar: from words to a checked `Config`, and a command on it."""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from nemo_rod import parts
from nemo_rod.commands.errors import errors_in_one_sentence, leave
from nemo_rod.commands.mistakes import ALL_KEYS, near_key, tasks_by_name, understood
from nemo_rod.commands.run_stages import on_all_nodes, one_stage
from nemo_rod.config import Config, blamed_key, config_folder
from nemo_rod.parts import did_you_mean
from nemo_rod.run.checks import declare_keys, to_config

_MAPPING, _LIST = "keys and values, {KEY: VALUE}", "a list, [...]"
_EXPECTED = {  # pattern of OmegaConf's error -> expected value
    "to Integer": "a whole number",
    "to Float": "a number",
    "valid bool": "true or false",
    "not Optional": "a value other than null",
    "DictConfig with ListConfig.*object_type=list": _LIST,
    "DictConfig with ListConfig": _MAPPING,
    "to Dict": _MAPPING,
    "not a ListConfig, list": _LIST,
}


def run_recipe(command: str, words: Sequence[str]) -> None:
    """Composes the recipe that the words describe and carries out a command on it.

    Raises:
        SystemExit: the words or the recipe are invalid; standard error has one sentence on it.
        ValueError: a word is no override, or the command's package cannot provide it.
    """
    Path.cwd()  # which may be gone; Hydra would not say so
    words = understood(command, words)
    action: Callable[[Config], None] = partial(one_stage, command)
    if command in parts.names("recipe_commands"):
        action = parts.load("recipe_commands", command)

    def task(composed: DictConfig) -> None:
        try:
            with errors_in_one_sentence():
                config = to_config(composed)
                job = HydraConfig.get()
                has_own = any(word.startswith("run_dir=") for word in job.overrides.task)
                if job.mode == RunMode.MULTIRUN and not has_own:  # a folder for each job of a sweep
                    # containers and Slurm take most other characters of keys and values for theirs
                    name = re.sub(r"[^\w.=-]+", "_", job.job.override_dirname).strip("_")
                    config.run_dir = str(Path(config.run_dir) / name)
                on_all_nodes(action, config)
        except Exception:  # a bug of nemo-rod
            traceback.print_exc()
            raise SystemExit(1) from None

    declare_keys()
    logging.raiseExceptions = False  # Hydra logs to standard output, whose reader may have left
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra's errors come here, not to the terminal
    sys.argv = [f"nemo-rod {command}", *words]
    start = hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="config")
    try:
        if {"-m", "--multirun"} & {*words}:
            with TemporaryDirectory(prefix="nemo-rod-") as folder:  # of Hydra's multirun.yaml
                sys.argv.insert(1, f"hydra.sweep.dir='{folder}'")
                start(task)()
        else:
            start(task)()
    except BrokenPipeError:
        raise
    except Exception as error:  # those of the task have ended there
        leave(_composition_error(error))


def _composition_error(error: Exception) -> str:
    """Returns the reason that Hydra cannot compose a configuration, with the options it lists."""
    if not isinstance(error, HydraException):  # not foreseen by Hydra
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, RecursionError):
            reason = "the `defaults` of a file lead back to it"
        for frame, _ in traceback.walk_tb(error.__traceback__):  # most of them name no file
            if frame.f_code.co_name == "load_config" and "config_path" in frame.f_locals:
                file = f"{frame.f_locals['config_path']}.yaml"
                return f"{file} is not a configuration ({reason}): correct the file."
        return f"Hydra cannot compose the recipe ({reason}): {ALL_KEYS}."
    text = str(error).partition("\nConfig search path:")[0]
    lines = [line for line in text.splitlines() if line.strip()]
    options = [line.strip() for line in lines if line.startswith("\t")]
    reasons = [line.strip().rstrip(".:") for line in lines if not line.startswith("\t")]
    reasons = reasons or [f"Key '{blamed_key(error)}' is not valid"]  # of a damaged ${...}
    no_head = r"In '(recipe/.*)': .*('DictConfig' to string|@recipe\.)"
    if headless := re.match(no_head, " ".join(reasons)):
        file = f"{headless[1]}.yaml"
        return (
            f"{file} does not begin with '# @package _global_', which puts its keys in their "
            f"places: add that line; or {file} begins with a byte-order mark: save it as UTF-8 "
            "without one."
        )
    if nameless := re.match(r"Incompatible key type .*\s+full_key: (\S+)", str(error.__cause__)):
        return f'{nameless[1]} has a name that YAML reads as null: quote it, as in "null".'
    if missing := re.match(r"In '.*': Could not find '(.+)/(.+)'$", reasons[0]):
        group, name = missing.groups()
        near = next(Path().glob(f"*/{group}/{name}.yaml"), None)
        cure = f" (did you mean --config-dir {near.parents[1]}?)" if near else ""
        cure = cure or did_you_mean(name, options)
        cure = cure or (tasks_by_name([name]) if group == "tasks" else "")
        return f"There is no {group}={name}{cure}: expected one of {', '.join(options)}."
    cause = str(error.__cause__ or "").partition("\n")[0].rstrip(".")
    if unknown := re.match(r"Could not override '(.+)'$", reasons[0]):
        below = re.match(r"Key '(.+)' not in '", cause)  # train={stepz:3}, or train.stepz=3
        key = unknown[1]
        if below and not key.endswith(below[1]):
            key += f".{below[1]}"
        reasons[0] += near_key(key)
    if cause:
        for pattern, expected in _EXPECTED.items():
            found = re.search(pattern, str(error.__cause__), re.DOTALL)
            if found and reasons[0].startswith("Error merging override "):
                word = reasons[0].removeprefix("Error merging override ")
                return f"{word} is not valid: expected {expected}."
        if not cause.endswith("not in struct"):  # Hydra's "+KEY=VALUE" works in dictionaries alone
            del reasons[1:]
        reasons += [cause, ALL_KEYS]
    return "; ".join(reasons) + (f": {', '.join(options)}." if options else ".")
