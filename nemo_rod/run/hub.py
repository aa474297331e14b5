"""What a recipe takes from the Hugging Face hub, and whether this account may read it."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import NamedTuple

from nemo_rod.config import Config
from nemo_rod.corpus.adapters.hub_files import file_of, name_and_revision
from nemo_rod.corpus.tokenizer import BYTE

GATED = "accept its terms on the hub, and set HF_TOKEN to a token of that account"
_SECONDS = 10.0  # how long the hub may take to answer for all repositories


class NotChecked(Exception):
    """The reason why something could not be checked here."""


class Repository(NamedTuple):
    """A repository of the hub."""

    name: str
    revision: str | None
    kind: str = "model"  # or "dataset"


def is_name(name: str) -> bool:
    """Returns whether text can be the name of a repository, NAME or NAME@REVISION."""
    part = r"[A-Za-z0-9_]([\w.-]*[A-Za-z0-9_])?"
    return re.fullmatch(rf"({part}/)?{part}", name_and_revision(name)[0], re.ASCII) is not None


def is_here(name: str) -> bool:
    """Returns whether text names a file or folder of this machine."""
    return name != "" and Path(name).expanduser().exists()


def repos(config: Config, stages: Collection[str] = ("prepare", "base")) -> dict[str, Repository]:
    """Returns the repositories that these stages of a recipe read, by the key that names them."""
    found: dict[str, Repository] = {}
    if "base" in stages and config.model.hf is not None:
        found["model.hf"] = Repository(*name_and_revision(config.model.hf))
    if "prepare" in stages:
        if (name := config.domain.tokenizer) != BYTE:
            found["domain.tokenizer"] = Repository(*name_and_revision(name))
        for spec in config.domain.specs:
            if spec.path is not None:
                kind = "dataset" if spec.kind == "huggingface" else "model"
                key = f"domain.sources.{spec.name}.path"
                found[key] = Repository(spec.path, spec.revision, kind)
    return {key: each for key, each in found.items() if is_name(each.name) and not is_here(each[0])}


def refusals(repositories: Mapping[str, Repository]) -> Iterator[tuple[str, bool]]:
    """Yields a sentence on each key whose repository cannot be read, and whether for all machines.

    See `answers`; what several keys name is said once.
    """
    silent, reason = list[str](), ""
    first = {each: key for key, each in [*repositories.items()][::-1]}
    asked = {key: each for key, each in repositories.items() if first[each] == key}
    for key, answer in answers(asked).items():
        if isinstance(answer, NotChecked):
            silent, reason = [*silent, f"{key}={repositories[key].name}"], str(answer)
        else:
            yield f"{key}: {answer}", True
    if silent:
        yield (
            f"{', '.join(silent)} would be fetched from the Hugging Face hub, but {reason}: check "
            "the network, or give the folder of a copy.",
            False,
        )


def answers(repositories: Mapping[str, Repository]) -> dict[str, Exception]:
    """Returns why repositories cannot be read, by key: `NotChecked` if the hub does not answer.

    Models in the cache are not asked about; all others are at once.
    """
    asked = dict[str, Repository]()
    for key, (name, revision, kind) in repositories.items():
        pinned = name if revision is None else f"{name}@{revision}"
        files = ("config.json", "tokenizer_config.json") if kind == "model" else ()
        if not any(file_of(pinned, file) for file in files):
            asked[key] = repositories[key]
    with ThreadPoolExecutor(len(asked) or 1) as pool:
        pool.map(_answer, {*asked.values()})
    return {key: why for key, each in asked.items() if (why := _answer(each)) is not None}


def fetch_file(name: str, file: str) -> Path:
    """Returns a file of a model on the hub, from the cache if it is there.

    Raises:
        ValueError: the hub does not give it.
    """
    if (found := file_of(name, file)) is not None:
        return found
    if (refusal := _answer(Repository(*name_and_revision(name)))) is not None:
        raise ValueError(str(refusal))
    if (found := file_of(name, file, fetch=True)) is None:
        raise ValueError(f"The hub does not give {file} of {name}: correct the name.")
    return found


@functools.cache  # one command asks once
def _answer(repository: Repository) -> Exception | None:
    """Returns why a repository cannot be read, soon: libraries may try for minutes."""
    seconds = f"{_SECONDS:.0f} seconds"
    answer: list[Exception | None] = [NotChecked(f"the hub does not answer within {seconds}")]

    def ask() -> None:
        try:
            check_access(repository)
            answer[0] = None
        except (ValueError, NotChecked) as refusal:
            answer[0] = refusal

    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_SECONDS)
    return answer[0]


def check_access(repository: Repository) -> None:
    """Checks that a repository exists, and that this account may read it.

    Raises:
        ValueError: it does not exist, or is gated and the token or its terms are missing.
        NotChecked: the hub cannot be reached.
    """
    from huggingface_hub import auth_check, errors, repo_info

    name, revision, kind = repository
    try:
        auth_check(name, repo_type=kind)
        if revision is not None:
            repo_info(name, repo_type=kind, revision=revision, timeout=_SECONDS)
    except errors.GatedRepoError:
        raise ValueError(
            f"The {kind} {name} is gated, and this account may not read it: {GATED}."
        ) from None
    except errors.RepositoryNotFoundError:
        raise ValueError(
            f"The hub has no {kind} {name} that this account may read: correct its name, give a "
            "folder, or set HF_TOKEN."
        ) from None
    except errors.RevisionNotFoundError:
        raise ValueError(
            f"The {kind} {name} has no revision {revision}: give a commit, branch or tag of it."
        ) from None
    except Exception as error:  # network libraries raise many kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise NotChecked(f"the hub does not answer ({reason:.120})") from None
