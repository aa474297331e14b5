"""The types of this room's arrays. The suffix of an array's name is its shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]  # block ids, or positions in a pool
Mask = npt.NDArray[np.bool_]
Nats = npt.NDArray[np.float32]  # losses and scores per token, or sums of losses
Floats = npt.NDArray[np.floating]
Bytes = npt.NDArray[np.uint8]  # hashes of blocks [C, 16], or records [N, B]
Records = npt.NDArray[np.void]


def freeze(record: Any, *names: str) -> None:
    """Replaces arrays of a frozen dataclass by views that cannot be written to."""
    for name in names:
        if (array := getattr(record, name)) is not None:
            object.__setattr__(record, name, read_only(array))


def read_only(array: npt.ArrayLike) -> npt.NDArray[Any]:
    """Returns a view of an array that cannot be written to, as parts of others are given."""
    view = np.asarray(array).view()
    view.flags.writeable = False
    return view
