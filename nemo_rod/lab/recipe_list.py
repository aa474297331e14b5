"""`nemo-rod recipes`: recipes in their files' own words, and the paper's figures by theirs."""

from __future__ import annotations

import re
import shlex
import textwrap
from argparse import Namespace
from pathlib import Path

from nemo_rod.commands.arguments import Arguments, Key
from nemo_rod.commands.errors import leave
from nemo_rod.commands.text import say, table
from nemo_rod.installation import config_folder

_DESCRIPTION = """\
Lists recipes by the comment at the head of their files. With plan=true, with its model, its
corpus and its planned time instead, in half a minute: of one stage after the other, and of all
GPUs together. `nemo-rod plan recipe=NAME` has the details."""
_HEADER = ("recipe", "model", ">new tokens", ">replay", "runs on", ">wall", ">GPU-hours")
_TOYS = ("toy_synthetic", "toy_paper")  # other toys are of one experiment each
_SHORTEST, _WIDTH = 40, 96  # characters of a description, and of a line


def declare(parser: Arguments) -> None:
    """Declares the arguments of `nemo-rod recipes`."""
    parser.usage = (
        "nemo-rod recipes [--all] [--config-dir FOLDER] [plan=true]\n"
        "       nemo-rod recipes --paper [LABEL]"
    )
    parser.description = _DESCRIPTION
    parser.add_argument(
        "--config-dir", metavar="FOLDER", type=Path, help="lists also the recipes in FOLDER/recipe"
    )
    parser.add_argument("--all", action="store_true", help="lists also the toys of experiments")
    parser.add_argument(
        "--paper",
        metavar="LABEL",
        nargs="?",
        const="",
        help="lists the paper's figures and tables instead, or the commands behind one, such as "
        "fig:frontier",
    )
    parser.add_keys(Key("plan", "true", "plans every recipe, too", choices=("true", "false")))
    parser.set_defaults(main=main)


def main(options: Namespace) -> None:
    """Prints a row for every recipe, and below the reasons that some cannot be planned."""
    if options.paper is not None:
        from nemo_rod.lab.reproduce import show

        show(options.paper or None)
        return
    folders, own = [config_folder()], options.config_dir
    if own is not None:
        if not (own / "recipe").is_dir():
            init = shlex.join(["nemo-rod", "init", str(own)])
            raise ValueError(f"{own} has no folder recipe: `{init}` makes one.")
        folders.append(own)
    files = [file for folder in folders for file in (folder / "recipe").glob("*.yaml")]
    files.sort(key=lambda file: file.stem)
    if not options.all:
        ours = config_folder() / "recipe"
        files = [
            f for f in files
            if f.parent != ours or not f.stem.startswith("toy_") or f.stem in _TOYS
        ]  # fmt: skip
    if not files:
        leave("There are no recipes.")
    if options.plan == "true":
        _print_plans([file.stem for file in files], own)
        return
    rows = [
        (file.stem if number == 0 else "", line)
        for file in files
        for number, line in enumerate(textwrap.wrap(description(file), _WIDTH) or [""])
    ]
    print(table(("recipe", ""), rows))
    if not options.all:
        say("`nemo-rod recipes --all` lists the toys of experiments, too.")


def description(file: Path) -> str:
    """Returns the first sentences of the comment at the head of a recipe."""
    text = file.read_text("utf-8", errors="replace").removeprefix("# @package _global_\n")
    head = re.match("(?:# ?.*\n)*", text)
    words = " ".join(line[1:].strip() for line in head[0].splitlines()) if head else ""
    ends = [end.end() for end in re.finditer(r"[.?](?= |$)", words)]
    return words[: next((end for end in ends if end > _SHORTEST), None)]


def _print_plans(names: list[str], own: Path | None) -> None:
    from nemo_rod.lab.composing import compose_config
    from nemo_rod.lab.plan.command import make_plan
    from nemo_rod.lab.plan.plan_text import count, hours, wall
    from nemo_rod.lab.text import say_briefly
    from nemo_rod.roles import ROLES

    rows: list[tuple[str, ...]] = []
    notes = []
    for name in names:
        say_briefly(f"   {name} ...")
        try:
            config = compose_config(f"recipe={name}", folder=own)
            plan = make_plan(config)
        except Exception as error:  # YAML's, OmegaConf's and Hydra's have no class in common
            rows.append((name, *[""] * 6))
            notes.append(f"{name}: {' '.join(str(error).split())}")
            continue
        corpus = [plan.corpus[f"{role}_tokens"] for role in ROLES]
        gpu = plan.layout["gpu"]
        rows.append(
            (
                name,
                str(plan.model["name"]),
                *(count(tokens) for tokens in corpus),
                f"{plan.layout['processes']} {gpu}" if gpu else "CPU",
                wall(plan.total("hours")),
                hours(plan.gpu_hours) if gpu else "",
            )
        )
    say_briefly("")
    print(table(_HEADER, rows))
    for note in notes:
        say(note)
