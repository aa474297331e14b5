"""Secrets, the key of a job, and a checkpoint's own code, to which consent is typed, never read."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# a value of cluster.env that is taken from the environment of the job, and written nowhere
REFERENCE = re.compile(r"\$\{oc\.env:([A-Za-z_][A-Za-z0-9_]*)\}")
_TAKEN = re.compile(r"oc\.env:\s*([^},\s]*)")  # wherever a text would take in a variable
# Names of values that open accounts. A "token" alone may be one of text, but not in a variable.
_SECRET = (
    r"(password|passwd|passphrase|secret|credential)s?"
    r"|(api|access|auth|bearer|session|private|hf|hub|git(hu|la)b|wandb)_?(key|token)s?"
)
_SECRET_KEY = re.compile(rf"(?i)({_SECRET})$")
_SECRET_VARIABLE = re.compile(rf"(?i)({_SECRET}|(^|_)(token|key|pat))$")
_SECRET_TEXT = re.compile(
    r"\b(hf|ghp|gho|github_pat|glpat|sk|xox[abp])[_-]\w{16,}|\bAKIA[0-9A-Z]{16}\b"  # known forms
    r"|://[^/\s:@]*:[^/\s@$]+@"  # an address with a password, such as a proxy's
    r"|(?i:[?&](x-(amz|goog)-)?sig(nature)?=)"  # a signed one, of a bucket
    rf"|(?i:\bexport\s+\w*({_SECRET}|_token|_key)=['\"]?[^\s'\"$`])"  # a line of cluster.setup
)
KEY = "NEMO_ROD_KEY"  # environment variable: a secret that only this multi-node job knows


def sign(data: bytes, key: str) -> bytes:
    """Returns data behind a code which proves that it comes from a holder of the job's key."""
    return hmac.digest(key.encode(), data, hashlib.sha256) + data


def verify(data: bytes, key: str) -> bytes | None:
    """Returns what `sign` was given; None if its code is of another key."""
    content = data[hashlib.sha256().digest_size :]
    return content if hmac.compare_digest(data, sign(content, key)) else None


def is_secret(key: str, value: Any) -> bool:
    """Returns whether a value of a configuration looks like one that opens an account."""
    is_variable = key.startswith("cluster.env.")
    if not isinstance(value, str) or not value or (is_variable and REFERENCE.fullmatch(value)):
        return False
    name, taken = _SECRET_VARIABLE if is_variable else _SECRET_KEY, _TAKEN.findall(value)
    is_named = name.search(key.rpartition(".")[2]) or any(map(_SECRET_VARIABLE.search, taken))
    return bool(is_named or _SECRET_TEXT.search(value) or "$" in "".join(taken))


def refuse_secrets(values: Any, key: str = "") -> None:
    """Refuses a configuration with a secret, which files of the run would hold; see `is_secret`.

    Args:
        values: not resolved yet.
        key: the dotted key of the values.

    Raises:
        ValueError: there is a secret; the message has its key, but not its value.
    """
    if isinstance(values, dict):
        for name, value in values.items():
            refuse_secrets(value, f"{key}.{name}".removeprefix("."))
    elif isinstance(values, list):
        for value in values:
            refuse_secrets(value, key)
    elif is_secret(key, values):
        name = key.rpartition(".")[2] if key.startswith("cluster.env.") else "NAME"
        raise ValueError(
            f"{key} would be written to the run's folder, and looks like a secret: export it "
            f"in the shell and forward it by cluster.env.{name}=${{oc.env:{name}}}, or read it "
            "from a file of yours in a line of cluster.setup."
        )


class UntrustedCodeError(ValueError):
    """A checkpoint or a tokenizer needs its own code, which is not allowed to run."""


@contextmanager
def explain_own_code(subject: str, key: str = "model.trust_remote_code") -> Iterator[None]:
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
            f"{key}=true, or install a transformers that has its class."
        ) from error
