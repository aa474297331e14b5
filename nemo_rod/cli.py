"""The command line: `nemo-rod COMMAND`, with a recipe in Hydra's grammar or with paths.

Commands that take paths are registered modules; `commands/recipes.py` has those on a recipe. Rooms
and packages are imported once the command is known, so that help is quick.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nemo_rod import parts

if TYPE_CHECKING:
    from nemo_rod.commands.arguments import Arguments

_STAGES = ("prepare", "pretrain", "reference", "train", "export")  # beside the registered ones
_FORMER = {"score": "reference"}  # deprecated names, removed in the next release
_HELP = ("-h", "--help")
_BROKEN_PIPE = 128 + signal.SIGPIPE  # exit status by which shells report a closed pipe
USAGE = """nemo-rod: continued pretraining with replay on demand

  nemo-rod run recipe=toy             every stage of a recipe, skipping what is done
  nemo-rod run recipe=toy dry_run=true            what would run
  nemo-rod plan recipe=toy                        what it would cost: tokens, time, memory, disk
  nemo-rod rehearse recipe=NAME                   a scaled-down run of everything, in minutes
  nemo-rod run -m recipe=toy seed=1,2             a sweep: one run folder each

One stage at a time:
  nemo-rod prepare   recipe=NAME                  text -> blocks
  nemo-rod pretrain  recipe=NAME                  the base model
  nemo-rod reference recipe=NAME                  reference losses
  nemo-rod train     recipe=NAME arm=ARM          one arm
  nemo-rod merge     recipe=NAME arm=merge_0.4    weights between base and specialist
  nemo-rod evaluate  recipe=NAME                  held-out losses of every arm
  nemo-rod evaluate  recipe=NAME tasks=paper      and benchmarks, through lm-eval
  nemo-rod evaluate  recipe=NAME arm=ARM step=N   held-out losses of a saved step
  nemo-rod export    recipe=NAME arm=ARM step=N   a saved step as a Hugging Face checkpoint
  nemo-rod report    recipe=NAME                  tables, figures and the page

On NeMo-RL, with a recipe in its own form (docs/nemo-rl.md):
  nemo-rod train     --config RECIPE.yaml [key=value ...]
  nemo-rod reference --config RECIPE.yaml rod.role=replay [key=value ...]

Without a recipe:
  nemo-rod status RUN_DIR                         what ran, where, its progress and its end
  nemo-rod status RUN_DIR --watch                 the same with bars, updated
  nemo-rod serve RUN_DIR [port=8008]              the page of a run under way, updated
  nemo-rod cancel RUN_DIR                         ends what launcher=slurm or ray submitted
  nemo-rod inspect PATH [block=ID]                what any of our files or folders holds
  nemo-rod curriculum export|verify|diff PATH ... a run's curriculum: to parquet, checked, compared
  nemo-rod reference job=FILE.py:FUNCTION role=ROLE out=FOLDER roles={PATH: ROLE, ...} ...
                                                  reference losses of your own job's data
  nemo-rod merge BASE ADAPTED OUT lambda=WEIGHT   weights between two checkpoints of your own
  nemo-rod doctor                                 what is installed, and what works here

`train` and `reference` take a recipe unless --config is given, `reference` also unless job= is, and
`merge` unless lambda= is given or its first argument is a folder.
`nemo-rod COMMAND --help` explains train, reference, merge and every command without a recipe.

Keys: recipe arms arm seed run_dir parallel rebuild dry_run train.* selection.* ...
`nemo-rod run recipe=NAME --cfg job` shows all of them with their values.
"""


def main() -> None:
    """Entry point of the console script."""
    try:
        _run_command()
    except SystemExit as end:
        if isinstance(end.code, int):
            _leave_ray(end.code)
        raise
    _leave_ray(0)


def _run_command() -> None:
    command, *words = sys.argv[1:] or ["help"]
    if command in (*_HELP, "help"):
        kinds = ("recipe_commands", "stages", "commands")
        added = {name for kind in kinds for name in {*parts.names(kind)} - parts.OURS[kind].keys()}
        print(USAGE + (f"\nOf installed packages: {', '.join(sorted(added))}" if added else ""))
        return
    if command in _FORMER:
        command, former = _FORMER[command], command
        if os.environ.get("RANK", "0") == "0":  # once per job of many processes
            note = f"`{former}` is now called `{command}`; the next release drops the old name"
            print(f"nemo-rod: {note}.", file=sys.stderr)
    from nemo_rod.commands.errors import errors_in_one_sentence

    with errors_in_one_sentence():
        if takes_paths(command, words):
            try:
                options = path_parser(command).parse_args([command, *words])
                options.main(options)
                sys.stdout.flush()
            except BrokenPipeError:  # of `nemo-rod status RUN_DIR | head`
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise SystemExit(_BROKEN_PIPE) from None
            return
        if command not in recipe_commands():
            expected = ", ".join(dict.fromkeys([*recipe_commands(), *parts.names("commands")]))
            raise ValueError(f"There is no command '{command}': expected one of {expected}.")
        from nemo_rod.commands.recipes import run_recipe

        run_recipe(command, words)


def recipe_commands() -> list[str]:
    """Returns the commands that take a recipe: whole runs, and one for each kind of stage."""
    return [*parts.names("recipe_commands"), *_STAGES, *parts.names("stages")]


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
    """Returns the parser of command lines in path form, of one command or of all."""
    from nemo_rod.commands.arguments import Arguments

    parser = Arguments(prog="nemo-rod", add_help=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in parts.names("commands") if only is None else [only]:
        parts.load("commands", name).declare(commands.add_parser(name))
    return parser


def _leave_ray(status: int) -> None:
    if "ray" in sys.modules:
        from nemo_rod.signals import leave_ray

        leave_ray(status)


if __name__ == "__main__":
    main()
