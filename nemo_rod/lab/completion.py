"""`nemo-rod completion bash|zsh`: completion of commands, keys, groups, recipes and arms.

The shell hands over the line so far; Hydra's own completion answers for keys and groups of files,
and this module for commands, arms and words unknown to Hydra.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from argparse import SUPPRESS, Namespace
from collections.abc import Sequence

from nemo_rod import cli, parts
from nemo_rod.commands.arguments import Arguments

_ARMS = ("base", "no_replay", "fixed_10", "fixed_20", "fixed_50", "max_replay", "merge_0.4", "rod")
_SCRIPTS = {
    "bash": """\
_nemo_rod() {
  local line=${COMP_LINE:0:COMP_POINT} word found
  word=${line##*[[:space:]]}
  # readline completes what follows the last = or :
  local done=${word%"${word##*[=:]}"}
  COMPREPLY=()
  while IFS= read -r found; do
    COMPREPLY+=("${found#"$done"}")
  done < <("${COMP_WORDS[0]}" completion bash "$line" 2>/dev/null)
}
complete -o nospace -o default -F _nemo_rod nemo-rod""",
    "zsh": """\
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -u; }
_nemo_rod() {
  local -a found whole open
  found=("${(@f)$(${words[1]} completion zsh "${(j: :)words[1,CURRENT]}" 2>/dev/null)}")
  whole=("${(@)${(@M)found:#* }% }")
  open=("${(@)found:#* }")
  [[ -n ${found[1]} ]] || { _files; return; }
  (( $#whole )) && compadd -Q -- "${whole[@]}"
  (( $#open )) && compadd -Q -S '' -- "${open[@]}"
}
compdef _nemo_rod nemo-rod
alias nemo-rod='noglob nemo-rod' # arms=[rod,fixed_20] is no pattern of files""",
}
_DESCRIPTION = """\
Prints a script that completes commands, keys, groups, recipes and arms:

  eval "$(nemo-rod completion bash)"     in ~/.bashrc
  eval "$(nemo-rod completion zsh)"      in ~/.zshrc"""


def declare(parser: Arguments) -> None:
    """Declares the arguments of `nemo-rod completion`."""
    parser.usage, parser.description = "nemo-rod completion bash|zsh", _DESCRIPTION
    parser.add_argument("shell", metavar="bash|zsh", choices=_SCRIPTS)
    parser.add_argument("line", nargs="?", help=SUPPRESS)  # the line to complete
    parser.set_defaults(main=main)


def main(options: Namespace) -> None:
    """Prints the script, or the candidates for the last word of its line."""
    is_query = options.line is not None
    for text in candidates(options.line) if is_query else (_SCRIPTS[options.shell],):
        print(text)


def candidates(line: str) -> list[str]:
    """Returns candidates for the last word of a command line; complete ones end with a space."""
    _, *words = line.split(" ")
    command, *others = words or [""]
    known = dict.fromkeys([*cli.recipe_commands(), *parts.names("commands")])
    if not others:
        return [f"{name} " for name in known if name.startswith(command)]
    if command not in known:
        return []
    word = others[-1]
    if cli.takes_paths(command, others[:-1]):
        parser = Arguments()
        parts.load("commands", command).declare(parser)
        keys = parser.keys.values()
        matches = [f"{key.name}={value}" for key in keys for value in key.choices or [""]]
    else:
        for name in ("arm=", "arms=["):
            if word.startswith(name):
                return _arms(name, word, others[:-1])
        matches = [item if item[-1] in "=./[" else f"{item} " for item in _by_hydra(others)]
    return [item for item in matches if item.startswith(word)]


def _arms(key: str, word: str, before: Sequence[str]) -> list[str]:
    """Returns a word whose last arm is one of the paper, or a variant of the recipe."""
    names = [*_ARMS, *_by_hydra([*before, "variants."])]
    names = [name.removeprefix("variants.").rstrip(".=") for name in names]
    first, _, start = word.removeprefix(key).rpartition(",")
    taken = f"{key}{first}," if first else key
    chosen = first.split(",")
    end = " " if key == "arm=" else ""
    return [
        f"{taken}{name}{end}" for name in names if name.startswith(start) and name not in chosen
    ]


def _by_hydra(words: Sequence[str]) -> list[str]:
    """Returns Hydra's candidates for the last of some words of a recipe's command line."""
    import hydra
    from hydra.core.config_store import ConfigStore

    from nemo_rod.config import config_class, config_folder

    ConfigStore.instance().store(name="schema", node=config_class())
    options = [word for word in words if word.startswith("-")]
    if "--config-dir" in words[:-1]:
        options.append(words[words.index("--config-dir") + 1])
    os.environ["COMP_LINE"] = " ".join(["nemo-rod", *words])
    sys.argv = ["nemo-rod", *options, "-sc", "query=bash"]
    start = hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="config")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        start(lambda _: None)()
    # a group of files and folders has no "=" there, and files in folders are missing
    words_shown = printed.getvalue().split()
    items = {item if item[-1] in "./" or "=" in item else f"{item}=" for item in words_shown}
    group = words[-1].partition("=")[0]
    for file in (config_folder() / group).glob("*/*.yaml") if group == "parallel" else ():
        items.add(f"{group}={file.parent.name}/{file.stem}")
    flags = [item.rpartition("=")[0] for item in items if item.endswith(("=true", "=false"))]
    items |= {f"{key}={value}" for key in flags for value in ("true", "false")}
    items |= {f"{name}=[" for name in ("arms", "rebuild") if f"{name}.".startswith(words[-1])}
    return sorted(items - {"arms.", "rebuild.", "hydra.", "hydra/", "cluster=template"})
