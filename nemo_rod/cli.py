"""The command line: `nemo-rod COMMAND`, with a recipe in Hydra's grammar or with paths.

Each command has a file in `nemo_rod/commands`; the stages of a recipe share `run_stages.py`.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from nemo_rod.commands.arguments import Arguments
from nemo_rod.commands.help import USAGE
from nemo_rod.commands.run_stages import STAGES, on_all_nodes, one_stage
from nemo_rod.config import Config, blamed_key, config_class, config_folder, former_key
from nemo_rod.run.checks import to_config
from nemo_rod.signals import Stopped, leave_ray

_FORMER = {"score": "reference"}  # deprecated names, removed in the next release
_HELP = ("-h", "--help")
_ALL_KEYS = "`nemo-rod run recipe=NAME --cfg job` prints all keys and their values"
_BROKEN_PIPE = 128 + signal.SIGPIPE  # what a shell says of a program that a closed pipe ended


def main() -> None:
    """Entry point of the console script."""
    try:
        _run_command()
    except SystemExit as end:
        if isinstance(end.code, int):
            leave_ray(end.code)
        raise
    leave_ray(0)


def _run_command() -> None:
    command, *words = sys.argv[1:] or ["help"]
    if command in (*_HELP, "help"):
        kinds = ("recipe_commands", "stages", "commands")
        added = {name for kind in kinds for name in {*parts.names(kind)} - parts.OURS[kind].keys()}
        print(USAGE + (f"\nOf installed packages: {', '.join(sorted(added))}" if added else ""))
        return
    if command in _FORMER:
        command = _renamed(command)
    with _errors_in_one_sentence():
        if command not in {*recipe_commands(), *parts.names("commands")}:
            expected = ", ".join(dict.fromkeys([*recipe_commands(), *parts.names("commands")]))
            raise ValueError(f"There is no command '{command}': expected one of {expected}.")
        of_paths = takes_paths(command, words)
    if of_paths:
        _with_paths(command, words)
        return
    _check_grammar(words)
    sys.argv = [f"nemo-rod {command}", *words]
    with _errors_in_one_sentence():
        ConfigStore.instance().store(name="schema", node=config_class())
        task = _checked(_of_recipes(command))
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra's errors come here, not to the terminal
    start = hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="config")
    try:
        start(task)()
    except Exception as error:  # those of the task have ended there
        _leave(_not_composed(error))


def recipe_commands() -> list[str]:
    """Returns the commands that take a recipe: whole runs, and one for each kind of stage."""
    return [*parts.names("recipe_commands"), *STAGES, *parts.names("stages")]


def _of_recipes(command: str) -> Callable[[Config], None]:
    if command in parts.names("recipe_commands"):
        action: Callable[[Config], None] = parts.load("recipe_commands", command)
        return action
    return partial(one_stage, command)


def takes_paths(command: str, words: Sequence[str]) -> bool:
    """Returns whether a command line has the path form instead of the recipe form.

    A command without a recipe form always has. `train`, `reference` and `merge` have it if a word
    belongs to the path form alone, if the first word of `merge` is a folder, or if the first word
    asks for help.
    """
    if command not in recipe_commands() or command not in parts.names("commands"):
        return command in parts.names("commands")
    first = words[0] if words else "-"
    names = {word.partition("=")[0] for word in words if "=" in word or word.startswith("--")}
    is_folder = not ("=" in first or first.startswith("-"))
    return (
        bool(names & parts.load("commands", command).MARKS)
        or first in _HELP
        or (command == "merge" and is_folder)
    )


def path_parser(only: str | None = None) -> Arguments:
    """Returns the parser for command lines in path form (`takes_paths`), of one command or all."""
    parser = Arguments(prog="nemo-rod", add_help=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in parts.names("commands") if only is None else [only]:
        parts.load("commands", name).declare(commands.add_parser(name))
    return parser


def _renamed(command: str) -> str:
    """Returns a command's current name and prints a notice, once per job of many processes."""
    if os.environ.get("RANK", "0") == "0":
        note = (
            f"`{command}` is now called `{_FORMER[command]}`; the next release drops the old name"
        )
        print(f"nemo-rod: {note}.", file=sys.stderr)
    return _FORMER[command]


def _check_grammar(words: Sequence[str]) -> None:
    """Refuses a word that Hydra would answer with what its lexer calls it, or with a traceback."""
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
            _leave(
                f"{word} is no override in Hydra's grammar ({reason}): expected KEY=VALUE, with "
                f"other letters than ASCII's in quotes inside of quotes, \"{name}='{value}'\"."
            )
        group, chosen = override.key_or_group, override.value()
        names = chosen if isinstance(chosen, list) else [chosen]
        choices = sorted(file.stem for file in (config_folder() / group).glob("*.yaml"))
        if choices and any(isinstance(name, int | float) for name in names):
            _leave(
                f"{word} is a value where Hydra expects the name of a file: choose one of "
                f"{', '.join(choices)}; a name of digits needs quotes inside of quotes, "
                f"\"{group}='1'\"."
            )


def _not_composed(error: Exception) -> str:
    """Returns the reason why Hydra cannot compose a configuration, its options included."""
    if former := former_key(blamed_key(error)):
        return former
    if not isinstance(error, HydraException):  # not foreseen by Hydra
        reason = f"{type(error).__name__}: {error}"
        for frame, _ in traceback.walk_tb(error.__traceback__):  # most of them name no file
            if frame.f_code.co_name == "load_config" and "config_path" in frame.f_locals:
                file = f"{frame.f_locals['config_path']}.yaml"
                return f"{file} is no configuration ({reason}): correct the file."
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


def _with_paths(command: str, words: Sequence[str]) -> None:
    with _errors_in_one_sentence():
        try:
            options = path_parser(command).parse_args([command, *words])
            options.main(options)
            sys.stdout.flush()
        except BrokenPipeError:  # of `nemo-rod status RUN_DIR | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(_BROKEN_PIPE) from None
        except Stopped as stop:
            _leave(str(stop), status=Stopped.exit_status)


def _checked(command: Callable[[Config], None]) -> Callable[[DictConfig], None]:
    """Wraps a command: composed tree -> `Config`."""

    def task(composed: DictConfig) -> None:
        try:
            with _errors_in_one_sentence():
                config = to_config(composed)
                config.run_dir = _run_dir(config)
                on_all_nodes(command, config)
        except Stopped as stop:
            _leave(str(stop), status=Stopped.exit_status)
        except Exception:  # a mistake of ours
            traceback.print_exc()
            raise SystemExit(1) from None

    return task


@contextmanager
def _errors_in_one_sentence() -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError) as error:
        _leave(str(error))
    except ModuleNotFoundError as error:
        _leave(_what_to_install(error))
    except RuntimeError as error:  # a job that failed; its log has the details
        _leave(str(error), status=1)


def _run_dir(config: Config) -> str:
    """Returns the run folder; in a sweep, every job has its own, named after its overrides."""
    if not config.run_dir.strip():
        raise ValueError("run_dir is empty: name the folder of the run, such as runs/toy.")
    job = HydraConfig.get()
    if job.mode != RunMode.MULTIRUN or any(o.startswith("run_dir=") for o in job.overrides.task):
        return config.run_dir
    return str(Path(config.run_dir) / job.job.override_dirname)


def _what_to_install(error: ModuleNotFoundError) -> str:
    """Returns a sentence that names the missing package and the extra that brings it."""
    module = str(error.name).replace("_", "-").replace(".", "-")
    try:
        requirements = importlib.metadata.requires("nemo-rod") or []
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        requirements = []
    for wanted in (module, module.partition("-")[0]):
        for requirement in requirements:
            if found := re.match(rf"{wanted}\b.*extra == [\"']([\w-]+)", requirement):
                return f"{error}: pip install 'nemo-rod[{found[1]}]' brings it."
    return f"{error}: install it into the environment of this command."


def _leave(sentence: str, *, status: int = 2) -> None:
    print(f"nemo-rod: {' '.join(sentence.split())}", file=sys.stderr)
    raise SystemExit(status)


if __name__ == "__main__":
    main()
