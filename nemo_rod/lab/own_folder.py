"""`nemo-rod init FOLDER`: a recipe, its sources and a cluster, to fill in."""

from __future__ import annotations

import re
import shlex
from argparse import Namespace
from pathlib import Path

from nemo_rod.commands.arguments import Arguments
from nemo_rod.files import write_whole
from nemo_rod.installation import config_folder

_DESCRIPTION = """\
Writes a recipe with sources and a cluster file, with comments, for you to fill in. Files that are
there already stay as they are."""
_NEXT = """
Next:
  put text of your own into {folder}/text, and read {folder}/recipe/mine.yaml
  nemo-rod plan --config-dir {quoted} recipe=mine                 what it costs
  nemo-rod run --config-dir {quoted} recipe=mine dry_run=true     what would run
  nemo-rod run --config-dir {quoted} recipe=mine"""


def declare(parser: Arguments) -> None:
    """Declares the arguments of `nemo-rod init`."""
    parser.usage, parser.description = "nemo-rod init FOLDER", _DESCRIPTION
    parser.add_argument(
        "folder", metavar="FOLDER", type=Path, help="folder to write to, such as my"
    )
    parser.set_defaults(main=main)


def main(options: Namespace) -> None:
    """Writes the missing files, and prints how to use them.

    Raises:
        ValueError: the folder's name cannot be in them.
    """
    folder: Path = options.folder
    # YAML, OmegaConf, patterns of files and options have meanings of their own for these
    if re.search(r'["\\$*?\[\x00-\x1f\ud800-\udfff]|^-', str(folder)):
        raise ValueError(
            f"{str(folder)!r} cannot be in a recipe: choose a folder whose path has none of "
            "\" \\ $ * ? [, no line break and no '-' at its start."
        )
    texts = {
        "recipe/mine.yaml": Path(__file__).with_name("own_recipe.yaml"),
        "cluster/ours.yaml": config_folder() / "cluster" / "template.yaml",
    }
    (folder / "text").mkdir(parents=True, exist_ok=True)
    for name, template in texts.items():
        path = folder / name
        if path.exists():
            print(f"{path}: is there, and stays")
            continue
        text = template.read_text("utf-8").replace("FOLDER", str(folder))
        write_whole(path, text.encode(), below=folder)
        print(f"{path}: written")
    print(_NEXT.format(folder=folder, quoted=shlex.quote(str(folder))))
