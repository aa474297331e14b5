"""What a parallel layout can split: one check for recipes, plans and jobs."""

from __future__ import annotations

from collections.abc import Container, Iterable

from nemo_rod.config import Parallel


def sequence_shares(parallel: Parallel) -> int:
    """Returns the number of equal parts into which a layout splits the positions of a block.

    Context parallelism needs pairs of parts, sequence parallelism one part per tensor rank.
    """
    pairs = 2 * parallel.context if parallel.context > 1 else 1
    return pairs * (parallel.tensor if parallel.sequence else 1)


def check_parallel(
    parallel: Parallel, sizes: Iterable[tuple[str, str, int]], model: str = "the model"
) -> None:
    """Refuses a layout whose own sizes do not fit each other, or do not divide a model.

    Args:
        parallel: the layout.
        sizes: axis, one of "pipeline", "tensor", "expert" and "sequence", with the name and value
            of each size that it must divide.
        model: the model, for the error.

    Raises:
        ValueError: an axis does not fit; the message names it and the size.
    """
    data, tensor, context = parallel.data, parallel.tensor, parallel.context
    pipeline, chunks, expert = parallel.pipeline, parallel.virtual_pipeline, parallel.expert
    sharing = data * tensor * context
    conditions = (
        (chunks > 1 and pipeline == 1, f"virtual_pipeline={chunks} needs parallel.pipeline > 1"),
        (parallel.sequence and tensor == 1, "sequence=true needs parallel.tensor > 1"),
        (sharing % expert, f"expert={expert} must divide data x tensor x context = {sharing}"),
        (
            expert > 1 and tensor > 1 and not parallel.sequence,
            f"expert={expert} with parallel.tensor > 1 needs parallel.sequence=true",
        ),
    )
    divisors = {
        "pipeline": (f"pipeline={pipeline} x virtual_pipeline={chunks}", pipeline * chunks),
        "tensor": (f"tensor={tensor}", tensor),
        "expert": (f"expert={expert}", expert),
        "sequence": (
            f"context={context} x tensor={tensor} with sequence={str(parallel.sequence).lower()}",
            sequence_shares(parallel),
        ),
    }
    reasons = [reason for is_broken, reason in conditions if is_broken]
    for axis, name, size in sizes:
        layout, divisor = divisors[axis]
        if size % divisor:
            reasons.append(f"{layout} does not divide {name}={size} of {model}")
    if reasons:
        raise ValueError(f"parallel.{reasons[0]}: choose another parallel layout.")


def check_layers(parallel: Parallel, kinds: Container[str], model: str = "the model") -> None:
    """Refuses a layout into which Megatron does not split layers of some kinds.

    Args:
        parallel: the layout.
        kinds: of "mamba", "delta" (gated delta rule) and "experts", those that the model has;
            "images" if it takes them, and "gemma4" if it is one.
        model: the model, for the error.

    Raises:
        ValueError: it splits them in no such way; the message says which, and what to set.
    """
    sliced = parallel.tensor > 1 and not parallel.sequence
    for refused, key, why in (
        ("mamba" in kinds and parallel.virtual_pipeline > 1, "virtual_pipeline",
         "Megatron has no interleaved schedule for models with Mamba layers; set it to 1"),
        ("images" in kinds and parallel.context > 1, "context",
         "models for images and text split a block themselves, a second time; set it to 1"),
        ("gemma4" in kinds and parallel.pipeline > 1, "pipeline",
         "Megatron-Bridge splits no Gemma 4 into stages; set it to 1"),
        ("gemma4" in kinds and parallel.tensor > 1, "tensor",
         "Megatron-Bridge does not add up all gradients of Gemma 4; set it to 1"),
        ("experts" in kinds and sliced, "tensor", "its experts need parallel.sequence=true"),
        ("delta" in kinds and sliced, "tensor",
         "Megatron adds up the gradients of the norms in Gated DeltaNet layers only with "
         "parallel.sequence=true"),
    ):  # fmt: skip
        if refused:
            raise ValueError(
                f"parallel.{key}={getattr(parallel, key)} does not work with {model}: {why}."
            )


def check_nodes(parallel: Parallel, gpus_per_node: int) -> None:
    """Refuses a layout whose processes do not fill whole nodes, where there are several.

    Raises:
        ValueError: the nodes are not filled; the message has both numbers.
    """
    world = parallel.world_size
    if world > gpus_per_node and world % gpus_per_node:
        raise ValueError(
            f"The layout's {world} processes do not fill nodes of cluster.gpus_per_node="
            f"{gpus_per_node}: change parallel.data, or the cluster."
        )
