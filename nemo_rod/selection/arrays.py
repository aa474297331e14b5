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


def read_only(array: Any) -> Any:
    """Returns a view of an array that cannot be written to; None of None."""
    if array is not None:
        array = np.asarray(array).view()
        array.flags.writeable = False
    return array
