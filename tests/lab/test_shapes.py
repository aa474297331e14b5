"""Parameters and FLOPs of a model's shape, against the real classes and other people's counters."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from nemo_rod.installation import config_folder
from nemo_rod.lab.plan.built_shapes import read_shape
from nemo_rod.lab.plan.shapes import Block, Shape, forward_flops
from nemo_rod.lab.rehearsal.forms import small_form

MODELS = sorted((config_folder() / "model").glob("*.yaml"))
# Parameters of AutoModelForCausalLM.from_config on the meta device (transformers 5.23: Qwen3_5,
# Qwen3_5Moe and NemotronHForCausalLM), and those that one token meets. Of dense models, the numbers
# on their pages on the hub; of Gemma 3 4B, without its vision tower.
COUNTED = {
    "nemotron_3_nano_30b_a3b": (31_577_937_344, 3_580_073_408),
    "nemotron_3_5_lightning": (31_577_937_344, 3_580_073_408),
    "nemotron_nano_12b_v2": (12_310_001_152, 12_310_001_152),
    "nemotron_3_nano_4b": (3_973_556_832, 3_973_556_832),
    "qwen3_4b": (4_022_468_096, 4_022_468_096), "qwen3_5_35b_a3b": (34_660_610_688, 3_454_988_928),
    "qwen3_8b": (8_190_735_360, 8_190_735_360), "qwen3_8_27b": (26_895_998_464, 26_895_998_464),
    "gemma3_4b": (3_880_263_168, 3_880_263_168), "ministral3_3b": (3_429_006_336, 3_429_006_336),
    "qwen3_1_7b": (1_720_574_976, 1_720_574_976), "gpt_oss_20b": (20_914_757_184, 4_187_440_704),
    "qwen3_5_9b": (8_953_803_264, 8_953_803_264), "smollm2_1_7b": (1_711_376_384, 1_711_376_384),
    "qwen3_5_4b": (4_205_751_296, 4_205_751_296), "llama3_2_3b": (3_212_749_824, 3_212_749_824),
    "gemma4_e4b": (7_463_013_376, 7_463_013_376), "llama3_2_1b": (1_235_814_400, 1_235_814_400),
}  # fmt: skip
TINY: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 64,
}  # fmt: skip
SIZE = 24  # tokens
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def shape_of(file: Path) -> dict[str, Any]:
    model = OmegaConf.load(file)
    if "defaults" in model:  # the width of another model
        model = OmegaConf.merge(OmegaConf.load(file.with_name(f"{model.defaults[0]}.yaml")), model)
    model = OmegaConf.to_container(model)
    assert isinstance(model, dict)
    return model.get("shape") or model["architecture"]


@pytest.mark.parametrize("file", MODELS, ids=lambda file: file.stem)
def test_parameters_are_those_of_the_real_classes(file):
    if file.stem.startswith("gemma4"):
        pytest.importorskip("transformers", minversion="5.0")
    shape = read_shape(shape_of(file))
    counts = (shape.parameters, shape.active_parameters)
    assert counts == COUNTED.get(file.stem, counts)
    assert (shape.parameters > 1e9) == (file.stem in COUNTED)


def built(keys: dict[str, Any]) -> tuple[Any, dict[str, int], float]:
    """transformers' own class: configuration, parameters by name, and FLOPs that torch counts."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    options = {key: value for key, value in keys.items() if key != "model_type"}
    described = transformers.AutoConfig.for_model(keys["model_type"], **options)
    # the grouped product that transformers 5 has for experts is none that torch's counter knows
    described._experts_implementation = "eager"
    build = transformers.AutoModelForCausalLM.from_config
    model = build(described, attn_implementation="eager").eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.arange(SIZE)[None], use_cache=False)
    parameters = {name: p.numel() for name, p in model.named_parameters()}
    return described, parameters, counter.get_total_flops()


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", **TINY},
        {"model_type": "llama", **TINY, "tie_word_embeddings": True},
        {"model_type": "qwen3", **TINY},
        {"model_type": "qwen3_moe", **TINY, **EXPERTS},
    ],
    ids=lambda config: f"{config['model_type']}-{config.get('tie_word_embeddings', False)}",
)
def test_parameters_and_flops_are_those_that_torch_counts(config):
    keys = {"tie_word_embeddings": False, **config}
    described, parameters, counted = built(keys)
    shape = read_shape(keys)
    assert shape.parameters == sum(parameters.values())
    assert read_shape(described.to_dict()) == shape  # as transformers saves it
    # eager attention also computes what the causal mask throws away
    masked = sum(block.attending for block in shape.blocks) * (SIZE - 1) / 2
    rotary = counted / SIZE - forward_flops(shape, SIZE) - masked
    assert 0 <= rotary <= 2 * 16  # the angles of the rotary embedding: one product per dimension


# Text models that Megatron-Bridge converts, all but qwen3_next without a reader; and whether torch
# counts the FLOPs that a GPU would do: its way round missing kernels for a state does more, and
# llama4's sends every token to every expert.
BUILT = {
    **dict.fromkeys(("deepseek_v3", "gemma", "gemma2", "gemma3_text", "glm4", "glm4_moe"), True),
    **dict.fromkeys(("gpt_oss", "granite", "mistral", "mixtral", "nemotron", "phi3"), True),
    **dict.fromkeys(("olmoe", "olmo2", "olmo3", "qwen2", "qwen2_moe", "smollm3"), True),
    **{"starcoder2": True, "falcon_h1": False, "llama4_text": False, "qwen3_next": False},
}


@pytest.mark.parametrize("kind", BUILT)
def test_other_models_are_counted_in_transformers_own_class(kind):
    pytest.importorskip("transformers", minversion="5.0")
    published = {"model_type": kind, **({"num_key_value_heads": 8} if kind == "nemotron" else {})}
    keys = {"model_type": kind, **small_form(published, where=kind).values}
    described, parameters, counted = built(keys)
    shape = read_shape(keys)
    assert shape.parameters == sum(parameters.values())
    saved = json.loads(described.to_json_string(use_diff=False))  # infinite numbers as objects
    assert read_shape(saved).parameters == shape.parameters
    assert shape.has_experts == any("expert" in name for name in parameters)
    # eager attention attends everywhere: what masks throw away is counted, too
    everywhere = sum(block.attending * SIZE for block in shape.blocks)
    blind = tuple(
        tuple(dataclasses.replace(block, attending=0.0) for block in layer)
        for layer in shape.layers
    )
    without = dataclasses.replace(shape, layers=blind)
    attended = forward_flops(shape, SIZE) - forward_flops(without, SIZE)
    ours = forward_flops(shape, SIZE) + everywhere - attended
    if BUILT[kind]:
        assert ours == pytest.approx(counted / SIZE, rel=0.02)


def test_a_token_attends_to_a_window_alone():
    block = Block(kind="attention", attending=1.0, window=3)
    shape = Shape(layers=((block,),), hidden_size=0, vocab_size=0, tied=True)
    assert forward_flops(shape, 5) == (1 + 2 + 3 + 3 + 3) / 5
    assert forward_flops(shape, 2) == 1.5


@pytest.mark.filterwarnings("ignore")  # of what a machine without CUDA lacks
def test_flops_agree_with_megatron_bridges_counter():
    pytest.importorskip("megatron")
    import nemo_rod.megatron  # noqa: F401 - without CUDA, it stands in for what Bridge asks for

    # isort: split
    from megatron.bridge.training.utils.flop_utils import num_floating_point_operations

    described = shape_of(config_folder() / "model" / "nemotron_nano_12b_v2.yaml")
    provider: Any
    try:
        from megatron.bridge.models.nemotronh import nemotron_h_provider

        provider = nemotron_h_provider.NemotronNanoModelProvider12Bv2()
        provider.vocab_size = 131072
    except ImportError:  # since 0.6 the providers of published models are made of their configs
        from megatron.bridge import AutoBridge
        from transformers import NemotronHConfig

        config = NemotronHConfig(**described, architectures=["NemotronHForCausalLM"])
        provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    provider.seq_length = 4096
    theirs = num_floating_point_operations(SimpleNamespace(model=provider), batch_size=1) / 4096
    ours = 3 * forward_flops(read_shape(described), 4096)  # backward costs two forward passes
    assert ours == pytest.approx(theirs, rel=0.01)


def test_a_prefix_costs_less_than_its_share():
    shape = read_shape(shape_of(config_folder() / "model" / "qwen3_5_9b.yaml"))
    whole, half = (forward_flops(shape, size) for size in (4096, 2048))
    attending = sum(block.attending for block in shape.blocks)
    assert whole - half == pytest.approx(attending * 1024)


def test_a_multimodal_config_is_read_for_its_text():
    text = {"model_type": "qwen3", **TINY}
    both = {"model_type": "qwen3_vl", "text_config": text, "vision_config": {"depth": 3}}
    assert read_shape(both) == read_shape(text)
