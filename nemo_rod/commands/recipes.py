"""Command lines in Hydra's grammar: from words to a checked `Config`, and a command on it."""

from __future__ import annotations

import logging
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import hydra
import yaml  # type: ignore[import-untyped]
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from nemo_rod import parts
from nemo_rod.commands.errors import errors_in_one_sentence, leave
from nemo_rod.commands.mistakes import (
    ALL_KEYS,
    config_folders,
    known_keys,
    near_key,
    tasks_by_name,
    understood,
)
from nemo_rod.commands.run_stages import on_all_nodes, one_stage
from nemo_rod.commands.text import say
from nemo_rod.config import Config, blamed_key, config_class
from nemo_rod.installation import config_folder
from nemo_rod.parts import did_you_mean
from nemo_rod.run.checks import declare_keys, to_config

OWN_CLUSTER = (
    ", or null for the CPU; any other GPU needs its own: `nemo-rod init FOLDER` writes "
    "FOLDER/cluster/ours.yaml, and plan.peak_tflops its speed"
)
OWN_MODEL = "; any other is model.hf=NAME, a folder or a name on the Hugging Face hub"
_EXPECTED = {  # pattern of OmegaConf's error -> expected value
    "to Integer": "a whole number",
    "to Float": "a number",
    "valid bool": "true or false",
    "not Optional": "a value other than null",
    "DictConfig with ListConfig.*object_type=list|not a ListConfig, list": "a list, [...]",
    "DictConfig with ListConfig|to Dict": "keys and values, {KEY: VALUE}",
}


def run_recipe(command: str, words: Sequence[str]) -> None:
    """Composes the recipe that the words describe and carries out a command on it.

    Raises:
        SystemExit: the words or the recipe are invalid; standard error has one sentence on it.
        ValueError: a word is no override, or the command's package cannot provide it.
    """
    Path.cwd()  # raises if the folder is gone; Hydra would not say so
    words = understood(command, words)
    for sentence in parts.unused():
        say(f"nemo-rod: {sentence}")
    action: Callable[[Config], None] = partial(one_stage, command)
    if command in parts.names("recipe_commands"):
        action = obeying_dry_run(command, parts.load("recipe_commands", command))

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
            with TemporaryDirectory(prefix="nemo-rod-") as folder:  # takes Hydra's multirun.yaml
                sys.argv.insert(1, f"hydra.sweep.dir='{folder}'")
                start(task)()
        else:
            start(task)()
    except BrokenPipeError:
        raise
    except Exception as error:  # those of the task have ended there
        own = [Path(folder) for folder in config_folders(words)]
        leave(_composition_error(error, [*own, config_folder()]))


def obeying_dry_run(command: str, action: Callable[[Config], None]) -> Callable[[Config], None]:
    """Returns an action that does nothing with `dry_run`, unless it is known to show itself then.

    `nemo_rod.commands.run_stages.shows_dry_run` marks such actions; others are told by their
    docstring's first line.
    """

    def obedient(config: Config) -> None:
        if config.dry_run and not hasattr(action, "shows_dry_run"):
            what = str(action.__doc__ or "its work, which it does not describe").partition("\n")[0]
            say(f"nemo-rod {command} would do this, and has done nothing: {what}")
        else:
            action(config)

    return obedient


def _composition_error(error: Exception, folders: Sequence[Path]) -> str:
    """Returns why Hydra cannot compose a configuration of `folders`, the user's first."""
    key = blamed_key(error)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark, problem = error.problem_mark, str(error.problem)
        cure = "indent with spaces, not tabs" if "'\\t'" in problem else "correct the line"
        return f"{_short(Path(mark.name))}:{mark.line + 1} is not YAML ({problem}): {cure}."
    if not isinstance(error, HydraException):  # not foreseen by Hydra
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, RecursionError):
            reason = "the `defaults` of a file lead back to it"
        for frame, _ in traceback.walk_tb(error.__traceback__):  # most of them name no file
            if frame.f_code.co_name == "load_config" and "config_path" in frame.f_locals:
                file = f"{frame.f_locals['config_path']}.yaml"
                cure = "save it as UTF-8" if "Unicode" in reason else "correct or unlock it"
                return f"{file} is not a configuration ({reason}): {cure}."
        return f"Hydra cannot compose the recipe ({reason}): {ALL_KEYS}."
    text = str(error).partition("\nConfig search path:")[0]
    lines = [line for line in text.splitlines() if line.strip()]
    options = [line.strip() for line in lines if line.startswith("\t")]
    reasons = [line.strip().rstrip(".:") for line in lines if not line.startswith("\t")]
    reasons = reasons or [f"Key '{key}' is not valid"]  # a damaged ${...} gives none
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
    if missing := re.match(r"In '(.*)': Could not (?:find|load) '([^/]+)/(.+)'$", reasons[0]):
        by, group, name = missing.groups()
        known = sorted({file.stem for f in folders for file in (f / group).glob("*.yaml")})
        near = next(Path().glob(f"*/{group}/{name}.y*ml"), None)
        cure = f" (did you mean --config-dir {shlex.quote(str(near.parents[1]))}?)" if near else ""
        if near and (near.suffix == ".yml" or near.is_dir()):
            cure = f" ({near} is to be a file that ends in .yaml)"
        stray = next((e for f in folders for e in f.glob("*.yaml") if e.stem == name), None)
        if stray is not None and not near:  # else the folder that is named is the group's
            cure = f" (move {stray} to {stray.parent / group / stray.name})"
        cure = cure or did_you_mean(name, known)
        cure = cure or (tasks_by_name([name]) if group == "tasks" else "")
        place = _place(by, "defaults", folders)[0] if by.startswith("recipe/") else ""
        own = {"cluster": OWN_CLUSTER, "model": OWN_MODEL}.get(group, "")
        return f"{place}There is no {group}={name}{cure}: expected one of {', '.join(known)}{own}."
    if relative := re.match(r"In '(.*)': Could not override '.+/(\w+)@", reasons[0]):
        place, group = _place(relative[1], "defaults", folders)[0], relative[2]
        return f"{place}override {group} finds nothing: write override /{group}, with a slash."
    # of a file that says `key: value`, or of a word on the command line
    place, written = "", reasons[0].removeprefix("Error merging override ").lstrip("+")
    if in_file := re.match(r"In '(.+)': \w+ raised while composing", reasons[0]):
        place, value = _place(in_file[1], key or "domain.sources", folders)
        written = f"{key}={value}" if key else "a list"  # of which OmegaConf does not say the key
    cause = str(error.__cause__ or error)
    if in_file and key in known_keys():
        section, _, last = key.rpartition(".")
        if section and "not in '" in cause:
            return f"{place}{key} is of the command line: write {section}:, and {last}: below it."
    if whole := re.search(r"Merge error: \w+ is not a subclass of (\w+)\. value: (.*)", cause):
        sections = {type(value).__name__: name for name, value in vars(config_class()()).items()}
        name = sections.get(whole[1], whole[1])
        group = f"- override /{name}: {whole[2]}" if (config_folder() / name).is_dir() else ""
        cure = f"name a file of it under defaults, as `{group}`, or " if group else ""
        where = _place(in_file[1], name, folders)[0] if in_file else ""
        space = ", and a space after the colon" if re.search(r":\S", whole[2]) else ""
        return f"{where}{name} is a section, not {whole[2]}: {cure}write keys below it{space}."
    if unknown := re.search(r"Key '(.+)' not in '", cause):  # train={stepz:3}, or train.stepz=3
        key = key if key.endswith(unknown[1]) else f"{key}.{unknown[1]}"
        return f"{place}There is no key {key}{near_key(key)}: {ALL_KEYS}."
    for pattern, expected in _EXPECTED.items():
        if re.search(pattern, cause, re.DOTALL) and (place or written != reasons[0]):
            one = "; -m KEY=A,B makes a run of each" * ("=[" in written and "number" in expected)
            return f"{place}{written} is not valid: expected {expected}{one}."
    if cause != str(error):
        reasons += [cause.partition("\n")[0].rstrip("."), ALL_KEYS]
    return "; ".join(reasons) + (f": {', '.join(options)}." if options else ".")


def _place(name: str, key: str, folders: Sequence[Path]) -> tuple[str, str]:
    """Returns "FILE:LINE: " of a dotted key in a configuration, and the value that is there."""
    file = next((f / f"{name}.yaml" for f in folders if (f / f"{name}.yaml").exists()), Path(name))
    node, line, value = yaml.compose(file.read_text("utf-8")), 1, ""
    for part in [key, *key.split(".")]:
        for entry, below in node.value if isinstance(node, yaml.MappingNode) else ():
            if entry.value == part:
                node, line, value = below, entry.start_mark.line + 1, str(below.value)
    return f"{_short(file)}:{line}: ", value


def _short(file: Path) -> Path:
    return file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
