"""A scoring pass has no side effects: hazards are guarded, or refused in one sentence."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.usefixtures("megatron")


NEWER = {"moe_router_force_biased", "hybrid_context_parallel"}  # the second set has neither


def configuration(**settings: Any) -> Any:
    """A real configuration with some settings changed."""
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(num_layers=4, hidden_size=8, num_attention_heads=1)
    for name, value in settings.items():
        if name in NEWER and not hasattr(config, name):
            pytest.skip(f"this megatron-core has no {name}")
        assert hasattr(config, name), name
        setattr(config, name, value)
    return config


def refusal(
    *, scoring: int = 1, is_prefix: bool = False, ddp: str = "", **settings: Any
) -> str | None:
    """The message about a configuration; None if it is safe.

    `ddp` is a feature of the data-parallel wrapper that is on, and `scoring` the number of blocks
    in a micro-batch of scoring, of which training has 1.
    """
    from nemo_rod.megatron.scoring.forward_only import refuse_other_shapes, refuse_unsafe

    config = configuration(**settings)
    try:
        refuse_unsafe(config, SimpleNamespace(**{ddp: True} if ddp else {}))
        refuse_other_shapes(config, scoring=scoring, training=1, is_prefix=is_prefix)
    except ValueError as error:
        return str(error)
    return None


OVERLAPPED = {"tp_comm_overlap": True, "tensor_model_parallel_size": 2, "sequence_parallel": True}
INTERLEAVED = {"virtual_pipeline_model_parallel_size": 2, "pipeline_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (INTERLEAVED, "virtual pipeline stages with these p2p settings: it trains on wrong grad"),
        ({"cuda_graph_impl": "local"}, "cuda_graph_impl='local': it replays graphs"),
        ({"hybrid_context_parallel": True}, "hybrid_context_parallel: it deals the tokens of a"),
        ({"fp8": "hybrid", "fp8_recipe": "delayed"}, "delayed FP8 scaling: it lets scoring move"),
        ({"fp8": "hybrid", "fp8_recipe": "custom"}, "fp8_recipe='custom': it has quantizers of"),
        ({"fp4": "e2m1", "fp4_recipe": "custom"}, "fp4_recipe='custom': it has quantizers of"),
        ({"ddp": "reuse_grad_buf_for_mxfp8_param_ag"},
         "reuse_grad_buf_for_mxfp8_param_ag: it leaves gradients where scoring between two st"),
        ({"moe_expert_capacity_factor": 1.5}, "it drops tokens by what else is in a micro-batch"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "it routes a token by its neighbours"),
        ({"moe_router_load_balancing_type": ["sinkhorn"]}, "it routes a token by its neighbours"),
        ({"moe_router_force_load_balancing": True}, "it scores with random routing; set moe_rou"),
        ({"moe_router_force_biased": 0.1},
         "it scores with random routing; set moe_router_force_bias"),
        ({"qk_clip": True}, "qk_clip: it clips queries and keys by candidates that are not trai"),
        ({"fine_grained_activation_offloading": True}, "uses up its warm-up on the scoring pass"),
        ({"ddp": "use_megatron_fsdp"}, "Megatron FSDP: it is not supported yet"),
        ({**OVERLAPPED, "scoring": 2},
         "its buffers have only the shape of training's; set tp_comm_overlap=False, or"),
        ({**OVERLAPPED, "is_prefix": True},
         "or scoring.micro_batch_size to train.micro_batch_size and"),
    ],
)  # fmt: skip
def test_what_scoring_would_break_is_refused(settings, sentence):
    message = refusal(**settings)
    assert message is not None and message.startswith("Selection does not work with ")
    assert sentence in message


@pytest.mark.parametrize(
    "settings",
    [
        {}, {**INTERLEAVED, "overlap_p2p_comm": True, "batch_p2p_comm": False},
        {"fp8": "hybrid", "fp8_recipe": "tensorwise"}, {"fp8_recipe": "custom"},
        {"context_parallel_size": 2}, {"moe_expert_capacity_factor": -1.0}, OVERLAPPED,
        {"tp_comm_overlap": True, "scoring": 2},
        {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]},
    ],
)  # fmt: skip
def test_what_is_safe_is_not_refused(settings):
    assert refusal(**settings) is None


@pytest.mark.parametrize(("overlap", "sizes"), [(False, [3, 3]), (True, [4, 4])])
def test_scoring_pads_its_last_pass_where_one_shape_runs(overlap, sizes):
    from nemo_rod.megatron.scoring.scorer import MegatronScorer

    def group(size: int) -> SimpleNamespace:
        return SimpleNamespace(size=lambda: size, rank=lambda: 1)

    scorer: Any = SimpleNamespace(
        config=SimpleNamespace(tp_comm_overlap=overlap, tensor_model_parallel_size=2),
        groups=SimpleNamespace(dp=group(2), pp=group(1)),
        replicas=2,
        micro_batch_size=4,
        model=[None],
        store=SimpleNamespace(block_size=8),
    )
    share, size = MegatronScorer._share(scorer, np.arange(11), 8)
    assert [size] * (len(share) // size) == sizes
    assert set(share) >= {i for i in range(len(share), 11)}


def test_recipes_may_be_megatrons_own_names():
    from megatron.core.enums import Fp8Recipe

    delayed = refusal(fp8="hybrid", fp8_recipe=Fp8Recipe.delayed)
    assert delayed is not None and "delayed FP8 scaling" in delayed
    assert refusal(fp8="hybrid", fp8_recipe=Fp8Recipe.mxfp8) is None


def test_a_language_model_that_its_provider_freezes_is_trained():
    from nemo_rod.megatron.objective import next_token_alone

    # defaults of Megatron-Bridge's Qwen3VLMoEModelProvider, whose import takes long
    provider = SimpleNamespace(
        freeze_language_model=True, freeze_vision_model=True, freeze_vision_projection=False
    )
    next_token_alone(provider)
    assert not provider.freeze_language_model
    assert provider.freeze_vision_model and provider.freeze_vision_projection


def test_a_tower_that_would_decay_is_named_with_its_cure(monkeypatch):
    from nemo_rod.megatron import objective

    monkeypatch.setattr(objective, "all_or_none", lambda check: check())  # of one process
    cures = {"audio_tower": "choose a model without sound", "vision_model": "freeze_"}
    for tower, cure in cures.items():
        model = torch.nn.ModuleDict(
            {"decoder": torch.nn.Linear(2, 2), tower: torch.nn.Linear(2, 2)}
        )
        with pytest.raises(ValueError, match=rf"the weight decay of {tower}\.weight, .*: .*{cure}"):
            objective.refuse_other_losses([model])
        model[tower].requires_grad_(False)
        assert objective.refuse_other_losses([model]) == [model]


def test_nemo_rl_exports_weights_that_every_replica_has_gathered(monkeypatch):
    """Hooks of the next forward pass would gather them; an export has no such pass."""
    from nemo_rod.hosts.nemo_rl.worker import RoDWorkerMixin
    from nemo_rod.megatron import gaps

    done: list[str] = []
    buckets = SimpleNamespace(finish_param_sync=lambda **_: done.append("gathered"))
    worker: Any = RoDWorkerMixin()
    worker.model = SimpleNamespace(
        use_forward_hook=True,
        remove_forward_pre_hook_handles={"module": "hook"},
        bucket_groups=[buckets],
        expert_parallel_bucket_groups=[buckets],
    )
    worker.megatron_bridge = None
    monkeypatch.setattr(gaps, "save_hf", lambda *_: done.append("hf"))
    worker.rod_export(folder="hf")
    assert done == ["gathered", "gathered", "hf"]


def test_estimates_from_training_losses_need_training_without_dropout():
    from nemo_rod.megatron.scoring.training_losses import refuse_dropout

    refuse_dropout(configuration(hidden_dropout=0.0, attention_dropout=0.0))
    with pytest.raises(ValueError, match=r"attention_dropout=0\.1, .* this arm chooses by"):
        refuse_dropout(configuration(hidden_dropout=0.0, attention_dropout=0.1))


def test_the_indexer_of_sparse_attention_is_refused():
    """Built by name: Megatron's own sparse attention needs kernels of a GPU."""
    from nemo_rod.megatron import objective

    def chunk(**parts: torch.nn.Module) -> Any:
        attention: Any = torch.nn.Module()
        attention.config = SimpleNamespace(mtp_num_layers=None)
        for name, part in parts.items():
            setattr(attention, name, part)
        attention.skipped = None
        return torch.nn.ModuleDict({"core_attention": attention})

    assert not [*objective._other_losses(chunk())]
    ((loss, cure),) = objective._other_losses(chunk(indexer=torch.nn.Linear(2, 2)))
    assert loss.endswith("the sparse attention's indexer in core_attention") and "without" in cure


def test_megatrons_sparse_attention_calls_its_indexer_so():
    name = "megatron.core.transformer.experimental_attention_variant.dsa"
    attention = pytest.importorskip(name).DSAttention
    assert "indexer" in attention.__init__.__code__.co_names


@pytest.mark.parametrize("size", [1, 2, 4])
def test_context_parallel_ranks_share_positions_out_and_put_them_back(size):
    from nemo_rod.megatron.scoring.scoring_pass import at_their_places, own_positions

    whole = torch.arange(1, 1 + 2 * 16).view(2, 16)
    back = torch.zeros_like(whole)
    for rank in range(size):
        group: Any = SimpleNamespace(size=lambda: size, rank=lambda rank=rank: rank)
        own = own_positions(whole, group)
        assert own.shape == (2, 16 // size)
        placed = at_their_places(own, group)
        assert not (back * placed).any()  # no position has two ranks
        back += placed
    assert torch.equal(back, whole)


def test_graphs_of_transformer_engine_are_kept_where_scoring_runs_eagerly(monkeypatch):
    """A training step replays them, and scoring in evaluation mode does not look at them."""
    from megatron.core.transformer import module

    assert refusal(cuda_graph_impl="transformer_engine") is None
    decides = module.GraphableMegatronModule._should_call_te_cudagraph
    config = SimpleNamespace(cuda_graph_impl="transformer_engine")
    layer: Any = SimpleNamespace(config=config, cuda_graphs=[1], training=True)
    assert decides(layer)
    layer.training = False
    assert not decides(layer)
    monkeypatch.setattr(
        module.GraphableMegatronModule, "_should_call_te_cudagraph", lambda self: True
    )
    assert "replays graphs" in (refusal(cuda_graph_impl="transformer_engine") or "")


def test_scoring_leaves_no_maxima_in_the_logged_attention_logits():
    from nemo_rod.megatron.scoring.forward_only import forward_only

    chunk: Any = torch.nn.Linear(2, 2)
    chunk.current_max_attn_logits = training = torch.tensor(1.0)
    with forward_only([chunk], configuration()):
        assert chunk.current_max_attn_logits is None
        chunk.current_max_attn_logits = torch.tensor(9.0)
    assert chunk.current_max_attn_logits is training


def test_frozen_submodules_stay_in_evaluation_mode():
    from nemo_rod.megatron.scoring.forward_only import forward_only

    trained, frozen = torch.nn.Dropout(), torch.nn.Sequential(torch.nn.Dropout())
    chunk = torch.nn.ModuleList([trained, frozen])
    frozen.eval()
    with forward_only([chunk], configuration()):
        assert not any(module.training for module in chunk.modules())
    assert chunk.training and trained.training
    assert not frozen.training and not frozen[0].training
