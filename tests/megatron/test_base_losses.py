"""A base is what transformers computes, or it is refused with the keys that Bridge leaves out."""

import json
import os
import re
from typing import Any

import pytest
import torch
from tiny import configured

from nemo_rod.corpus import SourceSpec, load_tokenizer, prepare
from nemo_rod.jobs import ExportJob

pytestmark = [pytest.mark.usefixtures("megatron", "alone")]

SIZES = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "eos_token_id": 0,
    "max_position_embeddings": 512, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
WINDOW = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "moe_intermediate_size": 32, "num_experts_per_tok": 2, "n_routed_experts": 4,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
UNUSED = {  # by the class of transformers
    "ep_size": 8, "aux_loss_alpha": 0.001, "seq_aux": True, "num_nextn_predict_layers": 1,
    "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "pretraining_tp": 4,
}  # fmt: skip


def rope(**more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **more}}


LINEAR, DYNAMIC = rope(rope_type="linear", factor=4.0), rope(rope_type="dynamic", factor=4.0)
LONG = rope(
    rope_type="longrope", factor=4.0, short_factor=[1.0] * 8, long_factor=[2.0] * 8,
    original_max_position_embeddings=64,
)  # fmt: skip
LATE = {"rope_parameters": LONG["rope_parameters"] | {"original_max_position_embeddings": 100}}
HARMLESS = {  # keys of which nothing is needed here, and that the comparison passes by
    "attn_implementation": "flash_attention_2", "experts_implementation": "kernels",
    "quantization_config": {"quant_method": "gptq", "bits": 4}, "return_dict": False,
    "auto_map": {"AutoModelForCausalLM": "modeling.Qwen3ForCausalLM"},
}  # fmt: skip
OWN = {"auto_map": {"AutoModelForCausalLM": "modeling.LlamaForCausalLM"}}
EQUAL = ""
# model type, its settings, and what is refused: an ignored key, or a way to compute that is missing
BASES: list[tuple[str, dict[str, Any], str]] = [
    ("llama", LINEAR | {"written": OWN}, EQUAL),
    ("llama", {"written": {"architectures": []}}, "(architectures names none): correct its config"),
    ("llama", rope(**LLAMA3 | {"original_max_position_embeddings": 64}),
     "takes no account of rope_parameters.original_max_position_embeddings of"),
    ("llama", rope(**YARN), "asked for by rope_parameters.factor, "),
    ("llama", {"attention_bias": True}, "asked for by attention_bias of"),
    ("qwen3", LINEAR | {"written": HARMLESS},
     "takes no account of rope_parameters.factor, rope_parameters.rope_type of"),
    ("qwen2", WINDOW, "takes no account of use_sliding_window, sliding_window, "),
    ("gemma3_text", {"final_logit_softcapping": 3.0}, "final_logit_softcapping of"),
    ("llama", {"written": {"num_key_value_heads": 3}}, "cannot be built by Megatron-Bridge (shape"),
    ("mixtral", {"num_local_experts": 4}, "cannot be built by Megatron-Bridge (Model architecture"),
]  # fmt: skip
FURTHER: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"tie_word_embeddings": True}, EQUAL),
    ("llama", rope(**LLAMA3), EQUAL),
    ("llama", {"max_position_embeddings": 64, **DYNAMIC}, "rope_parameters.rope_type of"),
    ("llama", LONG, "rope_parameters.long_factor, "),
    ("llama", {"mlp_bias": True}, "asked for by mlp_bias of"),
    ("llama", {"hidden_act": "gelu"}, EQUAL),
    ("llama", {"rms_norm_eps": 1e-2}, EQUAL),
    ("llama", {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}, EQUAL),
    ("qwen3", {}, EQUAL),
    ("qwen3", {"attention_bias": True}, "Bridge builds this model type without them."),
    ("qwen3", rope(**LLAMA3), "takes no account of rope_parameters.rope_type of"),
    ("qwen2", {"tie_word_embeddings": True}, EQUAL),
    ("mistral", {"sliding_window": None}, EQUAL),
    ("mistral", {"sliding_window": 32}, EQUAL),
    ("mistral", rope(**YARN), "asked for by rope_parameters.factor, "),
    ("gemma", {"hidden_activation": "gelu_pytorch_tanh"}, EQUAL),
    ("gemma2", {"sliding_window": 32}, EQUAL),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}, EQUAL),
    ("gemma2", {"query_pre_attn_scalar": 64}, EQUAL),
    ("gemma3_text", {"sliding_window": 32}, EQUAL),
    ("qwen3_moe", EXPERTS, EQUAL),
    ("qwen3_moe", {**EXPERTS, "norm_topk_prob": False}, EQUAL),
    ("qwen3_moe", {**EXPERTS, "mlp_only_layers": [1]}, "without a tensor"),
    ("olmoe", {**EXPERTS, "num_key_value_heads": 4}, EQUAL),
    ("olmoe", {**EXPERTS, "num_key_value_heads": 4, "clip_qkv": 0.5}, "clip_qkv"),
    ("gpt_oss", {**LOCAL, "sliding_window": 32}, EQUAL),
    ("gpt_oss", {**LOCAL, **rope(rope_type="default")}, "rope_parameters.rope_type of"),
    ("gpt_oss", {**LOCAL, "swiglu_limit": 1.0}, EQUAL),
    ("gemma3_text", {"layer_types": ["full_attention"] * 4}, "takes no account of layer_types of"),
    ("nemotron", {"hidden_act": "gelu"}, "takes no account of hidden_act of"),
    ("nemotron", {"hidden_act": "relu2"}, EQUAL),
    ("deepseek_v3", {**ROUTED, **UNUSED, "num_experts": 8}, EQUAL),
    ("qwen3_moe", {**EXPERTS, "n_routed_experts": 16}, EQUAL),
    ("llama", {"written": {"head_dim": "16"}}, "Validation error for field 'head_dim'"),
    ("llama", {"written": rope(rope_type="ntk")}, "transformers ('ntk'): correct"),
    ("llama", {"max_position_embeddings": 4096, "written": LATE}, "rope_parameters.long_factor"),
    ("deepseek_v3", {**ROUTED, "q_lora_rank": None}, "asked for by q_lora_rank of"),
    ("deepseek_v3", {**ROUTED, **rope(**YARN, mscale=1.0, mscale_all_dim=1.0)}, EQUAL),
]


@pytest.mark.parametrize("settings", [{}, {"norm_topk_prob": False}, {"rope_interleave": False}])
def test_keys_that_change_nothing_are_not_named(settings, tmp_path):
    from transformers import AutoConfig

    from nemo_rod.megatron.config_keys import left_out

    every = {**SIZES, **ROUTED, **UNUSED, **settings, "architectures": ["DeepseekV3ForCausalLM"]}
    AutoConfig.for_model("deepseek_v3", **every).save_pretrained(tmp_path)
    assert left_out(str(tmp_path)) == [*settings]


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared") / "blocks"
    sources = [
        SourceSpec(name=role, role=role, kind="synthetic", files=[file], max_bytes=20_000)
        for role, file in (("adaptation", "dialect:0:0.25"), ("replay", "markov:1"))
    ]
    prepare(folder, sources, tokenizer=load_tokenizer("byte"), block_size=128)
    return folder


@pytest.fixture
def fresh(monkeypatch):
    """Megatron keeps settings of attention in the environment, and refuses another model's."""
    monkeypatch.setattr("nemo_rod.megatron.base_losses._LENGTH", 64)  # half of a block
    yield
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    for name in ("FLASH", "FUSED", "UNFUSED"):
        os.environ.pop(f"NVTE_{name}_ATTN", None)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("kind", "settings", "refusal"),
    [*BASES, *(pytest.param(*row, marks=pytest.mark.slow) for row in FURTHER)],
)
def test_a_base_is_equal_or_refused_by_name(kind, settings, refusal, blocks, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    from nemo_rod.megatron.base_losses import FILE, compare_base

    torch.manual_seed(1)
    written = settings.get("written", {})  # into config.json alone
    config = AutoConfig.for_model(kind, **{**SIZES, **settings, "written": None})
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(6.0)  # so that positions matter
    model.save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | written))
    job = ExportJob(
        name="check", config=configured(model__precision="bf16"), blocks=str(blocks),
        out=str(tmp_path), start=str(tmp_path / "hf"), saved="",
    )  # fmt: skip
    if refusal:
        with pytest.raises(ValueError, match=re.escape(refusal)) as refused:
            compare_base(job, job.start)
        assert "\n" not in str(refused.value) and "Error" not in str(refused.value)
        assert not (tmp_path / FILE).exists()
        return
    compare_base(job, job.start)
    found = json.loads((tmp_path / FILE).read_text())
    assert found["difference"] <= 1e-5 and found["precision"] == "fp32"
    (tmp_path / "hf" / "config.json").unlink()
    compare_base(job, job.start)  # once
