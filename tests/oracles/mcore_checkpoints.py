"""Checkpoints that Megatron-core itself saves, in pieces as different layouts would make them.

python tests/oracles/mcore_checkpoints.py ROOT
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
LAYERS, NORM = "decoder.layers.mlp.linear_fc1.weight", "decoder.final_layernorm.weight"
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
FACTOR = "decoder.layers.mlp.linear_fc1.adapter.linear_in.weight"
COUNTS = "decoder.layers.mlp.router.counts"
# into how many pieces each axis is cut, as by tensor and pipeline parallelism
GRIDS: dict[str, dict[str, tuple[int, ...]]] = {
    "whole": {LAYERS: (2, 1, 1)},
    "halves": {LAYERS: (2, 2, 1), EMBEDDING: (2, 1), OUTPUT: (2, 1)},
    "thirds": {LAYERS: (2, 3, 1), EMBEDDING: (3, 1), OUTPUT: (3, 1)},
}


def tensors_of(seed: int, dtype: torch.dtype = torch.float32) -> Tensors:
    """The model's tensors, whole."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    return {
        EMBEDDING: draw(12, 4),
        LAYERS: draw(2, 6, 4),
        NORM: draw(4),
        OUTPUT: draw(12, 4),
        COUNTS: torch.tensor([1, 2]),
    }


def longer(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor[:4]])


_OTHER = tensors_of(1)
_PADDED = {name: longer(_OTHER[name]) for name in (EMBEDDING, OUTPUT)}
# name -> (tensors, grid, what an object of the model says)
CHECKPOINTS: dict[str, tuple[Tensors, str, str]] = {
    "base": (tensors_of(0), "whole", "same"),
    "base_bf16": (tensors_of(0, torch.bfloat16), "halves", "same"),
    "adapted": (_OTHER, "halves", "same"),
    "adapted_bf16": (tensors_of(1, torch.bfloat16), "thirds", "same"),
    "adapted_thirds": (_OTHER, "thirds", "same"),
    "padded": (_OTHER | _PADDED, "halves", "same"),
    "missing": ({k: v for k, v in _OTHER.items() if k != NORM}, "whole", "same"),
    "foreign": (_OTHER | {"extra": torch.ones(2)}, "whole", "same"),
    "shape": (_OTHER | {NORM: torch.ones(5)}, "whole", "same"),
    "kind": (_OTHER | {NORM: torch.ones(4, dtype=torch.int64)}, "whole", "same"),
    "counts": (_OTHER | {COUNTS: torch.tensor([1, 3])}, "whole", "same"),
    "quantised": (_OTHER | {NORM: torch.ones(4).to(torch.float8_e4m3fn)}, "whole", "same"),
    "low_rank": (_OTHER | {FACTOR: torch.ones(2, 4)}, "whole", "same"),
    "object": (_OTHER, "whole", "other"),
}


def pieces(name: str, tensor: torch.Tensor, grid: tuple[int, ...]) -> list[Any]:
    from megatron.core.dist_checkpointing import ShardedTensor

    made = []
    for place in itertools.product(*map(range, grid)):
        piece = tensor
        for axis, (index, count) in enumerate(zip(place, grid, strict=True)):
            piece = piece.chunk(count, dim=axis)[index]
        offsets = [(axis, index, grid[axis]) for axis, index in enumerate(place)]
        made.append(ShardedTensor.from_rank_offsets(name, piece.contiguous(), *offsets))
    return made


def main() -> None:
    import nemo_rod.megatron  # noqa: F401  makes Megatron importable without CUDA

    root = Path(sys.argv[1])
    rendezvous = f"file://{root / 'rendezvous'}"
    torch.distributed.init_process_group("gloo", init_method=rendezvous, world_size=1, rank=0)
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject

    for name, (tensors, grid, word) in CHECKPOINTS.items():
        state = {**tensors, f"optimizer.state.exp_avg.{NORM}": torch.ones(4)}
        sharded = {
            key: pieces(key, tensor, GRIDS[grid].get(key, (1,) * tensor.ndim))
            for key, tensor in state.items()
        }
        objects = {
            "rng_state": [name],
            "decoder.layers.mlp.linear_fc1._extra_state": name,
            "decoder.layers.mlp.settings": word,
        }
        common = {
            "args": argparse.Namespace(hidden_size=4),
            "checkpoint_version": 3.0,
            "iteration": 8,
            "optimizer": {"param_groups": []},
        }
        folder = root / name / "iter_0000008"
        folder.mkdir(parents=True)
        dist_checkpointing.save(
            {
                **sharded,
                **common,
                "objects": {k: ShardedObject(k, v, (1,), (0,)) for k, v in objects.items()},
            },
            str(folder),
            content_metadata={"singleton_local_shards": False},
        )
        (root / name / "latest_checkpointed_iteration.txt").write_text("8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
