"""The self-distillation score on ranks that share a model; each rank prints what it finds.

torchrun ... tests/workers/distillation_worker.py logits
torchrun ... tests/workers/distillation_worker.py context

logits: a vocabulary that all ranks share, beside the same in one piece.
context: blocks whose positions all ranks share. Attention across ranks needs TransformerEngine and
so a GPU; this model looks at one position at a time, all else is real.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
import torch.distributed as dist

import nemo_rod.megatron  # noqa: F401  makes Megatron importable without CUDA

BLOCKS, BLOCK_SIZE, VOCABULARY, TOP_K = 6, 64, 24, 5


def split_vocabulary() -> dict[str, object]:
    from nemo_rod.megatron.scoring.distillation import outcome_logprobs, soft_loss, top_ids

    generator = torch.Generator().manual_seed(0)
    whole = (4 * torch.randn(8, 3, VOCABULARY, generator=generator)).round()  # with many ties
    rank, size = dist.get_rank(), dist.get_world_size()
    part = whole.chunk(size, dim=-1)[rank].clone()
    before, worst, same = part.clone(), 0.0, True
    for top_k in (1, TOP_K, VOCABULARY - 2):
        # two entries are padding, both on the last rank
        ids = top_ids(whole, top_k, VOCABULARY - 2)
        same &= bool((top_ids(part, top_k, VOCABULARY - 2, dist.group.WORLD) == ids).all())
        one = outcome_logprobs(whole, ids)
        other = outcome_logprobs(part, ids, dist.group.WORLD)
        kept = one.half()
        difference = soft_loss(one, kept) - soft_loss(other, kept)
        worst = max(worst, float((one - other).abs().max()), float(difference.abs().max()))
    unchanged = bool((part == before).all())
    return {"same ids": same, "same logits": unchanged, "largest difference": worst}


class Store:
    block_size = BLOCK_SIZE

    def tokens(self, block_ids: np.ndarray) -> np.ndarray:
        every = np.random.default_rng(0).integers(0, VOCABULARY, (BLOCKS, BLOCK_SIZE))
        return every[block_ids].astype(np.int32)


class Kept:
    """A teacher of the even blocks."""

    def __init__(self, ids: np.ndarray, logprobs: np.ndarray) -> None:
        self.ids, self.logprobs = ids, logprobs

    def covers(self, block_ids: np.ndarray) -> np.ndarray:
        return block_ids % 2 == 0

    def __getitem__(self, block_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.ids[block_ids], self.logprobs[block_ids]


def shared_positions() -> dict[str, object]:
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.enums import ModelType
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    from nemo_rod.megatron.batches import micro_batches
    from nemo_rod.megatron.scoring.distillation import (
        SoftTargets,
        TopKTargets,
        outcome_logprobs,
        top_ids,
    )
    from nemo_rod.megatron.scoring.scorer import MegatronScorer

    context = dist.get_world_size()
    parallel_state.initialize_model_parallel(context_parallel_size=context)
    tensor_parallel.model_parallel_cuda_manual_seed(0)

    class OnePositionAtATime(torch.nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.model_type, self.post_process = ModelType.encoder_or_decoder, True
            self.config = TransformerConfig(
                num_layers=1, hidden_size=8, num_attention_heads=1, context_parallel_size=context
            )
            generator = torch.Generator().manual_seed(seed)
            self.table = 3 * torch.randn(VOCABULARY, VOCABULARY, generator=generator)
            self.output_layer = Logits()

        def set_input_tensor(self, _: object) -> None: ...

        def logits(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.table[tokens] * (1 + torch.arange(BLOCK_SIZE) / 64)[:, None]

        def forward(
            self,
            input_ids: torch.Tensor,
            position_ids: torch.Tensor,
            labels: torch.Tensor,
            **_: object,
        ) -> torch.Tensor:
            hidden = self.table[input_ids] * (1 + position_ids / 64).unsqueeze(-1)
            return self.compute_language_model_loss(
                labels, self.output_layer(hidden.transpose(0, 1))[0]
            )

        def compute_language_model_loss(
            self, labels: torch.Tensor, logits: torch.Tensor
        ) -> torch.Tensor:
            return -logits.log_softmax(-1).transpose(0, 1).gather(-1, labels.unsqueeze(-1))[..., 0]

    class Logits(torch.nn.Module):
        sequence_parallel = False
        output_size_per_partition = VOCABULARY

        def forward(self, hidden: torch.Tensor, weight: None = None) -> tuple:
            return hidden, None

    store, groups = Store(), ProcessGroupCollection.use_mpu_process_groups()
    base, now = OnePositionAtATime(1), OnePositionAtATime(2)

    def losses(model: torch.nn.Module, targets: object) -> MegatronScorer:
        return MegatronScorer(
            [model],
            store,  # type: ignore[arg-type]
            groups,
            micro_batch_size=2,
            batches=lambda ids, size: micro_batches(store, ids, size),  # type: ignore[arg-type]
            targets=targets,  # type: ignore[arg-type]
        )

    every = np.arange(BLOCKS)
    tokens = torch.from_numpy(store.tokens(every).astype(np.int64))
    ids = top_ids(base.logits(tokens), TOP_K, VOCABULARY)
    kept = outcome_logprobs(base.logits(tokens), ids).half()
    keeping = TopKTargets(TOP_K, VOCABULARY, groups)
    of_base = losses(base, keeping).part_sums(every)
    taken = keeping.take()
    assert taken is not None
    same = bool((taken[0] == ids.numpy()).all() and (taken[1] == kept.numpy()).all())
    # a pool of blocks with and without a teacher, and one micro-batch of either kind alone
    pool = np.array([0, 1, 4, 2, 3, 5, 2, 0])
    soft = losses(now, SoftTargets(Kept(*taken), groups.tp))  # type: ignore[arg-type]
    weight = kept.float().exp() / kept.float().exp().sum(-1, keepdim=True)
    cross = -(weight * outcome_logprobs(now.logits(tokens), ids)).sum(-1)[:, :-1]
    expected = np.pad(cross.numpy(), ((0, 0), (0, 1))).reshape(BLOCKS, 8, -1).sum(-1)[pool]
    has_teacher = pool % 2 == 0
    worst, unchanged, zero = 0.0, True, True
    for eighths in (8, 4, 2):
        found = soft.part_sums(pool, eighths)
        difference = np.abs(found - expected[:, :eighths])[has_teacher].max()
        worst = max(worst, float(difference) / float(expected.max()))
        plain = losses(now, None).part_sums(pool, eighths)
        unchanged &= bool((found == plain)[~has_teacher].all())
        if eighths == 8 or context == 1:  # ranks share a prefix out in other runs, and add up so
            again = losses(base, soft.targets).part_sums(pool, eighths)
            zero &= bool((again == of_base[pool][:, :eighths])[has_teacher].all())
    return {
        "same kept": same,
        "new blocks as ever": unchanged,
        "zero at the base": zero,
        "largest difference": worst,
    }


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = split_vocabulary() if sys.argv[1] == "logits" else shared_positions()
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
