"""Roles of a job's sources: new data (adaptation) or data not to be forgotten (replay).

Sources are named by their paths, or by their position in the job's blend:

    roles={"/data/legal": "adaptation", "/data/old": "replay"}     everything below these paths
    roles={0: "adaptation", 1: "replay"}                           first and second of the blend

The longest matching path decides. Every source must have a role, and every key must match a source.
A job whose splits read different files names all of them by paths; numbers are places in the blend
of the train split, and hold for a source of another split if it is the same, or has the same name
and no folder of another one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePath
from typing import Any

from nemo_rod.roles import ROLES

Roles = Mapping[str | int, str]


def assign_roles(prefixes: Sequence[str], roles: Roles, *, train: Sequence[str]) -> list[str]:
    """Assigns a role to every source of a split.

    Args:
        prefixes: path prefixes of the split's `.bin/.idx` files, in the blend's order.
        roles: roles by path or position, as the module's docstring describes.
        train: those of the train split, whose places are numbers in `roles`.

    Returns:
        "adaptation" or "replay" for every prefix.

    Raises:
        ValueError: a source has no role.
    """
    numbers = {prefix: number for number, prefix in enumerate(train)}
    names, own = name_sources(train), name_sources(prefixes)
    if len(own) > 1 and {*names} == {*own}:  # other files of the same sources
        for prefix, name in zip(prefixes, own, strict=True):
            alike, parts = train[names.index(name)], {*PurePath(prefix).parts}
            parts -= {*PurePath(alike).parts}  # none of which may be another source's
            if all(parts.isdisjoint(PurePath(source).parts) for source in train):
                numbers[prefix] = names.index(name)
    assigned = []
    for number, prefix in enumerate(prefixes):
        key = _key(prefix, numbers.get(prefix), roles)
        if key is None:
            raise ValueError(
                f"The job reads {prefix} (number {number} of its blend), but 'roles' does not say "
                "whether it is adaptation or replay: add its path, or a folder above it, to "
                f"{sorted(map(str, roles))}."
            )
        assigned.append(roles[key])
    return assigned


def check_roles(roles: Any, splits: Sequence[Sequence[str]]) -> Roles:
    """Returns roles whose keys are numbers or texts.

    Args:
        roles: the user's.
        splits: path prefixes of the splits that are known, of the train split first.

    Raises:
        ValueError: a role is unknown, or a key matches no source.
    """
    if not isinstance(roles, Mapping):
        raise ValueError(f"roles is {roles!r}: expected a role by path, or by number in the blend.")
    roles = {name if type(name) is int else str(name): role for name, role in roles.items()}
    for name, role in roles.items():
        if role not in ROLES:
            raise ValueError(f"roles[{name!r}] is {role!r}: expected 'adaptation' or 'replay'.")
    train, *others = splits
    every = list(dict.fromkeys([*train, *(prefix for split in others for prefix in split)]))
    used = [_key(prefix, number, roles) for number, prefix in enumerate(train)]
    used += [_key(prefix, None, roles) for prefix in every[len(train) :]]
    if unused := set(roles) - set(used):
        raise ValueError(
            f"roles[{min(unused, key=str)!r}] matches no source of the job: expected paths at or "
            f"above {', '.join(every)}, or numbers below {len(train)}."
        )
    return roles


def check_weights(prefixes: Sequence[str], weights: Iterable[Any] | None) -> None:
    """Refuses, by a ValueError, weights of a blend of which Megatron makes no data."""
    for prefix, weight in zip(prefixes, [] if weights is None else weights, strict=False):
        is_fit = False
        with suppress(TypeError, ValueError):
            is_fit = 0 < float(weight) < math.inf  # Megatron takes texts, too
        if not is_fit:
            raise ValueError(
                f"The job's blend reads {prefix} with weight {weight}: expected a finite number "
                "above 0; leave a source out that is not to be read, and its key in 'roles'."
            )


def _key(prefix: str, number: int | None, roles: Roles) -> str | int | None:
    """Returns the key of a source's role: its number, or else the longest path above it."""
    if number is not None and number in roles:
        return number
    above = [k for k in roles if isinstance(k, str) and PurePath(prefix).is_relative_to(k)]
    return max(above, key=lambda key: len(PurePath(key).parts), default=None)


def name_sources(prefixes: Sequence[str]) -> list[str]:
    """Names sources by the fewest trailing parts of their paths that distinguish them.

    The names enter the block hashes, so they must not change when data moves to another disk.

    Raises:
        ValueError: two sources have the same path, or a path is not UTF-8.
    """
    parts = [PurePath(prefix).parts for prefix in prefixes]
    if foreign := [prefix for prefix in prefixes if not _is_text(prefix)]:
        raise ValueError(
            f"The job reads {foreign[0]!r}, whose name is not UTF-8: names of sources enter files "
            "and loggers as text; rename the folder, or give a link to it."
        )
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise ValueError(
        f"The job's blend names one of {', '.join(prefixes)} twice: join the two and their weights."
    )


def _is_text(path: str) -> bool:
    """Returns whether a path has no bytes that Python could only keep as surrogates."""
    return not any("\ud800" <= letter <= "\udfff" for letter in path)
