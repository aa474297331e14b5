"""The arithmetic of a merge, and what two checkpoints must have in common for it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# As PEFT and Megatron-Bridge name them.
_LOW_RANK = re.compile(r"\.(lora_[AB]|adapter\.(adapter_\w+\.)?linear_(in|out))\.")


def interpolate(name: str, base: torch.Tensor, adapted: torch.Tensor, lam: float) -> torch.Tensor:
    """`(1 - lam) * base + lam * adapted` of one tensor, or of the same piece of one.

    Args:
        name: of the tensor, for errors.
        base: any shape; a dtype that is not floating must agree with the adapted side's.
        adapted: the same shape.
        lam: weight of the adapted side, in [0, 1].

    Returns:
        The same shape, in the dtype that holds both; exact at the ends and where they agree.

    Raises:
        ValueError: if the dtypes differ and are not both floating, or the values differ between
            the ends and are not floating.
    """
    import torch

    refuse_dtypes(name, base.dtype, adapted.dtype)
    if not base.is_floating_point():
        if 0.0 < lam < 1.0 and not torch.equal(base, adapted):
            raise ValueError(
                f"tensor {name!r} is {base.dtype} and differs between the checkpoints, expected a "
                f"floating dtype to interpolate; merge the unquantised checkpoints"
            )
        return base if lam == 0.0 else adapted
    stored = torch.promote_types(base.dtype, adapted.dtype)
    wide = torch.promote_types(stored, torch.float32)
    if lam in (0.0, 1.0):
        return (base if lam == 0.0 else adapted).to(stored)
    base, adapted = base.to(wide), adapted.to(wide)
    # lerp of two equal infinities (a stored mask) would be NaN, hence the explicit equal case.
    merged = torch.where(base == adapted, base, torch.lerp(base, adapted, lam))
    return merged.to(stored)


def refuse_unmatched(names: Sequence[str], folder: Path) -> None:
    """Refuses tensors that only the other checkpoint holds.

    Args:
        names: what `folder` lacks; empty is fine.
        folder: the checkpoint that lacks them.
    """
    if names:
        raise ValueError(
            f"{folder} lacks {len(names)} tensor(s) that the other checkpoint holds "
            f"(the first is {names[0]!r}); merge two checkpoints of the same architecture"
        )


def refuse_shapes(
    name: str, base: Sequence[int], adapted: Sequence[int], base_dir: Path, adapted_dir: Path
) -> None:
    """Refuses a tensor whose shape is not the same on both sides."""
    if tuple(base) != tuple(adapted):
        raise ValueError(
            f"tensor {name!r} has shape {tuple(adapted)} in {adapted_dir} but {tuple(base)} in "
            f"{base_dir}; merge two models of the same architecture"
        )


def refuse_dtypes(name: str, base: torch.dtype, adapted: torch.dtype) -> None:
    """Refuses two dtypes that have no interpolation: only two floating ones may differ."""
    if base != adapted and not (base.is_floating_point and adapted.is_floating_point):
        raise ValueError(
            f"tensor {name!r} is {base} in one checkpoint and {adapted} in the other; "
            f"merge two checkpoints of the same architecture"
        )


def refuse_quantised(name: str, dtype: str, quantised: bool, folder: Path) -> None:
    """Refuses values that mean nothing without their scales: interpolating them is wrong."""
    if quantised:
        raise ValueError(
            f"tensor {name!r} in {folder} is quantised ({dtype}); merge the unquantised checkpoints"
        )


def refuse_low_rank(names: Iterable[str], folder: Path) -> None:
    """Refuses low-rank factors: the product of two interpolated factors is no interpolation."""
    for name in filter(_LOW_RANK.search, names):
        raise ValueError(
            f"tensor {name!r} in {folder} is a low-rank factor; merge the adapter into its model "
            f"first, and then the models"
        )
