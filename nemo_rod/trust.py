"""Third-party checkpoints and tokenizers: their names, and the code that they bring along."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def name_and_revision(name: str) -> tuple[str, str | None]:
    """Splits NAME@REVISION on the hub; the revision is None without one, and for a folder."""
    match = re.fullmatch(r"([\w.-]+(?:/[\w.-]+)?)@([\w./-]+)", name)
    return (name, None) if match is None or Path(name).exists() else (match[1], match[2])


def is_commit(revision: str | None) -> bool:
    """Returns whether a revision on the hub is a commit, which unlike a branch or tag is fixed."""
    return revision is not None and re.fullmatch("[0-9a-f]{40}", revision) is not None


class UntrustedCodeError(ValueError):
    """A checkpoint or a tokenizer needs its own code, which is not allowed to run."""


@contextmanager
def explain_own_code(subject: str) -> Iterator[None]:
    """Re-raises a library's refusal to run code of `subject`, with the key that allows it.

    Raises:
        UntrustedCodeError: a library refused to run its code.
    """
    try:
        yield
    except Exception as error:  # each library wraps the refusal in its own error
        if "trust_remote_code" not in str(error):
            raise
        raise UntrustedCodeError(
            f"{subject} comes with code of its own, which would run here: read that code and set "
            "model.trust_remote_code=true, or install a transformers that has its class."
        ) from error
