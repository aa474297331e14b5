"""`nemo-rod recipes`: every recipe, with its model, corpus and planned time."""

from __future__ import annotations

import shlex
from argparse import Namespace
from pathlib import Path

from nemo_rod.commands.arguments import Arguments
from nemo_rod.commands.errors import leave
from nemo_rod.commands.text import say, table
from nemo_rod.config import config_folder
from nemo_rod.lab.composing import composed
from nemo_rod.lab.plan.command import make_plan
from nemo_rod.lab.plan.plan_text import count, hours, wall
from nemo_rod.lab.text import say_briefly
from nemo_rod.roles import ROLES

_DESCRIPTION = """\
Lists every recipe with its model, its corpus and its planned time: of one stage after the other,
and of all GPUs together. `nemo-rod plan recipe=NAME` has the details."""
_HEADER = ("recipe", "model", ">new tokens", ">replay", "runs on", ">wall", ">GPU-hours")


def declare(parser: Arguments) -> None:
    """Declares the arguments of `nemo-rod recipes`."""
    parser.usage, parser.description = "nemo-rod recipes [--config-dir FOLDER]", _DESCRIPTION
    parser.add_argument(
        "--config-dir", metavar="FOLDER", type=Path, help="lists also the recipes in FOLDER/recipe"
    )
    parser.set_defaults(main=main)


def main(options: Namespace) -> None:
    """Prints a line for every recipe, and below the reasons that some cannot be planned."""
    folders, own = [config_folder()], options.config_dir
    if own is not None:
        if not (own / "recipe").is_dir():
            init = shlex.join(["nemo-rod", "init", str(own)])
            raise ValueError(f"{own} has no folder recipe: `{init}` makes one.")
        folders.append(own)
    names = sorted(file.stem for folder in folders for file in (folder / "recipe").glob("*.yaml"))
    rows: list[tuple[str, ...]] = []
    notes = []
    for name in names:
        say_briefly(f"   {name} ...")
        try:
            config = composed(f"recipe={name}", folder=own)
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
    if not rows:
        leave("There are no recipes.")
