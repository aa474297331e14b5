"""Gated DeltaNet on Blackwell, where older kernels of flash-linear-attention are at fault."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

# Capabilities of Blackwell GPUs. Before 0.6.0, the backward pass hangs or has NaN gradients there,
# and the forward pass differs between calls (flash-linear-attention, issues 913, 945, 999, 1228).
_BLACKWELL, _FIXED = (10, 12), (0, 6, 0)
INSTALL = "pip install --no-deps fla-core==0.6.0 flash-linear-attention==0.6.0"


def refuse_faulty_kernels(provider: Any) -> None:
    """Refuses a model with Gated DeltaNet on a GPU on which the installed kernels are at fault.

    Raises:
        ValueError: the message has the version and the command that installs another one.
    """
    if getattr(provider, "experimental_attention_variant", None) == "gated_delta_net":
        problem = fault(torch.cuda.get_device_capability if torch.cuda.is_available() else None)
        if problem is not None:
            raise ValueError(problem)


def fault(capability: Callable[[], tuple[int, int]] | None) -> str | None:
    """Returns why Gated DeltaNet cannot be trusted here; None if nothing is known against it.

    Args:
        capability: returns the GPU's compute capability; None without a GPU.
    """
    installed = None
    with suppress(importlib.metadata.PackageNotFoundError):
        installed = importlib.metadata.version("fla-core")
    if installed is None or capability is None or capability()[0] not in _BLACKWELL:
        return None
    if tuple(map(int, re.findall(r"\d+", installed)[:3])) >= _FIXED:
        return None
    return (
        f"fla-core {installed} has faulty kernels of Gated DeltaNet on GPUs of compute capability "
        f"{'.'.join(map(str, capability()))}: they may hang, and give NaN gradients or losses that "
        f"differ between calls; expected 0.6.0 or newer: {INSTALL}."
    )
