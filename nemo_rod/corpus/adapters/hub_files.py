"""Single files of a checkpoint or tokenizer: from its folder, the hub's cache, or the hub."""

from __future__ import annotations

from pathlib import Path

from nemo_rod.trust import name_and_revision


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
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    repository, revision = name_and_revision(name)
    try:
        if fetch:
            return Path(hf_hub_download(repository, file, revision=revision))
        found = try_to_load_from_cache(repository, file, revision=revision)
    except (OSError, ValueError):  # no such file, no network, or the name of a missing folder
        return None
    return Path(found) if isinstance(found, str) else None
