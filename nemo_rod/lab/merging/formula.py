"""The arithmetic of a merge, and its requirements on the two checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Names in PEFT and Megatron-Bridge.
_LOW_RANK = re.compile(r"\.(lora_[AB]|adapter\.(adapter_\w+\.)?linear_(in|out))\.")


def interpolate(name: str, base: torch.Tensor, adapted: torch.Tensor, lam: float) -> torch.Tensor:
    """Returns `(1 - lam) * base + lam * adapted` for one tensor, or for one piece of it.

    Args:
        name: name of the tensor, for errors.
        base: any shape; a non-floating dtype must equal the adapted side's.
        adapted: same shape as `base`.
        lam: weight of the adapted side, in [0, 1].

    Returns:
        Same shape, in the dtype that can represent both; exact at the ends and where they agree.

    Raises:
        ValueError: if the dtypes differ and are not both floating, or non-floating values differ
            between the ends.
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
    # lerp of two equal infinities (a stored mask) is NaN, hence the explicit equal case.
    merged = torch.where(base == adapted, base, torch.lerp(base, adapted, lam))
    return merged.to(stored)


def refuse_unmatched(names: Sequence[str], folder: Path) -> None:
    """Refuses tensors that `folder` lacks and the other checkpoint has; none passes."""
    if names:
        raise ValueError(
            f"{folder} lacks {len(names)} tensor(s) that the other checkpoint holds "
            f"(the first is {names[0]!r}); merge two checkpoints of the same architecture"
        )


def refuse_shapes(
    name: str, base: Sequence[int], adapted: Sequence[int], base_dir: Path, adapted_dir: Path
) -> None:
    """Refuses a tensor whose shapes differ."""
    if tuple(base) != tuple(adapted):
        raise ValueError(
            f"tensor {name!r} has shape {tuple(adapted)} in {adapted_dir} but {tuple(base)} in "
            f"{base_dir}; merge two models of the same architecture"
        )


def refuse_dtypes(name: str, base: torch.dtype, adapted: torch.dtype) -> None:
    """Refuses dtypes without an interpolation: only floating ones may differ."""
    if base != adapted and not (base.is_floating_point and adapted.is_floating_point):
        raise ValueError(
            f"tensor {name!r} is {base} in one checkpoint and {adapted} in the other; "
            f"merge two checkpoints of the same architecture"
        )


def refuse_quantised(name: str, dtype: str, quantised: bool, folder: Path) -> None:
    """Refuses quantised values: without their scales, they cannot be interpolated."""
    if quantised:
        raise ValueError(
            f"tensor {name!r} in {folder} is quantised ({dtype}); merge the unquantised checkpoints"
        )


def refuse_low_rank(names: Iterable[str], folder: Path) -> None:
    """Refuses low-rank factors: the product of interpolated factors is not an interpolation."""
    for name in filter(_LOW_RANK.search, names):
        raise ValueError(
            f"tensor {name!r} in {folder} is a low-rank factor; merge the adapter into its model "
            f"first, and then the models"
        )
