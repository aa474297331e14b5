"""Content digests: what decides whether something is still the same."""

from __future__ import annotations

import hashlib
from pathlib import Path


def weights_digest(checkpoint: Path) -> str:
    """Content digest of a Hugging Face checkpoint's weights, hex.

    Raises:
        ValueError: if the folder holds no safetensors.
    """
    files = sorted(checkpoint.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"{checkpoint} holds no *.safetensors: expected a Hugging Face checkpoint."
        )
    state = hashlib.blake2b(digest_size=16)
    for file in files:
        with open(file, "rb") as stream:
            while part := stream.read(1 << 24):
                state.update(part)
    return state.hexdigest()


def digest(data: bytes) -> str:
    """Short content digest, hex."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()
