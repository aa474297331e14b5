"""FLOPs of a forward pass, in the usual count: two for every parameter that a token meets.

On top come what has no parameters: attention over the positions before the token, and the state of
Mamba and DeltaNet blocks, which is a few percent. A backward pass costs two forward passes.
"""

from __future__ import annotations

from nemo_rod.plan.shapes import Shape

BACKWARD = 2.0  # in forward passes


def forward_flops(shape: Shape, block_size: int, *, prefix: int | None = None) -> float:
    """Mean FLOPs of one token in a forward pass.

    Args:
        shape: the model.
        block_size: tokens of a block (S).
        prefix: tokens of a block that the pass reads; all of them by default.
    """
    context = ((prefix or block_size) + 1) / 2  # positions that a token attends to, itself included
    blocks = sum(2.0 * b.matrix_parameters + b.mixing + b.attending * context for b in shape.blocks)
    return blocks + 2.0 * shape.embedding  # the output layer


def training_flops(shape: Shape, block_size: int) -> float:
    """Mean FLOPs of one trained token: forward and backward, nothing recomputed."""
    return (1 + BACKWARD) * forward_flops(shape, block_size)
