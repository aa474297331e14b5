"""Checkpoints and tokenizers of others: their names, and their own code, which may have to run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def name_and_revision(name: str) -> tuple[str, str | None]:
    """Splits the name of a model or tokenizer on the hub, NAME or NAME@REVISION.

    Returns:
        The name, and the commit, branch or tag; None without one, and for a folder.
    """
    found = re.fullmatch(r"([\w.-]+(?:/[\w.-]+)?)@([\w./-]+)", name)
    return (name, None) if found is None or Path(name).exists() else (found[1], found[2])


def is_commit(revision: str | None) -> bool:
    """Whether a revision of something on the hub is a commit, which nobody can move."""
    return revision is not None and re.fullmatch("[0-9a-f]{40}", revision) is not None


class UntrustedCodeError(ValueError):
    """A checkpoint or a tokenizer needs code of its own, which may not run."""


@contextmanager
def code_of_its_own(what: str) -> Iterator[None]:
    """Names the key that lets the code run, where loading `what` fails for want of it.

    Raises:
        UntrustedCodeError: a library refused to run that code.
    """
    try:
        yield
    except Exception as error:  # each library wraps the refusal in an error of its own
        if "trust_remote_code" not in str(error):
            raise
        raise UntrustedCodeError(
            f"{what} comes with code of its own, which would run here: read that code and set "
            "model.trust_remote_code=true, or install a transformers that has its class."
        ) from error


def refuse_code_of_its_own(checkpoint: str, host: str, *, key: str) -> None:
    """Refuses a checkpoint, or tokenizer, with code of its own for a host that always runs it.

    `key` says that it may.

    Raises:
        UntrustedCodeError: its config.json or tokenizer_config.json names such code.
    """
    for name in ("config.json", "tokenizer_config.json"):
        if json.loads(_text_of(checkpoint, name) or "{}").get("auto_map"):
            raise UntrustedCodeError(
                f"{name} of {checkpoint} names code of its own, which {host} would run: read that "
                f"code and set {key}=true, or take a checkpoint without it."
            )


def _text_of(checkpoint: str, name: str) -> str | None:
    """Returns a file of a local or published checkpoint; None if it has no such file."""
    file = Path(checkpoint, name)
    if not Path(checkpoint).is_dir():
        from transformers.utils import cached_file

        try:
            repository, revision = name_and_revision(checkpoint)
            file = Path(str(cached_file(repository, name, revision=revision)))
        except OSError:
            return None
    return file.read_text("utf-8") if file.is_file() else None
