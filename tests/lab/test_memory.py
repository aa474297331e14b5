"""Memory per GPU by hand, and layouts that are refused."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from nemo_rod.config import Parallel, config_folder
from nemo_rod.lab.plan.memory import Load, check_layout, memory_per_gpu
from nemo_rod.lab.plan.shapes import Shape, read_shape

S, V, H, F, LAYERS, EXPERTS = 64, 256, 32, 96, 4, 8
DENSE = {
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": F,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
MOE = {
    **DENSE,
    "model_type": "qwen3_moe",
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
WIDE = {**DENSE, "num_attention_heads": 16, "num_key_value_heads": 16}
ATTENTION = H * (32 + 2 * 16) + 32 * H  # q, k, v; o
MLP = 3 * H * F
LOAD = Load(
    precision="bf16",
    block_size=S,
    micro_batch_size=2,
    num_micro_batches=8,
    scoring_micro_batch_size=0,
    split_optimizer=True,
    expert_imbalance=1.5,
    reserve=0.0,
    recompute="none",
    grad_reduce="fp32",
    precision_aware=False,
    offload=False,
)


def parts(config: dict[str, Any], load: Load = LOAD, **layout: Any) -> dict[str, float]:
    return memory_per_gpu(read_shape(config), Parallel(**layout), load, None).parts


def test_a_model_on_one_gpu_by_hand() -> None:
    count = 2 * V * H + H + LAYERS * (ATTENTION + MLP + 2 * H)
    saved_attention = 2 * H + (32 + 2 * 16) + 32
    saved_mlp = 2 * H + 3 * F
    assert parts(DENSE) == {
        "weights": 2 * (count - H),  # the last norm is left out
        "gradients": 4 * (count - H),
        "optimizer": 12 * (count - H),
        "activations": 2 * S * 2 * LAYERS * (saved_attention + saved_mlp),
        "logits": S * 2 * V * 8,
        "scoring": 0.0,
        "reserve": 0.0,
    }


@pytest.mark.parametrize("layout", [{"data": 8}, {"data": 4, "tensor": 2, "sequence": True}])
@pytest.mark.parametrize("model", ["qwen3_0_6b", "qwen3_8b", "smollm2_1_7b"])
@pytest.mark.filterwarnings("ignore")  # of what a machine without CUDA lacks
def test_weights_and_optimizer_agree_with_megatron_bridges_estimator(
    model: str, layout: dict[str, Any]
) -> None:
    """It counts every layer as attention and a MLP: hybrid models are exact in `test_shapes`."""
    pytest.importorskip("megatron")
    import nemo_rod.megatron  # noqa: F401 - without CUDA, it stands in for what Bridge asks for

    # isort: split
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.utils import theoretical_memory_utils as theirs
    from transformers import LlamaConfig, Qwen3Config

    if not hasattr(theirs, "estimate_training_memory"):
        pytest.skip("this Megatron-Bridge estimates no memory")
    shape = dict(OmegaConf.load(config_folder() / "model" / f"{model}.yaml").shape)
    kind, name = {"qwen3": (Qwen3Config, "Qwen3"), "llama": (LlamaConfig, "Llama")}[
        shape["model_type"]
    ]
    published = kind(**shape, architectures=[f"{name}ForCausalLM"])
    provider = AutoBridge.from_hf_config(published).to_megatron_provider(load_weights=False)
    provider.tensor_model_parallel_size = layout.get("tensor", 1)
    config = SimpleNamespace(
        model=provider,
        data_parallel_size=layout["data"],
        optimizer=SimpleNamespace(use_distributed_optimizer=True),
    )
    expected = theirs.estimate_training_memory(config, include_activation=False)
    ours = parts(shape, **layout)
    assert ours["weights"] + ours["gradients"] + ours["optimizer"] == pytest.approx(
        expected.weight_and_optimizer_bytes, rel=2e-4
    )


def test_replicas_share_the_optimizer_alone() -> None:
    one, four = parts(DENSE), parts(DENSE, data=4)
    assert four == {**one, "optimizer": one["optimizer"] / 4}
    unshared = dataclasses.replace(LOAD, split_optimizer=False)
    assert parts(DENSE, unshared, data=4) == one


def test_tensor_parallelism_splits_matrices_and_with_sequence_all_activations() -> None:
    norms = LAYERS * 2 * H
    one, two = parts(DENSE), parts(DENSE, tensor=2)
    assert two["weights"] == (one["weights"] - 2 * norms) / 2 + 2 * norms
    assert two["logits"] == one["logits"] / 2
    assert one["activations"] / 2 < two["activations"] < one["activations"]
    assert parts(DENSE, tensor=2, sequence=True)["activations"] == one["activations"] / 2


def test_experts_are_split_and_their_optimizer_shared_by_fewer() -> None:
    one = parts(MOE)
    eight = parts(MOE, data=16, expert=8)
    experts = LAYERS * EXPERTS * 3 * H * 16
    dense = one["weights"] / 2 - experts
    assert eight["weights"] == 2 * (dense + experts / 8)
    assert eight["optimizer"] == 12 * (dense / 16 + experts / 8 / 2)


def test_the_first_pipeline_stage_holds_most_micro_batches() -> None:
    one = parts(DENSE)["activations"]
    # 4 stages: the first has a quarter of the layers, of four micro-batches
    assert parts(DENSE, pipeline=4)["activations"] == one
    few = dataclasses.replace(LOAD, num_micro_batches=1)
    assert parts(DENSE, few, pipeline=4)["activations"] == one / 4
    assert parts(DENSE, pipeline=2, virtual_pipeline=2)["activations"] == one / 2 * 2 * (1 + 1 / 4)


def test_scoring_counts_where_it_needs_more_than_the_update() -> None:
    large = dataclasses.replace(LOAD, scoring_micro_batch_size=64)
    hidden = 2 * 64 * S * (2 * H + 3 * F + 2 * H)  # of the larger block
    # all logits, or slices of more logits than there is room for
    for vocabulary, logits in ((V, 64 * S * V), (2**28 // (64 * S), 512 * 2**18)):
        memory = parts({**DENSE, "vocab_size": vocabulary}, large)
        update = memory["activations"] + memory["logits"]
        assert memory["scoring"] == hidden + 10 * logits - update > 0


def test_recomputed_layers_keep_their_input_alone() -> None:
    full = dataclasses.replace(LOAD, recompute="full")
    layer = 2 * H + (32 + 2 * 16) + 32 + 2 * H + 3 * F
    assert parts(DENSE, full)["activations"] == 2 * S * 2 * (LAYERS * H + layer)
    # the last stage, with the logits, is the fullest: one micro-batch is in flight there
    assert parts(DENSE, full, pipeline=2)["activations"] == 2 * S * 2 * (2 * H + layer)
    shared = parts(DENSE, full, tensor=2, sequence=True)["activations"]
    assert shared == 2 * S * 2 * (LAYERS * H + layer) / 2
    selective = dataclasses.replace(LOAD, recompute="selective")
    assert parts(DENSE, selective) == parts(DENSE)


def test_narrow_gradients_and_an_optimizer_elsewhere() -> None:
    one = parts(DENSE)
    narrow = dataclasses.replace(LOAD, grad_reduce="bf16")
    assert parts(DENSE, narrow) == {
        **one, "gradients": one["gradients"] / 2, "optimizer": one["optimizer"] / 12 * 16
    }  # fmt: skip
    aware = dataclasses.replace(narrow, precision_aware=True)
    assert parts(DENSE, aware) == {**one, "gradients": one["gradients"] / 2}
    wide = dataclasses.replace(aware, precision="fp32")
    assert parts(DENSE, wide) == parts(DENSE, dataclasses.replace(LOAD, precision="fp32"))
    offload = dataclasses.replace(aware, offload=True)
    memory = memory_per_gpu(read_shape(DENSE), Parallel(data=4), offload, None)
    assert memory.parts["optimizer"] == 0 and memory.host == one["optimizer"] / 4
    assert memory_per_gpu(read_shape(DENSE), Parallel(), aware, None).host == 0


def test_the_reserve_is_a_share_of_the_gpu() -> None:
    load = dataclasses.replace(LOAD, reserve=0.25)
    memory = memory_per_gpu(read_shape(DENSE), Parallel(), load, 1000.0)
    assert memory.parts["reserve"] == 250
    assert not memory.fits
    assert memory_per_gpu(read_shape(DENSE), Parallel(), load, 1e9).fits


@pytest.mark.parametrize(
    ("config", "layout", "sentence"),
    [
        (DENSE, {"tensor": 4}, "parallel.tensor=4 does not divide num_key_value_heads=2"),
        (
            DENSE,
            {"pipeline": 3},
            "pipeline=3 x virtual_pipeline=1 does not divide num_hidden_layers=4",
        ),
        (DENSE, {"pipeline": 4, "virtual_pipeline": 2}, "virtual_pipeline=2 does not divide"),
        (DENSE, {"data": 2, "expert": 2}, "parallel.expert=2 does not divide num_experts=1"),
        (MOE, {"data": 3, "expert": 3}, "parallel.expert=3 does not divide num_experts=8"),
        (DENSE, {"data": 12}, "12 processes do not fill nodes of cluster.gpus_per_node=8"),
        (WIDE, {"tensor": 16}, "tensor=16 does not stay within a node of 8 GPUs"),
    ],
)
def test_layouts_that_cannot_run_are_refused(
    config: dict[str, Any], layout: dict[str, Any], sentence: str
) -> None:
    shape: Shape = read_shape(config)
    with pytest.raises(ValueError) as refusal:
        check_layout(shape, Parallel(**layout), block_size=S, gpus_per_node=8)
    assert sentence in str(refusal.value)
    assert str(refusal.value).endswith(".") and ". " not in str(refusal.value)
    if config is WIDE:  # without GPUs, there are no nodes
        check_layout(shape, Parallel(**layout), block_size=S, gpus_per_node=0)
