"""Names on the hub, and single files of a checkpoint: from its folder, the cache, or the hub."""

from __future__ import annotations

import re
from pathlib import Path


def file_of(name: str, file: str, *, fetch: bool = False) -> Path | None:
    """Returns a file of a folder, or of NAME or NAME@REVISION; None if it is not there.

    Args:
        name: folder, or name on the hub.
        file: path of the file in it.
        fetch: whether to ask the hub, which has the newest one, before the cache.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder / file if (folder / file).is_file() else None
    try:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache
    except ModuleNotFoundError:
        if fetch:
            raise
        return None  # nobody has cached it

    repository, revision = name_and_revision(name)
    try:
        if fetch:
            return Path(hf_hub_download(repository, file, revision=revision))
        found = try_to_load_from_cache(repository, file, revision=revision)
    except (OSError, ValueError):  # no such file, no network, or the name of a missing folder
        return None
    return Path(found) if isinstance(found, str) else None


def name_and_revision(name: str) -> tuple[str, str | None]:
    """Splits NAME@REVISION on the hub; the revision is None without one, and for a folder."""
    match = re.fullmatch(r"([\w.-]+(?:/[\w.-]+)?)@([\w./-]+)", name)
    return (name, None) if match is None or Path(name).exists() else (match[1], match[2])


def is_commit(revision: str | None) -> bool:
    """Returns whether a revision on the hub is a commit, which unlike a branch or tag is fixed."""
    return revision is not None and re.fullmatch("[0-9a-f]{40}", revision) is not None
