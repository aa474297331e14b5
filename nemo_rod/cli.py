"""The command line: `nemo-rod COMMAND`, with a recipe in Hydra's grammar or with paths.

Commands that take paths are registered modules; `commands/recipes.py` has those on a recipe. Rooms
and packages are imported once the command is known, so that help is quick.
"""

from __future__ import annotations

import os
import re
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
# also the help of each command on a recipe: `recipe_parser`
USAGE = """nemo-rod: continued pretraining with replay on demand

To begin with:
  nemo-rod doctor                                 what is installed, and what works here
  nemo-rod recipes                                every recipe: model, corpus, hours
  nemo-rod run recipe=toy_synthetic               the whole method on made-up text, on a laptop
  nemo-rod init FOLDER                            a recipe, sources and a cluster of your own

A whole recipe:
  nemo-rod run recipe=NAME                        every stage, skipping what is done
  nemo-rod run recipe=NAME dry_run=true           what would run, and what was made with other keys
  nemo-rod run -m recipe=NAME seed=1,2            a sweep: one run folder each
  nemo-rod known recipe=NAME                      which texts the model knows, and so can forget
  nemo-rod plan recipe=NAME                       what it costs: tokens, time, memory, disk
  nemo-rod probe recipe=NAME                      some steps: forgetting by source, RoD's share
  nemo-rod time recipe=NAME                       plain and RoD steps: tokens/s, MFU, memory
  nemo-rod rehearse recipe=NAME                   a scaled-down run of everything, in minutes

One stage at a time:
  nemo-rod prepare recipe=NAME                    text -> blocks
  nemo-rod pretrain recipe=NAME                   the base model
  nemo-rod reference recipe=NAME                  reference losses
  nemo-rod train recipe=NAME arm=ARM              one arm
  nemo-rod merge recipe=NAME arm=merge_0.4        weights between base and specialist
  nemo-rod evaluate recipe=NAME                   held-out losses of every arm
  nemo-rod evaluate recipe=NAME tasks=paper       and benchmarks, through lm-eval
  nemo-rod evaluate recipe=NAME arm=ARM step=N    held-out losses of a saved step
  nemo-rod export recipe=NAME arm=ARM step=N      a saved step as a Hugging Face checkpoint
  nemo-rod report recipe=NAME                     tables, figures and the page

On NeMo-RL, with a recipe in its own form (docs/nemo-rl.md):
  nemo-rod train --config RECIPE.yaml [KEY=VALUE ...]
  nemo-rod reference --config RECIPE.yaml rod.role=replay [KEY=VALUE ...]

Without a recipe:
  nemo-rod status RUN_DIR [--watch]               what ran, where, its progress and its end
  nemo-rod serve RUN_DIR [port=8008]              the page of a run under way, updated
  nemo-rod sample RUN_DIR prompt=TEXT [arm=ARM]   what the models of a run write after a prompt
  nemo-rod cancel RUN_DIR                         ends what launcher=slurm or ray submitted
  nemo-rod report FOLDER                          the page of a job of your own that selects
  nemo-rod inspect PATH [block=ID]                what any of our files or folders holds
  nemo-rod curriculum export|verify|diff PATH ... a run's curriculum: to parquet, checked, compared
  nemo-rod curriculum materialise ARM --format FORMAT OUT   its blocks in order, for any trainer
  nemo-rod import blocks|references|curriculum PATH ...  what the authors' code has written
  nemo-rod reference job=FILE.py:FUNCTION role=ROLE out=FOLDER roles={PATH: ROLE, ...} ...
                                                  reference losses of your own job's data
  nemo-rod merge BASE ADAPTED OUT lambda=WEIGHT   weights between two checkpoints of your own
  nemo-rod paper [LABEL [run]]                    the commands behind a figure or table of the paper
  nemo-rod completion bash|zsh                    completion of commands, keys, recipes and arms

`nemo-rod COMMAND --help` explains each; `nemo-rod --version` prints the version.
"""
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
    try:
        _run_command()
    except SystemExit as end:
        if isinstance(end.code, int):
            _leave_ray(end.code)
        raise
    _leave_ray(0)


def _run_command() -> None:
    command, *words = sys.argv[1:] or ["help"]
    if command == "--version":
        print(f"nemo-rod {sys.modules['nemo_rod'].__version__}")
        return
    if command in (*_HELP, "help") and not words:
        kinds = ("recipe_commands", "stages", "commands")
        added = {name for kind in kinds for name in {*parts.names(kind)} - parts.OURS[kind].keys()}
        print(USAGE + (f"\nOf installed packages: {', '.join(sorted(added))}" if added else ""))
        return
    if command == "help":  # nemo-rod help run
        command, words = words[0], ["--help"]
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
            known = list(dict.fromkeys([*recipe_commands(), *parts.names("commands")]))
            near = parts.did_you_mean(command, known)
            raise ValueError(
                f"There is no command '{command}'{near}: expected one of {', '.join(known)}."
            )
        if {*_HELP} & {*words}:
            recipe_parser(command).print_help()
            return
        from nemo_rod.commands.recipes import run_recipe

        run_recipe(command, words)


def recipe_commands() -> list[str]:
    """Returns the commands that take a recipe: whole runs, and one for each kind of stage."""
    return [*parts.names("recipe_commands"), *_STAGES, *parts.names("stages")]


def takes_paths(command: str, words: Sequence[str]) -> bool:
    """Returns whether a command line has the path form instead of the recipe form.

    A command without a recipe form always has. `train`, `reference`, `merge` and `report` have it
    if a word belongs to the path form alone, if the first word of the latter two is a folder, or if
    the first word asks for help.
    """
    if command not in recipe_commands() or command not in parts.names("commands"):
        return command in parts.names("commands")
    first = words[0] if words else "-"
    names = {word.partition("=")[0] for word in words if "=" in word or word.startswith("--")}
    is_folder = not ("=" in first or first.startswith("-"))
    return (
        bool(names & parts.load("commands", command).MARKS)
        or first in _HELP
        or (command in ("merge", "report") and is_folder)
    )


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


def _leave_ray(status: int) -> None:
    if "ray" in sys.modules:
        from nemo_rod.signals import leave_ray

        leave_ray(status)


if __name__ == "__main__":
    main()
