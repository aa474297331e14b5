"""Memory per GPU by hand and as measured, and layouts that are refused."""

import copy
import importlib.metadata
import json
from typing import Any

import pytest
import yaml
from command_line import composed
from places import WORKERS

from nemo_rod.config import Parallel
from nemo_rod.installation import config_folder
from nemo_rod.lab.plan import memory
from nemo_rod.lab.plan.built_shapes import read_shape
from nemo_rod.lab.plan.memory import GIB, Memory, check_layout, memory_per_gpu

S, V, H, F, LAYERS, EXPERTS = 64, 256, 32, 96, 4, 8
DENSE = {
    "model_type": "llama", "vocab_size": V, "hidden_size": H, "intermediate_size": F,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
MOE = {
    **DENSE, "model_type": "qwen3_moe", "num_experts": EXPERTS, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}  # fmt: skip
WIDE = {**DENSE, "num_attention_heads": 16, "num_key_value_heads": 16}
ATTENTION = H * (32 + 2 * 16) + 32 * H  # q, k, v; o
MLP = 3 * H * F
# values per token that a layer saves: its norms' inputs and outputs; queries, keys and values, the
# rotated queries and keys, and the output; both factors and their product
SAVED_MLP = 2 * H + 3 * F
SAVED = 2 * H + 3 * 32 + 3 * 16 + SAVED_MLP
ENDS = 2 * H  # the last norm's
RECIPE = composed("recipe=toy_synthetic")
KEYS: dict[str, Any] = {
    "model.precision": "bf16", "domain.block_size": S, "train.micro_batch_size": 2,
    "scoring.micro_batch_size": 0, "cluster.gpu_memory_gib": 0.0,
}  # fmt: skip


def planned(
    described: dict[str, Any], keys: dict[str, Any] | None = None, *, num: int = 8, **layout: Any
) -> Memory:
    """The memory of a model with other keys of the recipe, and `num` micro-batches a step."""
    config = copy.deepcopy(RECIPE)
    config.parallel = Parallel(**{"distributed_optimizer": True, **layout})
    for key, value in {**KEYS, **(keys or {})}.items():
        group, name = key.split(".")
        setattr(getattr(config, group), name, value)
    config.train.batch_size = num * config.train.micro_batch_size * config.parallel.data
    return memory_per_gpu(read_shape(described), config, config)


def parts(
    described: dict[str, Any], keys: dict[str, Any] | None = None, **layout: Any
) -> dict[str, float]:
    return planned(described, keys, **layout).parts


def test_a_model_on_one_gpu_by_hand():
    count = 2 * V * H + H + LAYERS * (ATTENTION + MLP + 2 * H)
    assert parts(DENSE) == {
        "weights": 2 * (count - H),  # the last norm is left out
        "gradients": 4 * (count - H),
        "optimizer": 12 * (count - H),
        "activations": 2 * S * 2 * (LAYERS * SAVED + ENDS),
        "logits": S * 2 * V * 6,
        "scoring": 0.0,
        "reserve": 0.0,
    }


# Few layers of the proportions of published models, and transformers' class of each.
WIDTHS = {
    "vocab_size": 608, "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128,
    "tie_word_embeddings": False,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_hidden_layers": 4,
    "full_attention_interval": 4,
}  # fmt: skip
CHOSEN = {"num_experts_per_tok": 4, "moe_intermediate_size": 384}
ROUTED = {**CHOSEN, "num_experts": 16}
SHARED = {**ROUTED, "shared_expert_intermediate_size": 384}
GROUPED = {"n_routed_experts": 16, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
FIRST_DENSE = {**CHOSEN, "first_k_dense_replace": 1}
HYBRID = {
    "mamba_num_heads": 16, "mamba_head_dim": 80, "n_groups": 4, "ssm_state_size": 128,
    "conv_kernel": 4, "chunk_size": 128, "num_hidden_layers": 4,
}  # fmt: skip
LATENT = {
    **FIRST_DENSE, **GROUPED, "head_dim": None, "num_key_value_heads": 8, "q_lora_rank": 384,
    "kv_lora_rank": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
NEMOTRON_3 = {
    **{"n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 704},
    **{"moe_shared_expert_intermediate_size": 1408, "n_shared_experts": 1},
}
MEASURED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", ROUTED),
    "qwen3_5_text": ("Qwen3_5ForConditionalGeneration", DELTA),
    "qwen3_5_moe_text": ("Qwen3_5MoeForConditionalGeneration", {**DELTA, **SHARED}),
    "nemotron_h": ("NemotronHForCausalLM", {**HYBRID, "hybrid_override_pattern": "M-*-"}),
    "nemotron_h, experts": (
        "NemotronHForCausalLM",
        {**HYBRID, **NEMOTRON_3, "hybrid_override_pattern": "ME*E"},
    ),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {}),
    "gemma3_text": ("Gemma3ForCausalLM", {}),
    "nemotron": ("NemotronForCausalLM", {}),
    "qwen3_next": ("Qwen3NextForCausalLM", {**DELTA, **SHARED}),
    "gpt_oss": ("GptOssForCausalLM", {"num_local_experts": 16, "num_experts_per_tok": 4}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", LATENT),
    "qwen3, one group": ("Qwen3ForCausalLM", {"num_key_value_heads": 1}),
}
# one group of keys and values on each of two GPUs
GROUPS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, two groups": ("LlamaForCausalLM", {"num_key_value_heads": 2}),
    "qwen3, two groups": ("Qwen3ForCausalLM", {"num_key_value_heads": 2}),
    "qwen3_5_text, two groups": (
        "Qwen3_5ForConditionalGeneration",
        {**DELTA, "num_key_value_heads": 2, "full_attention_interval": 1},
    ),
}
TIED = {"tie_word_embeddings": True}
SMALL = {"num_experts_per_tok": 4, "intermediate_size": 384}
ONE_SHARED = {**FIRST_DENSE, "num_experts": 16, "num_shared_experts": 1}
ERNIE = {
    "moe_num_experts": 16, "moe_k": 4, "moe_intermediate_size": 384, "moe_num_shared_experts": 1,
    "moe_layer_start_index": 1,
}  # fmt: skip
EXAONE = {**TIED, "sliding_window": None, "layer_types": ["full_attention"] * 3}
FALCON = {
    "mamba_d_ssm": 1536, "mamba_n_heads": 16, "mamba_d_head": 96, "mamba_n_groups": 4,
    "mamba_d_state": 128, "mamba_chunk_size": 128, "mamba_norm_before_gate": False,
    "mamba_rms_norm": False,
}  # fmt: skip
GLM_LITE = {**LATENT, "head_dim": 64, "mlp_layer_types": ["dense", "sparse", "sparse"]}
FURTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("DeepseekV2ForCausalLM", {**LATENT, "topk_method": "greedy"}),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", ERNIE),
    "exaone4": ("Exaone4ForCausalLM", EXAONE),
    "exaone_moe": ("ExaoneMoeForCausalLM", {**ONE_SHARED, "num_nextn_predict_layers": 0}),
    "falcon_h1": ("FalconH1ForCausalLM", FALCON),
    "gemma": ("GemmaForCausalLM", TIED),
    "gemma2": ("Gemma2ForCausalLM", TIED),
    "glm4_moe": ("Glm4MoeForCausalLM", {**FIRST_DENSE, **GROUPED}),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", GLM_LITE),
    "hy_v3": ("HYV3ForCausalLM", ONE_SHARED),
    "minimax_m2": ("MiniMaxM2ForCausalLM", {**SMALL, "num_local_experts": 16}),
    "olmoe": ("OlmoeForCausalLM", {**SMALL, "num_experts": 16, "num_key_value_heads": 8}),
}
CLASSES = {**MEASURED, **GROUPS, **FURTHER}
LAYOUTS = {
    "one GPU": (MEASURED, {}),
    "tensor": (["llama", "qwen3", "nemotron_h", "qwen3_5_text", *GROUPS], {"tensor": 2}),
    "sequence": (
        ["llama", "qwen3", "nemotron_h", "qwen3_moe", "nemotron_h, experts"],
        {"tensor": 2, "sequence": True},
    ),
    "experts": (["qwen3_moe", "nemotron_h, experts"], {"tensor": 2, "sequence": True, "expert": 2}),
    "further types": (FURTHER, {}),
    "further types, sequence": (
        # Megatron-Bridge gives OLMoE norms of the width of all heads, whatever the layout
        [*(name for name in FURTHER if name != "olmoe"), "deepseek_v3", "gemma3_text", "nemotron"],
        {"tensor": 2, "sequence": True},
    ),
}
BLOCK = 32


def test_the_plan_tells_which_types_were_measured():
    assert sorted({name.partition(",")[0] for name in CLASSES}) == list(memory.MEASURED)


def described(name: str) -> dict[str, Any]:
    kind, (made, special) = name.partition(",")[0], CLASSES[name]
    return {"model_type": kind, "architectures": [made], **WIDTHS, **special}


def one_micro_batch(
    described: dict[str, Any], part: str, layout: dict[str, Any], block: int = BLOCK, **keys: Any
) -> float:
    keys = {f"train.{key}": value for key, value in keys.items()} | {
        "domain.block_size": block, "train.micro_batch_size": 1, "plan.expert_imbalance": 1.0,
    }  # fmt: skip
    return parts(described, keys, num=1, **layout)[part]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_activations_are_those_that_megatron_keeps(layout, torchrun):
    """Built by Megatron-Bridge; `activations_worker.py` says what stands in for a GPU's kernels."""
    pytest.importorskip("megatron")
    core = importlib.metadata.version("megatron-core")
    if tuple(map(int, core.split(".")[:2])) < (0, 19):
        pytest.skip(f"megatron-core {core} has other layers than the worker knows")
    names, parallel = LAYOUTS[layout]
    models = {
        name: {"config": {**described(name), "architectures": None}, "class": CLASSES[name][0]}
        for name in names
    }
    if layout == "one GPU":
        models |= {kind: {**models["qwen3"], "recompute": kind} for kind in ("selective", "full")}
    output = torchrun(
        parallel.get("tensor", 1),
        WORKERS / "activations_worker.py",
        *map(json.dumps, (models, parallel)),
    )
    measured = json.loads(next(line for line in output[0].splitlines() if line.startswith("{")))
    for name in names:
        # of one with images, the weights are not of its text alone
        for part in ("activations", "weights")[: 1 if "Conditional" in CLASSES[name][0] else 2]:
            share = pytest.approx(measured[name][part], rel=0.02)
            assert one_micro_batch(described(name), part, parallel) == share, (name, part)
    rows = 4096 * parallel.get("tensor", 1)
    losses = (("llama", 64), ("llama", 512), ("gemma2", 64))
    for (kind, width), peak in zip(losses, measured["logits"], strict=True):
        config = {**described(kind), "vocab_size": rows, "hidden_size": width}
        logits = one_micro_batch(config, "logits", parallel, block=64)
        assert logits == pytest.approx(peak, rel=0.02)
    if layout == "one GPU":
        kept = {name: measured[name]["activations"] for name in ("qwen3", "selective", "full")}
        # fused attention keeps its inputs and output, which are kept either way
        assert kept["selective"] == pytest.approx(kept["qwen3"], rel=0.01)
        # beside what a forward pass keeps, one layer is computed again
        ends = 2 * 2 * BLOCK * WIDTHS["hidden_size"]
        layer = (kept["qwen3"] - ends) / WIDTHS["num_hidden_layers"]
        again = one_micro_batch(described("qwen3"), "activations", {}, recompute="full")
        assert again == pytest.approx(kept["full"] + layer, rel=0.02)


def test_replicas_share_the_optimizer_alone():
    one, four = parts(DENSE), parts(DENSE, data=4)
    assert four == {**one, "optimizer": one["optimizer"] / 4}
    assert parts(DENSE, data=4, distributed_optimizer=False) == one


def test_tensor_parallelism_splits_matrices_and_with_sequence_all_activations():
    norms = LAYERS * 2 * H
    one, two = parts(DENSE), parts(DENSE, tensor=2)
    assert two["weights"] == (one["weights"] - 2 * norms) / 2 + 2 * norms
    assert two["logits"] == one["logits"] / 2
    assert one["activations"] / 2 < two["activations"] < one["activations"]
    assert parts(DENSE, tensor=2, sequence=True)["activations"] == one["activations"] / 2


def test_experts_are_split_and_their_optimizer_shared_by_fewer():
    one = parts(MOE)
    eight = parts(MOE, data=16, expert=8)
    experts = LAYERS * EXPERTS * 3 * H * 16
    dense = one["weights"] / 2 - experts
    assert eight["weights"] == 2 * (dense + experts / 8)
    assert eight["optimizer"] == 12 * (dense / 16 + experts / 8 / 2)
    # a slice of every expert, and the tokens of all
    whole = LAYERS * (2 * H + 2 * 8 + H * EXPERTS)  # norms, those of queries and keys, the router
    two = parts(MOE, tensor=2, sequence=True)
    assert two["weights"] == 2 * ((dense - whole + experts) / 2 + whole)
    assert parts(MOE, data=4, tensor=2, sequence=True)["optimizer"] == two["optimizer"] / 4
    # inputs of two experts a token, and what these keep of their width, on the busiest GPU
    even = parts(MOE, {"plan.expert_imbalance": 1.0}, data=16, expert=8)["activations"]
    routed = 2 * S * 2 * LAYERS * (2 * H + 2 * 6 * 16)
    assert eight["activations"] == even + routed / 2


def test_the_first_pipeline_stage_holds_most_micro_batches():
    layer, end = 2 * S * 2 * SAVED, 2 * S * 2 * ENDS
    # 4 stages: the first has a quarter of the layers, of four micro-batches
    assert parts(DENSE, pipeline=4)["activations"] == 4 * layer
    # of one micro-batch, the last stage is the fullest
    assert parts(DENSE, num=1, pipeline=4)["activations"] == layer + end
    assert parts(DENSE, num=2, pipeline=4, data=2)["activations"] == layer + end
    two_chunks = parts(DENSE, pipeline=2, virtual_pipeline=2)["activations"]
    assert two_chunks == 2 * layer * 2 * (1 + 1 / 4) + end


def test_scoring_counts_where_it_needs_more_than_the_update():
    hidden = 2 * 64 * S * (SAVED_MLP + 2 * H)  # of the larger block
    # all logits, or slices of more logits than there is room for
    for vocabulary, logits in ((V, 64 * S * V), (2**28 // (64 * S), 512 * 2**18)):
        memory = parts({**DENSE, "vocab_size": vocabulary}, {"scoring.micro_batch_size": 64})
        update = memory["activations"] + memory["logits"]
        assert memory["scoring"] == hidden + 6 * logits - update > 0


def test_recomputed_layers_keep_their_input_alone():
    full = {"train.recompute": "full"}
    assert parts(DENSE, full)["activations"] == 2 * S * 2 * (LAYERS * H + SAVED + ENDS)
    # the last stage, with the logits, is the fullest: one micro-batch is in flight there
    assert parts(DENSE, full, pipeline=2)["activations"] == 2 * S * 2 * (2 * H + SAVED + ENDS)
    shared = parts(DENSE, full, tensor=2, sequence=True)["activations"]
    assert shared == 2 * S * 2 * (LAYERS * H + SAVED + ENDS) / 2
    assert parts(DENSE, {"train.recompute": "selective"}) == parts(DENSE)


def test_narrow_gradients_and_an_optimizer_elsewhere():
    one = parts(DENSE)
    narrow = {"train.grad_reduce": "bf16"}
    assert parts(DENSE, narrow) == {
        **one, "gradients": one["gradients"] / 2, "optimizer": one["optimizer"] / 12 * 16
    }  # fmt: skip
    aware = narrow | {"train.precision_aware_optimizer": True}
    assert parts(DENSE, aware) == {**one, "gradients": one["gradients"] / 2}
    wide = {"model.precision": "fp32"}
    assert parts(DENSE, aware | wide) == parts(DENSE, wide)
    memory = planned(DENSE, aware | {"train.optimizer_offload": True}, data=4)
    assert memory.parts["optimizer"] == 0 and memory.host == one["optimizer"] / 4
    assert planned(DENSE, aware).host == 0


def test_the_reserve_is_a_share_of_the_gpu():
    small, large = (
        planned(DENSE, {"plan.memory_reserve": 0.25, "cluster.gpu_memory_gib": limit / GIB})
        for limit in (1000.0, 1e9)
    )
    assert small.parts["reserve"] == 250
    assert large.fits and not small.fits


@pytest.mark.parametrize(
    ("config", "layout", "sentence"),
    [
        (DENSE, {"tensor": 4}, "parallel.tensor=4 does not divide num_key_value_heads=2"),
        (DENSE, {"pipeline": 4, "virtual_pipeline": 2}, "virtual_pipeline=2 does not divide num_h"),
        (DENSE, {"data": 2, "expert": 2}, "parallel.expert=2 does not divide num_experts=1"),
        (MOE, {"data": 3, "expert": 3}, "parallel.expert=3 does not divide num_experts=8"),
        (DENSE, {"data": 12}, "12 processes do not fill nodes of cluster.gpus_per_node=8"),
        (WIDE, {"tensor": 16}, "tensor=16 does not stay within a node of 8 GPUs"),
        (MOE, {"tensor": 2}, "parallel.tensor=2 does not work with the model: its experts need"),
        ("qwen3_5_4b", {"tensor": 2}, "norms in Gated DeltaNet layers only with parallel.sequence"),
        ("nemotron_3_nano_4b", {"pipeline": 3, "virtual_pipeline": 2}, "no interleaved schedule"),
        ("gemma4_e4b", {"tensor": 2}, "does not add up all gradients of Gemma 4; set it to 1"),
        ("gemma4_e4b", {"pipeline": 2}, "parallel.pipeline=2 does not work with the model"),
    ],
)
def test_layouts_that_cannot_run_are_refused(config, layout, sentence):
    if isinstance(config, str):
        config = yaml.safe_load((config_folder() / "model" / f"{config}.yaml").read_text())["shape"]
    shape, parallel = read_shape(config), Parallel(**layout)
    with pytest.raises(ValueError) as refusal:
        check_layout(shape, parallel, block_size=S, gpus_per_node=8)
    assert sentence in str(refusal.value)
    assert str(refusal.value).endswith(".") and ". " not in str(refusal.value)
    if config is WIDE:  # without GPUs, there are no nodes
        check_layout(shape, parallel, block_size=S, gpus_per_node=0)
