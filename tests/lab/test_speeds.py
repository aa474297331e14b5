"""What a plan says of speed, against every run whose speed is known."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from command_line import composed
from omegaconf import OmegaConf
from places import ROOT

from nemo_rod.config import PEAK_TFLOPS, Config, Parallel
from nemo_rod.installation import config_folder
from nemo_rod.lab.plan.built_shapes import read_shape
from nemo_rod.lab.plan.costs import Setup, Work, cost
from nemo_rod.lab.plan.memory import GIB, memory_per_gpu
from nemo_rod.lab.plan.shapes import Block, Shape
from nemo_rod.lab.plan.speed import Measured, family, nearest, processor, speeds

NEAR = 0.3  # what a plan may be off by


def shipped(name: str, **others: Any) -> dict[str, Any]:
    model = OmegaConf.load(config_folder() / "model" / f"{name}.yaml")
    shape: Any = OmegaConf.to_container(model.shape)
    return {**shape, **others}


def llama(hidden: int, layers: int, heads: int, inner: int) -> dict[str, Any]:
    return {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": 8,
    }  # fmt: skip


def gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    return {
        "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
        "intermediate_size": 2880, "num_hidden_layers": layers, "num_local_experts": experts,
        "num_experts_per_tok": 4, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "sliding_window": 128, "layer_types": kinds,
    }  # fmt: skip


# of their config.json, as Megatron-Bridge's providers repeat them
NANO = shipped("nemotron_3_nano_30b_a3b")
CONFIGS: Mapping[str, dict[str, Any]] = {
    "Qwen3-8B": shipped("qwen3_8b"),
    "Llama-3-8B": llama(4096, 32, 32, 14336),
    "Llama-3-70B": llama(8192, 80, 64, 28672),
    "Nemotron-3-Nano-4B": shipped("nemotron_3_nano_4b"),
    "Qwen3.8-27B": shipped(
        "qwen3_5_9b", hidden_size=5120, intermediate_size=17408, num_hidden_layers=64,
        num_attention_heads=24, linear_num_value_heads=48, layer_types=None,
    ),
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "head_dim": 128,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    },
    "gpt-oss-20b": gpt_oss(24, 32),
    "gpt-oss-120b": gpt_oss(36, 128),
    "Moonlight-16B-A3B": {
        "model_type": "deepseek_v3", "vocab_size": 163840, "hidden_size": 2048,
        "intermediate_size": 11264, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "n_shared_experts": 2,
        "n_routed_experts": 64, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
        "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "qk_nope_head_dim": 128, "n_group": 1, "topk_group": 1,
    },
    "Nemotron-3.5-Lightning": NANO,
    "Nemotron-3-Nano-30B-A3B": NANO,
    "Qwen3.6-35B-A3B": shipped("qwen3_5_35b_a3b"),
}  # fmt: skip
ROWS = speeds()


def tokens_per_second(shape: Shape, row: Measured, rows: list[Measured]) -> float:
    """What a plan says of a row's run, if these rows are known."""
    chosen, _ = nearest(rows, shape, row.gpu, precision=row.precision, data=row.data)
    h100 = processor(composed("recipe=toy_synthetic", "cluster=h100_1"), shape)  # for its floor
    share = float(np.prod([row.share for row in chosen])) ** (1 / len(chosen))
    profile = replace(h100, peak_tflops=row.peak, utilisation=share, backward=2.0)
    if row.model == "Nemotron-3.5-Lightning":
        # it trains two heads for further tokens, each of attention, experts and an output layer
        kinds = {block.kind: block for block in shape.blocks}
        output = Block(kind="mlp", mixing=2.0 * shape.embedding)
        head = (replace(kinds["attention"], attending=0.0), kinds["experts"], output)
        shape = replace(shape, layers=(*shape.layers, head, head))
    setup = Setup(
        shape=shape, processor=profile, parallel=Parallel(), block_size=row.block,
        micro_batch_size=row.micro_batch, scoring_micro_batch_size=1,
    )  # fmt: skip
    work = Work(name="run", steps=1, batch_size=row.micro_batch)
    return row.micro_batch * row.block / cost(work, setup).update_seconds


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r.model}-{r.gpu}-{r.precision}-{r.data}")
def test_a_plan_is_near_every_published_run(row):
    shape = read_shape(CONFIGS[row.model])
    assert (family(shape), shape.kind) == (row.family, row.kind)
    assert row.peak == PEAK_TFLOPS.get(row.gpu, {"bf16": 2500})["bf16"]
    planned = tokens_per_second(shape, row, ROWS)
    assert planned == pytest.approx(row.tokens_per_second, rel=NEAR)


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
        shape=shape, processor=h100, parallel=Parallel(), block_size=block,
        micro_batch_size=micro_batch, scoring_micro_batch_size=scored,
    )  # fmt: skip
    done = cost(Work(name="rod", steps=1, batch_size=trained, pool_size=2 * trained), setup)
    seconds, over_plain = step
    assert done.update_seconds == pytest.approx(seconds, rel=NEAR)
    planned = (done.update_seconds + done.scoring_seconds) / done.update_seconds
    assert planned == pytest.approx(over_plain, rel=NEAR)


# keys of `train`, in the order in which they are added, and what a cell says of them
WAYS: Mapping[str, dict[str, Any]] = {
    "": {},
    " r": {"recompute": "full"},
    " o": {
        "recompute": "full", "grad_reduce": "bf16", "precision_aware_optimizer": True,
        "optimizer_offload": True,
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
    parallel = Parallel(data=gpus, expert=gpus if shape.has_experts else 1)
    gpu, batch = replace(processor(config, shape), startup_seconds=0.0), 64 * gpus
    for name, keys in WAYS.items():
        train = replace(config.train, micro_batch_size=1, batch_size=batch, **keys)
        scoring = replace(config.scoring, micro_batch_size=1)
        tried = replace(config, parallel=parallel, train=train, scoring=scoring)
        memory = memory_per_gpu(shape, tried, tried)
        if not memory.fits or memory.host * gpus > config.cluster.node_memory_gib * GIB > 0:
            continue
        setup = Setup(
            shape=shape, processor=gpu, parallel=parallel, block_size=size, micro_batch_size=1,
            scoring_micro_batch_size=1, recompute=train.recompute, host_seconds=memory.host / 20e9,
        )  # fmt: skip
        steps = 1e9 / (batch * size)
        hours = steps * cost(Work(name="", steps=1, batch_size=batch), setup).hours
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
