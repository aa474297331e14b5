"""The command line: `nemo-rod COMMAND`, with a recipe in Hydra's grammar or with paths.

Commands that take paths are registered modules; `commands/recipes.py` has those on a recipe. Rooms
and packages are imported once the command is known, so that help is quick.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rod import parts
from nemo_rod.files import by_launch

if TYPE_CHECKING:
    from nemo_rod.commands.arguments import Arguments

_STAGES = ("prepare", "pretrain", "reference", "train")  # built in; parts register others
_HELP = ("-h", "--help")
# also the help of each command on a recipe: `recipe_parser`
USAGE = Path(__file__).with_name("usage.txt").read_text(encoding="utf-8")
_KEYS = (  # the help of every command on a recipe
    ("recipe=NAME", "one that `nemo-rod recipes` lists; of your own, with --config-dir FOLDER"),
    ("arms=[ARM,...]", "arms to compare, such as arms=[no_replay,fixed_20,rod]; arm=ARM: one"),
    ("run_dir=FOLDER", "folder of all results; runs/NAME by default"),
    ("parallel=LAYOUT", "layout of the model over processes, such as dp2"),
    ("cluster=NAME launcher=slurm", "GPUs to use, and the queue that gives them"),
    ("dry_run=true", "says what would be done, and does nothing"),
    ("rebuild=[STAGE,...]", "finished stages to do again; their results are moved aside"),
    ("SECTION.KEY=VALUE", "any key, such as train.lr=1e-4 or seed=43: --cfg job prints them all"),
)


def main() -> None:
    """Entry point of the console script."""
    from nemo_rod.commands.errors import errors_in_one_sentence
    from nemo_rod.commands.text import Lines
    from nemo_rod.signals import leave_ray

    os.environ["PYTHONSAFEPATH"] = "1"  # inherited: no process imports from the working folder
    if isinstance(sys.stdout, io.TextIOWrapper):  # some terminals lack the bars of `status`
        sys.stdout.reconfigure(errors="backslashreplace")
    lines: Any = Lines(sys.stderr or io.StringIO())  # a process may be started without stderr
    try:
        with redirect_stderr(lines), errors_in_one_sentence():
            _run_command()
    except SystemExit as end:
        if isinstance(end.code, int):
            leave_ray(end.code)
        raise
    leave_ray(0)


def _run_command() -> None:
    if sys.flags.optimize > 1 or any(word.startswith("e") for word in sys.warnoptions):
        name = "PYTHONOPTIMIZE=2" if sys.flags.optimize > 1 else "PYTHONWARNINGS=error"
        raise ValueError(f"transformers and Megatron do not run under {name}: unset it.")
    command, *words = sys.argv[1:] or ["help"]
    if command == "--version":
        print(f"nemo-rod {sys.modules['nemo_rod'].__version__}")
        return
    if command in (*_HELP, "help") and words in ([], ["all"]):
        print(_help(whole=bool(words)))
        return
    if command in ("help", "--help"):  # nemo-rod help run
        command, words = words[0], ["--help"]
    words = with_folder(command, words)
    if takes_paths(command, words):
        options = path_parser(command).parse_args([command, *words])
        options.main(options)
    elif command not in recipe_commands():
        known = list(dict.fromkeys([*recipe_commands(), *parts.names("commands")]))
        near = parts.did_you_mean(command, [*known, "--version", "--help"])
        if "=" in command or command.startswith("--config"):  # options alone, or first
            near = f" (did you mean nemo-rod run {command}?)"
        raise ValueError(
            f"There is no command '{command}'{near}: expected one of {', '.join(known)}."
            f"{parts.install_hint()}"
        )
    elif {*_HELP} & {*words}:
        recipe_parser(command).print_help()
    else:
        from nemo_rod.commands.recipes import run_recipe

        run_recipe(command, words)


def _help(*, whole: bool) -> str:
    """Returns the usage of the commands to begin with, or the `whole`, and packages' commands."""
    begin, more = USAGE.split("---\n")
    text = f"{begin}\n{more}" if whole else begin
    known = [*recipe_commands(), *parts.names("commands")]
    named = ((line, re.match(r"  nemo-rod (\w+)", line)) for line in text.splitlines())
    lines = [line for line, name in named if name is None or name[1] in known]
    kinds = ("recipe_commands", "stages", "commands")
    ours = {name for kind in kinds for name in {**parts.HOUSE[kind], **parts.beside(kind)}}
    added = sorted({name for kind in kinds for name in parts.other_parts(kind)} - ours)
    return "\n".join([*lines, *([f"\nOf installed packages: {', '.join(added)}"] if added else [])])


def with_folder(command: str, words: list[str]) -> list[str]:
    """Returns words whose first may be a run's folder in place of its recipe, or the other way."""
    first = words[0] if words else "-"
    if first.startswith("recipe=") and command not in recipe_commands():
        return [f"runs/{first.removeprefix('recipe=')}", *words[1:]]
    if "=" in first or first[0] == "-" or command not in recipe_commands():
        return words
    launched = latest_config(Path(first))
    for stand_in in parts.load_all("folders") if launched else ():
        words = stand_in(launched, words)
    return words


def latest_config(run_dir: Path) -> Path | None:
    """Returns the configuration of the latest launch of a run folder; None without one."""
    return next(reversed(by_launch(run_dir, "config.yaml")), None)


def recipe_commands() -> list[str]:
    """Returns the commands that take a recipe: whole runs, and one for each kind of stage."""
    registered = [*parts.names("saved_step_commands"), *parts.names("stages")]
    return list(dict.fromkeys([*parts.names("recipe_commands"), *_STAGES, *registered]))


def takes_paths(command: str, words: Sequence[str]) -> bool:
    """Returns whether a command line has the path form instead of the recipe form.

    A command without a recipe form always has. `merge` and `report` have it if a word belongs to
    the path form alone, or if the first word is a folder or asks for help.
    """
    if command not in recipe_commands() or command not in parts.names("commands"):
        return command in parts.names("commands")
    first = words[0] if words else "-"
    names = {word.partition("=")[0] for word in words if "=" in word or word.startswith("--")}
    is_folder = not ("=" in first or first.startswith("-"))
    return bool(names & parts.load("commands", command).MARKS) or first in _HELP or is_folder


def path_parser(only: str | None = None) -> Arguments:
    """Returns the parser of command lines in path form, of one command or of all."""
    from nemo_rod.commands.arguments import Arguments

    parser = Arguments(prog="nemo-rod", add_help=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in parts.names("commands") if only is None else [only]:
        parts.load("commands", name).declare(commands.add_parser(name))
    return parser


def recipe_parser(command: str) -> Arguments:
    """Returns the parser whose help explains a command on a recipe, by its lines of `USAGE`."""
    from nemo_rod.commands.arguments import Arguments

    forms = re.findall(rf"^  (nemo-rod {command} .*?)  +(.+)", USAGE, re.MULTILINE)
    parser = Arguments(
        prog=f"nemo-rod {command}", usage=f"nemo-rod {command} recipe=NAME [KEY=VALUE ...]"
    )
    parser.add_table("forms", forms)
    parser.add_table("keys", _KEYS)
    return parser


if __name__ == "__main__":
    main()
