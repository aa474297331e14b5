"""A sketch of held graphs: winners go backward from what their scoring pass kept.

A job that recomputes its layers goes forward twice for every trained block. Where the scoring pass
keeps the inputs of the layers of every candidate, winners need not go forward a third time: by
arithmetic 1.25x of such a job's plain step, instead of 1.5x. This measures that on one process with
Megatron's own recomputing layers, against a step that scores first; nothing in the package does it
(docs/research/scoring.md says why).

A graph cannot move, so winners go backward on the replica that scored them, and all wait for the
one that has most. What that costs is calculated by drawing winners at random.

Times are the processor's; the kinds of steps take turns, and every ratio is of one round's.

    python benchmarks/held_graphs.py [--quick] [--json FILE]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from _rows import Row, Setting, run, under

CHOSEN, TOKENS, VOCABULARY, HIDDEN, LAYERS = 4, 256, 512, 128, 4
WARM_UP = 2  # rounds
# replicas, and candidates that each of them scores in a step
SHARES = ((1, 128), (2, 64), (16, 16), (16, 128), (128, 16))


def held(setting: Setting) -> Iterator[Row]:
    """Ratios over a plain step that recomputes."""
    seconds, difference = measure(setting, rounds=6 if setting.quick else 30)
    # both train on the same winners, so their gradients differ by rounding alone
    yield under("largest difference of a gradient", difference, "", 1e-6)
    plain = seconds["plain"]
    yield under("held_over_plain_recomputing", np.median(seconds["held"] / plain), "x", 1.35)
    yield Row("held_over_plain_recomputing.scored_first", np.median(seconds["scored"] / plain), "x")
    # what is kept until the last candidate is scored: fp32 here, two bytes in bf16
    kept = (LAYERS + 1) * TOKENS * HIDDEN * 4 / 2**20
    yield Row("kept for a candidate, but for its logits", kept, "MiB")


def replicas(setting: Setting) -> Iterator[Row]:
    """The same by arithmetic on several replicas: m = 2, backward twice as long as forward."""
    rng, draws = np.random.default_rng(0), 50 if setting.quick else 500
    for count, share in SHARES:
        chosen = count * share // 2
        most = [
            np.bincount(rng.permutation(count * share)[:chosen] // share).max()
            for _ in range(draws)
        ]
        # forward, then forward again and backward for the winners; a plain step does it for all
        ratio = (share + 3 * np.mean(most)) / (4 * share / 2)
        yield Row(f"held_over_plain.{count}x{share}", ratio, "x")


@dataclass
class Job:
    """A model that recomputes every layer, and its three kinds of steps."""

    model: Any
    optimizer: Any

    def loss(self, tokens_BS: Any) -> Any:
        import torch

        position_ids = torch.arange(TOKENS).expand_as(tokens_BS)
        labels = tokens_BS.roll(-1, dims=1)
        output = self.model(
            input_ids=tokens_BS, position_ids=position_ids, attention_mask=None, labels=labels
        )
        return output.mean(dim=1)

    def plain(self, pool_CS: Any) -> None:
        self.update(pool_CS[:CHOSEN])

    def scored(self, pool_CS: Any) -> None:
        """As the package does it."""
        import torch

        self.model.eval()
        with torch.no_grad():
            losses = torch.cat([self.loss(block[None]) for block in pool_CS])
        self.model.train()
        self.update(pool_CS[losses.topk(CHOSEN).indices.sort().values])

    def held(self, pool_CS: Any) -> None:
        """The scoring pass keeps its graph, which holds the inputs of the layers alone."""
        import torch

        self.optimizer.zero_grad()
        losses = [self.loss(block[None]).sum() for block in pool_CS]
        winners = torch.stack([loss.detach() for loss in losses]).topk(CHOSEN).indices
        kept = [losses[i] for i in winners.sort().values]
        losses.clear()  # losers are freed here
        while kept:
            (kept.pop(0) / CHOSEN).backward()
        self.optimizer.step()

    def update(self, blocks_KS: Any) -> None:
        self.optimizer.zero_grad()
        for block in blocks_KS:
            (self.loss(block[None]).sum() / CHOSEN).backward()
        self.optimizer.step()


def measure(setting: Setting, *, rounds: int) -> tuple[dict[str, np.ndarray], float]:
    """Seconds of every round by kind of step, and how much the gradients of two kinds differ."""
    import torch

    job = make_job(f"file://{setting.folder}/rendezvous")
    pool = torch.randint(0, VOCABULARY, (2 * CHOSEN, TOKENS))
    difference = (gradients(job, job.scored, pool) - gradients(job, job.held, pool)).abs().max()
    seconds: dict[str, list[float]] = {"plain": [], "scored": [], "held": []}
    for number in range(WARM_UP + rounds):
        pool = torch.randint(0, VOCABULARY, (2 * CHOSEN, TOKENS))
        for kind in list(seconds)[:: 1 if number % 2 else -1]:
            begin = time.process_time()
            getattr(job, kind)(pool)
            seconds[kind].append(time.process_time() - begin)
    return {kind: np.array(values[WARM_UP:]) for kind, values in seconds.items()}, float(difference)


def gradients(job: Job, step: Callable, pool: Any) -> Any:
    """What a step would give the optimizer; no weight moves."""
    import torch

    optimizer, job.optimizer = job.optimizer, torch.optim.SGD(job.model.parameters(), lr=0.0)
    step(pool)
    job.optimizer = optimizer
    return torch.cat([parameter.grad.flatten() for parameter in job.model.parameters()])


def make_job(rendezvous: str) -> Job:
    import torch
    import torch.distributed as dist

    import nemo_rod.megatron  # noqa: F401  makes Megatron importable without CUDA

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        params_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=TOKENS,
        position_embedding_type="rope",
    )
    return Job(model, torch.optim.AdamW(model.parameters(), lr=1e-5))


if __name__ == "__main__":
    run(__doc__, {"held": held, "replicas": replicas})
