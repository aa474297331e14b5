"""What a plan says of speed: against what one H100 did, and in the documents' table."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
from command_line import composed
from omegaconf import OmegaConf
from places import ROOT

from nemo_rod.config import Config, Parallel
from nemo_rod.installation import config_folder
from nemo_rod.lab.plan.built_shapes import read_shape
from nemo_rod.lab.plan.costs import Setup, Work, cost
from nemo_rod.lab.plan.memory import GIB, Load, memory_per_gpu
from nemo_rod.lab.plan.shapes import Shape, forward_flops
from nemo_rod.lab.plan.speed import processor

NEAR = 0.3  # what a plan may be off by


def shipped(name: str) -> Any:
    model = OmegaConf.load(config_folder() / "model" / f"{name}.yaml")
    return OmegaConf.to_container(model.shape)


@pytest.mark.parametrize(
    ("config", "block", "micro_batch", "trained", "scored", "step"),
    [
        # docs/research/gpu.md: .5 B by megatron-core alone, m = 2
        (
            {
                "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
                "intermediate_size": 3072, "num_hidden_layers": 24, "num_attention_heads": 16,
                "num_key_value_heads": 8, "head_dim": 64,
            },
            4096, 2, 16, 4, (16 * 4096 / 64_650, 1.62),
        ),
        # docs/research/smollm2.md: 135 M by Megatron-Bridge, .9 to 1.1 s
        (shipped("smollm2_135m"), 1024, 16, 64, 16, (1.0, 1.5)),
    ],
    ids=["half_a_billion", "smollm2_135m"],
)  # fmt: skip
def test_a_plan_is_near_what_one_h100_did(config, block, micro_batch, trained, scored, step):
    shape = read_shape(config)
    h100 = processor(composed("recipe=german_qwen3_0_6b"), shape)
    setup = Setup(
        forward_flops=forward_flops(shape, block), backward=h100.backward, parallel=Parallel(),
        flops_per_second=h100.peak_tflops * 1e12 * h100.utilisation, block_size=block,
        micro_batch_size=micro_batch, scoring_micro_batch_size=scored, scoring=h100.scoring,
        launch_seconds=h100.launch_seconds * len(shape.blocks),
    )  # fmt: skip
    done = cost(Work(name="rod", steps=1, batch_size=trained, pool_size=2 * trained), setup, shape)
    seconds, over_plain = step
    assert done.update_seconds == pytest.approx(seconds, rel=NEAR)
    planned = (done.update_seconds + done.scoring_seconds) / done.update_seconds
    assert planned == pytest.approx(over_plain, rel=NEAR)


# keys of `train`, in the order in which they are added, and what a cell says of them
WAYS: Mapping[str, dict[str, Any]] = {
    "": {},
    " r": {"recompute": "full"},
    " o": {
        "recompute": "full", "grad_reduce": "bf16", "precision_aware": True, "offload": True,
    },
}  # fmt: skip
CARDS = (
    *("rtx4090_1", "rtx5090_1", "l40s_1", "a100_1", "h100_1", "gh200_1"),
    *("a100_8", "h100_8", "h200_8", "b200_8", "b300_8"),
)


@cache
def on(card: str) -> Config:
    return composed("recipe=german_qwen3_0_6b", f"cluster={card}")


def hours_of_a_billion_tokens(shape: Shape, card: str) -> str:
    """The cell of a model and a card: what a plan says of the least that fits."""
    config = on(card)
    gpus, size = config.cluster.gpus_per_node, config.domain.block_size
    expert = gpus if shape.has_experts else 1
    parallel = Parallel(data=gpus, expert=expert)
    base: dict[str, Any] = {"recompute": "none", "grad_reduce": "fp32"}
    gpu = processor(config, shape)
    for name, keys in WAYS.items():
        load = Load(
            precision="bf16", block_size=size, micro_batch_size=1, num_micro_batches=64,
            scoring_micro_batch_size=1, split_optimizer=True, expert_imbalance=1.5, reserve=0.1,
            **{"precision_aware": False, "offload": False, **base, **keys},
        )  # fmt: skip
        memory = memory_per_gpu(shape, parallel, load, config.cluster.gpu_memory_gib * GIB)
        if not memory.fits or memory.host * gpus > config.cluster.node_memory_gib * GIB > 0:
            continue
        setup = Setup(
            forward_flops=forward_flops(shape, size), backward=gpu.backward, parallel=parallel,
            flops_per_second=gpu.peak_tflops * 1e12 * gpu.utilisation, block_size=size,
            micro_batch_size=1, scoring_micro_batch_size=1, recomputed=float(bool(keys)),
            launch_seconds=gpu.launch_seconds * len(shape.blocks), host_seconds=memory.host / 20e9,
        )  # fmt: skip
        batch = 64 * gpus
        steps = 1e9 / (batch * size)
        hours = steps * cost(Work(name="", steps=1, batch_size=batch), setup, shape).hours
        return f"{hours:.2g}{name}" if hours < 100 else f"{hours:.0f}{name}"
    return "-"


def test_the_documents_table_of_models_and_cards_is_what_plans_say():
    rows = []
    for file in sorted((config_folder() / "model").glob("*.yaml")):
        model = OmegaConf.load(file)
        if model.get("shape") is None or file.stem.startswith("toy"):
            continue
        shape = read_shape(shipped(file.stem))
        cells = [hours_of_a_billion_tokens(shape, card) for card in CARDS]
        rows.append((shape.parameters, f"| `{file.stem}` | {' | '.join(cells)} |"))
    table = [row for _, row in sorted(rows)]
    text = (ROOT / "docs" / "recipes.md").read_text()
    head = f"| `model=` | {' | '.join(card.replace('_', ' x ') for card in CARDS)} |"
    missing = [row for row in [head, *table] if row not in text]
    assert not missing, "docs/recipes.md should have these rows:\n" + "\n".join(missing)
