"""The loss of a block, or of its beginning, from partial sums over its eighths.

    chunk          0        1              7
    targets    [0, S/8) [S/8, S/4) ... [7S/8, S - 1)      target i: token i + 1, at position i

Shape suffixes: C = blocks, N = parts of a block, S = tokens per block.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nemo_rod.selection.arrays import Floats, Nats
from nemo_rod.selection.references.folder import NUM_PARTS


def num_targets(block_size: int, eighths: int = NUM_PARTS) -> int:
    """Returns how many next-token targets the first `eighths` of a block hold."""
    assert block_size % NUM_PARTS == 0 and 1 <= eighths <= NUM_PARTS, (block_size, eighths)
    return min(eighths * (block_size // NUM_PARTS), block_size - 1)


def block_loss(sums_C8: npt.ArrayLike, block_size: int, eighths: int = NUM_PARTS) -> Nats:
    """Turns partial sums into losses, for references and online scoring alike.

    The order of addition is fixed: equal sums give bitwise equal losses, so that a replay block
    scores exactly 0 at the base model.

    Args:
        sums_C8: Partial sums of the token losses, nats, float32 [C, 8].
        block_size: Tokens per block (S).
        eighths: Number of leading eighths to use; 8 is the whole block.

    Returns:
        float32 [C], the mean over `num_targets(block_size, eighths)` targets, nats per token
        (paper, Eq. "sequence loss").
    """
    sums_C8 = np.asarray(sums_C8, dtype=np.float32)
    assert sums_C8.ndim == 2 and sums_C8.shape[1] >= eighths, sums_C8.shape
    return mean_loss(sums_C8[:, :eighths], num_targets(block_size, eighths))


def mean_loss(sums_CN: Nats, num_targets_C: Floats | int) -> Nats:
    """Turns partial sums [C, N] over some targets, one number or [C], into mean losses [C]."""
    total_C = np.zeros(len(sums_CN), dtype=np.float64)
    for chunk in range(sums_CN.shape[1]):
        total_C += sums_CN[:, chunk]
    return (total_C / num_targets_C).astype(np.float32)
