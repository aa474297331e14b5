"""FLOPs of a forward pass by the usual count: two per parameter that processes a token.

Parameter-free operations are added: attention over the preceding positions, and the state of
Mamba and DeltaNet blocks, which is a few percent.
"""

from __future__ import annotations

from nemo_rod.lab.plan.shapes import Shape


def forward_flops(shape: Shape, block_size: int, *, prefix: int | None = None) -> float:
    """Returns the mean FLOPs of one token in a forward pass over blocks, or a prefix of them."""
    context = ((prefix or block_size) + 1) / 2  # attended positions of a token, itself included
    blocks = sum(2.0 * b.matrix_parameters + b.mixing + b.attending * context for b in shape.blocks)
    return blocks + 2.0 * shape.embedding  # the output layer


def recomputed_share(shape: Shape, block_size: int, recompute: str) -> float:
    """Returns the share of a forward pass that `train.recompute` adds to a backward pass."""
    if recompute == "selective":  # the core of attention
        attending = sum(b.attending for b in shape.blocks) * (block_size + 1) / 2
        return attending / forward_flops(shape, block_size)
    return float(recompute == "full")
