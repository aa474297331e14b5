"""Detects command-line words that Hydra would misparse, and suggests corrections."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from nemo_rod.config import config_class
from nemo_rod.installation import config_folder
from nemo_rod.parts import did_you_mean, names

ALL_KEYS = "`nemo-rod run recipe=NAME --cfg job` prints all keys and their values"
# dictionaries that take any name below them, so that no "+" needs to be typed
OPEN = (
    *("selection.policy_options", "domain.sources", "variants", "tasks.capabilities"),
    *("cluster.env", "cluster.sbatch", "cluster.cpu_sbatch"),
)
_LINES = Path(__file__).with_name("elsewhere.txt").read_text("utf-8").splitlines()
_ELSEWHERE = {  # names in other trainers -> keys
    name: line.partition(":")[0] for line in _LINES for name in line.split()[1:]
}
_WITHOUT_RECIPE = {"--config-path", "-cp", "--config-name", "-cn", "--hydra-help", "--info", "-i"}


def understood(command: str, words: Sequence[str]) -> list[str]:
    """Returns words in the form that Hydra accepts.

    Raises:
        ValueError: a word is no override and no option; the message suggests a correction.
    """
    options, parser = get_args_parser(), OverridesParser.create()

    def refuse(message: str) -> NoReturn:
        raise ValueError(
            f"{message[0].upper()}{message[1:]}; `nemo-rod {command} --help` has more."
        )

    options.error = refuse  # type: ignore[method-assign]
    plain = [re.sub("^[\u2013\u2014]+", "--", word) for word in words]  # editors write dashes
    _check_options(plain, {*options._option_string_actions})
    given = options.parse_intermixed_args(list(words))
    if (own := given.config_dir) and not Path(own).is_dir():
        raise ValueError(f"--config-dir {own}: {Path.cwd()} has no such folder.")
    bare = [word for word in given.overrides if "=" not in word and not word.startswith("~")]
    recipes = [word for word in given.overrides if word.lstrip("+").startswith("recipe=")]
    if len({*recipes}) > 1:
        raise ValueError(f"{' and '.join(recipes)} are two: choose one, or add -m to recipe=A,B.")
    taken = []
    for word in given.overrides:
        key, equals, value = word.lstrip("+~").partition("=")
        if word in bare or not key:
            raise ValueError(_explain_word(word, [*given.overrides, ""]))
        if not _is_known(key):  # "+" would make Hydra add it, without effect
            raise ValueError(f"There is no key {key}{near_key(key)}: {ALL_KEYS}.")
        if key == "step" and command not in names("saved_step_commands"):
            raise ValueError(f"{word} is of export and evaluate: did you mean train.steps={value}?")
        if key == "recipe" and value in ("", "null"):
            continue  # treated as absent
        is_group = (config_folder() / key).is_dir()
        if word[0] == "~" and not is_group and key in known_keys():
            raise ValueError(f"{word} takes away what every run needs: give {key} a value instead.")
        if key == "recipe" and ("/" in value or value.endswith(".yaml")):
            raise ValueError(_file_as_recipe(word, Path(value)))
        try:
            override = parser.parse_override(word)
        except HydraException as error:
            reason = str(error).splitlines()[0]
            cures: tuple[tuple[Any, str], ...] = (
                (value[:1] == "=", f"type {key}={value.lstrip('=')}"),
                ({*word} & {*"\u201c\u201d\u2018\u2019"},
                 "the quotes are those of print: type ' or \""),
                (re.search(r"\s[\w.+~]+=", value),
                 "words in one pair of quotes are one word: quote each by itself"),
                (bare, f"there is a space before {''.join(bare[:1])}: write it without, or quote "
                 "the word"),
                (value[:1] == "~", 'the shell replaces no ~ there: type "$HOME"'),
                ({*value} & {*"[]{}()"},
                 "a list is [A,B], without spaces, or '[\"A\",\"B\"]' with =, ü or the like"),
                (not value.isascii() or "=" in value,
                 "letters such as ü or = need nested quotes, "
                 f"\"{key}='{value.replace(chr(34), chr(92) + chr(34))}'\""),
            )  # fmt: skip
            end = next((f"; {text}" for holds, text in cures if holds), "")
            raise ValueError(
                f"{word} is not an override in Hydra's grammar ({reason}): expected KEY=VALUE{end}."
            ) from None
        if equals:
            _check_value(word, override)
        if override.is_sweep_override() and not given.multirun:
            named = tasks_by_name(value.split(",")) if key.startswith("tasks") else ""
            end = f", or write {key.rstrip('s')}s=[{value}]." if key in ("arm", "arms") else "."
            raise ValueError(f"{word} has several values{named}: add -m for a run of each{end}")
        if equals and override.value() is None and is_group:
            word = f"~{key}"  # a group that is left out; Hydra takes null for a mistake
        opened = any(f"{key}.".startswith(f"{name}.") for name in OPEN)
        taken.append(f"++{word}" if opened and word[0] not in "+~" else word)
    if not ({*recipes} & {*taken} or _WITHOUT_RECIPE & {w.partition("=")[0] for w in words}):
        raise ValueError(
            f"`nemo-rod {command}` needs a recipe: try recipe=toy_synthetic; `nemo-rod recipes` "
            "lists all, and `nemo-rod init FOLDER` writes one of your own."
        )
    # Hydra takes no keys after an option with a value
    return [*taken, *(word for word in words if word not in given.overrides)]


def config_folders(words: Sequence[str]) -> list[str]:
    """Returns the folders of configurations that options of a command name."""
    given = get_args_parser().parse_known_args(list(words))[0]
    return [folder for folder in (given.config_dir, given.config_path) if folder]


def known_keys() -> Iterator[str]:
    """Yields every dotted key of the configuration, and the groups of files."""
    yield from (path.name for path in config_folder().iterdir() if path.is_dir())
    yield from _fields(config_class()())


def near_key(key: str) -> str:
    """Returns " (did you mean ...?)" with the keys that a mistyped one is nearest to, or ""."""
    known, end = list(known_keys()), key.rpartition(".")[2].lower()
    if key in known:
        return ""
    ends = _ELSEWHERE.get(end, "").split() or [name for name in known if name.endswith(f".{end}")]
    return f" (did you mean {' or '.join(ends[:3])}?)" if ends else did_you_mean(key.lower(), known)


def tasks_by_name(names: Iterable[object]) -> str:
    """Returns " (...)" with the word that runs tasks of lm-eval by their names."""
    ours = {file.stem for file in (config_folder() / "tasks").glob("*.yaml")}
    listed = ",".join(name for name in map(str, names) if name not in ours)
    return listed and f" (tasks of lm-eval: tasks=none 'tasks.capabilities={{mine:[{listed}]}}')"


def _is_known(key: str) -> bool:
    """Returns whether a dotted key is of the configuration or of Hydra, or names a group."""
    section: Any = config_class()()
    for name in key.split("."):
        if not dataclasses.is_dataclass(section) or "/" in key or "@" in key or name == "hydra":
            return True
        if not hasattr(section, name):
            return False
        section = getattr(section, name)
    return True


def _fields(section: Any, prefix: str = "") -> Iterator[str]:
    for field in dataclasses.fields(section):
        yield prefix + field.name
        if dataclasses.is_dataclass(value := getattr(section, field.name)):
            yield from _fields(value, f"{prefix}{field.name}.")


def _recipes() -> list[str]:
    return sorted(file.stem for file in (config_folder() / "recipe").glob("*.yaml"))


def _check_options(words: Sequence[str], known: Iterable[str]) -> None:
    """Refuses names that are too long, and options that Hydra lacks; mostly, they are keys."""
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        for part in (*name.split("."), value if name in ("recipe", "cluster", "tasks") else ""):
            if len(part) > 120:  # it is a folder's, or a file's
                raise ValueError(f"{part[:60]}... is no name: one has at most 120 letters.")
        if not word.startswith("-") or name in known:
            continue
        key = name.lstrip("-").replace("-", "_")
        key, _, given = _ELSEWHERE.get(key, key).partition("=")
        after = words[number + 1] if number + 1 < len(words) else ""
        if not equals:
            value = given or (after if after and "=" not in after and after[0] != "-" else "true")
        if key in ("arms", "rebuild") and value[0] != "[":
            value = f"[{value}]"
        names = {option.lstrip("-").replace("-", "_"): option for option in known}
        names |= {other: f"{other}={value}" for other in known_keys()}
        near = [names[other] for other in get_close_matches(key, names, n=1, cutoff=0.8)]
        cure = f": did you mean {near[0]}?" if near else ": keys are KEY=VALUE."
        raise ValueError(f"There is no option {name}{cure}")


def _explain_word(word: str, words: list[str]) -> str:
    """Returns a sentence about a word without key or without value."""
    if not word.strip():
        return "There is an empty word: leave it out, or write KEY=VALUE."
    place = words.index(word)
    before, after = words[place - 1] if place else "", words[place + 1]
    if word[0] == "=" and (place == 0 or "=" in before):
        return f"{word} has no key: expected KEY=VALUE."
    if "=" in (word[0], after[:1], before[-1:]):
        parts = [before, word, after] if word[0] == "=" else [word, after]
        if before.endswith("="):
            parts = [before, word]
        elif after == "=":
            parts.append([*words, ""][place + 2])
        return f"There is a space around '=': did you mean {''.join(parts)}?"
    if word.endswith(".yaml"):
        return _file_as_recipe(word, Path(word))
    if word in _recipes():
        return f"{word} is not KEY=VALUE: did you mean recipe={word}?"
    if own := sorted(Path(word).glob("recipe/*.yaml")):
        cure = shlex.join(["--config-dir", word, f"recipe={own[0].stem}"])
        return f"{word} is a folder: did you mean {cure}?"
    key, colon, value = word.partition(":")
    if key in known_keys():
        value = value or ("true" if word == "dry_run" else after or "VALUE")
        return f"{word} has no {'=' if colon else 'value'}: did you mean {key}={value}?"
    near = did_you_mean(word, [*_recipes(), *known_keys()])
    lacks = "holds no launch of `nemo-rod run`, and " if Path(word).is_dir() else ""
    return f"{word} {lacks}is not KEY=VALUE, such as recipe=toy{near}."


def _file_as_recipe(word: str, file: Path) -> str:
    """Returns a sentence with the name of a recipe that was given by its file."""
    if file.stem in _recipes():
        return f"{word} is a file where a name is expected: did you mean recipe={file.stem}?"
    if file.parent.name == "recipe":
        folder, cure = file.parent.parent, "did you mean"
    else:
        folder = file.parent / "my"
        cure = f"move it to {folder / 'recipe' / f'{file.stem}.yaml'}, and type"
    words = shlex.join(["--config-dir", str(folder), f"recipe={file.stem}"])
    return f"{word} is a file where a name is expected: {cure} {words}?"


def _check_value(word: str, override: Override) -> None:
    """Refuses a number for a file's name, and one value for a list."""
    group, chosen = override.key_or_group, override.value()
    names = chosen if isinstance(chosen, list) else [chosen]
    choices = sorted(file.stem for file in (config_folder() / group).glob("*.yaml"))
    if choices and any(isinstance(name, int | float) for name in names):
        raise ValueError(
            f"{word} is a number where Hydra expects the name of a file: choose one of "
            f"{', '.join(choices)}; a name of digits needs nested quotes, \"{group}='1'\"."
        )
    if isinstance(chosen, list) and chosen and (choices or group == "arm"):
        name = chosen[0] if chosen[0] in choices or group == "arm" else choices[0]
        cure = tasks_by_name(chosen) if group == "tasks" else ""
        raise ValueError(f"{word} is a list where one name is expected: {group}={name}, say{cure}.")
    if group == "tasks.capabilities" and isinstance(chosen, str | list) and "$" not in word:
        raise ValueError(f"{word} names no capability{tasks_by_name(names)}.")
    if group in ("arms", "rebuild") and not isinstance(chosen, list | dict | None):
        value = word.partition("=")[2]
        if override.is_sweep_override() and "[" in value:
            return
        raise ValueError(f"{group} is a list: did you mean {group}=[{value}]?")
