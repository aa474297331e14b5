"""Roles of a job's sources: new data (adaptation) or data not to be forgotten (replay).

Sources are named by their paths, or by their position in the job's blend:

    roles={"/data/legal": "adaptation", "/data/old": "replay"}     everything below these paths
    roles={0: "adaptation", 1: "replay"}                           first and second of the blend

The longest matching path decides. Every source must have a role, and every key must match a source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath

from nemo_rod.roles import ROLES

Roles = Mapping[str | int, str]


def assign_roles(prefixes: Sequence[str], roles: Roles) -> list[str]:
    """Assigns a role to every source.

    Args:
        prefixes: path prefixes of the job's `.bin/.idx` files, in the blend's order.
        roles: roles by path or position, as the module's docstring describes.

    Returns:
        "adaptation" or "replay" for every prefix.

    Raises:
        ValueError: a source has no role, a key matches no source, or a role is unknown.
    """
    if not isinstance(roles, Mapping):
        raise ValueError(f"roles is {roles!r}: expected a role by path, or by number in the blend.")
    roles = {name if isinstance(name, int) else str(name): role for name, role in roles.items()}
    for name, role in roles.items():
        if role not in ROLES:
            raise ValueError(f"roles[{name!r}] is {role!r}: expected 'adaptation' or 'replay'.")
    keys: list[str | int] = []
    for number, prefix in enumerate(prefixes):
        above = [k for k in roles if isinstance(k, str) and PurePath(prefix).is_relative_to(k)]
        longest = max(above, key=lambda key: len(PurePath(key).parts), default=None)
        key = number if number in roles else longest
        if key is None:
            raise ValueError(
                f"The job reads {prefix} (number {number} of its blend), but 'roles' does not say "
                f"whether it is adaptation or replay: add it, or a folder above it, to "
                f"{sorted(map(str, roles))}."
            )
        keys.append(key)
    if unused := set(roles) - set(keys):
        raise ValueError(
            f"roles[{min(unused, key=str)!r}] matches no source of the job: expected paths at or "
            f"above {', '.join(prefixes)}, or numbers below {len(prefixes)}."
        )
    return [roles[key] for key in keys]


def name_sources(prefixes: Sequence[str]) -> list[str]:
    """Names sources by the fewest trailing parts of their paths that distinguish them.

    The names enter the block hashes, so they must not change when data moves to another disk.

    Raises:
        ValueError: two sources have the same path.
    """
    parts = [PurePath(prefix).parts for prefix in prefixes]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise ValueError(
        f"The job's blend names one of {', '.join(prefixes)} twice: join the two and their weights."
    )
