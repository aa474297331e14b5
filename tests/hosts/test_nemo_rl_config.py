"""RoD on NeMo-RL without NeMo-RL: configuration, refusals, translation of jobs."""

import copy
import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from omegaconf import OmegaConf
from tiny import configured

from nemo_rod.config import DTYPES, Optimisation, Parallel
from nemo_rod.hosts.nemo_rl import compat
from nemo_rod.hosts.nemo_rl.policy import FOLDER, separate_conversions
from nemo_rod.hosts.nemo_rl.settings import check, of_job
from nemo_rod.hosts.nemo_rl.worker import update_metrics
from nemo_rod.installation import config_folder
from nemo_rod.jobs import ReferenceJob, TrainJob
from nemo_rod.loggers import LOGGERS
from nemo_rod.selection import Joint, Pool, TakeAll, choose
from nemo_rod.selection.arms import Arm, make_arm
from nemo_rod.selection.competition import model_tflops
from nemo_rod.selection.dealing import deal
from nemo_rod.selection.references.folder import precision_name


def rod_arm(**changes: Any) -> Arm:
    """The arm that the good configuration trains on that store, or one that differs from it."""
    known: dict[str, Any] = {"multiplier": 2.0, "balance": "expected", "kappa": 1.0, "seed": 5}
    return make_arm("rod", num_adaptation=9, num_replay=9, batch_size=16, **{**known, **changes})


def test_vision_configurations_have_the_list_that_an_older_bridge_copies():
    configuration = pytest.importorskip("transformers.models.qwen3_5.configuration_qwen3_5")
    compat.complete_vision_configs()
    config = configuration.Qwen3_5VisionConfig()
    assert list(copy.deepcopy(config.deepstack_visual_indexes)) == []
    config = configuration.Qwen3_5VisionConfig(deepstack_visual_indexes=[1])
    assert config.deepstack_visual_indexes == [1]


def conversions_of(model: Path | str, variables: dict[str, str]) -> Path:
    separate_conversions(str(model), "run/out", variables)
    return Path(variables[FOLDER])


def test_every_state_of_a_checkpoint_is_converted_to_a_folder_of_its_own(tmp_path):
    models, home = [tmp_path / name for name in ("base", "specialist")], {"HF_HOME": "/shared/hf"}
    for model in models:
        model.mkdir()
        (model / "config.json").write_text(model.name)
    process, place = {**home}, Path("/shared/hf/nemo_rl")
    base, specialist = (conversions_of(model, process) for model in models)
    assert base != specialist and base.parent == specialist.parent == place
    # every start takes the same one, and so does a later run of one process
    assert conversions_of(models[0], process) == conversions_of(models[0], {**home}) == base
    assert conversions_of("team/model", process) == place
    # the user's own folder goes first, and by default it is one that every node sees
    assert conversions_of(models[0], {FOLDER: "/x"}).parent == Path("/x")
    assert conversions_of(models[0], {}).parent == Path("run/out/converted").absolute()
    (models[0] / "config.json").write_text("made anew")
    assert conversions_of(models[0], {**home}) != base


def job_of(kind: type = TrainJob, start: str = "base", **options: Any) -> Any:
    """A job on eight processes."""
    keys = {
        "parallel": Parallel(data=4, tensor=2), "model__precision": "bf16",
        "scoring__micro_batch_size": 4, "seed": 5, "launcher__stall_seconds": 60.0,
    }  # fmt: skip
    config = configured(**{**keys, **options.pop("keys", {})})
    return kind(name="rod", config=config, blocks="blocks", out="out", start=start, **options)


def translated(kind: type = TrainJob, **options: Any) -> dict[str, Any]:
    """A job in NeMo-RL's terms."""
    return of_job(job_of(kind, **options))


def optimised(**changes: Any) -> Optimisation:
    return Optimisation(**{"steps": 10, **changes}, batch_size=16, micro_batch_size=2, lr=1e-3)


def test_training_job_in_nemo_rls_terms():
    keys = {"checkpoint__every": 7, "recipe": "toy", "logger": ["wandb", "tensorboard"]}
    values = translated(arm=rod_arm(), keys={"train": optimised(warmup_fraction=0.25), **keys})
    policy, megatron = values["policy"], values["policy"]["megatron_cfg"]
    assert policy["train_global_batch_size"] == 16 and policy["train_micro_batch_size"] == 2
    assert policy["precision"] == "bfloat16" and policy["max_total_sequence_length"] == 64
    assert megatron["tensor_model_parallel_size"] == 2
    assert megatron["optimizer"]["min_lr"] == pytest.approx(1e-4)
    assert (megatron["scheduler"]["lr_warmup_iters"], megatron["scheduler"]["lr_decay_iters"]) == (
        2, 10,
    )  # fmt: skip
    assert values["cluster"] == {"gpus_per_node": 8, "num_nodes": 1}
    assert values["checkpointing"]["save_period"] == 7
    logger = values["logger"]
    assert [logger[f"{name}_enabled"] for name in LOGGERS] == [True, True, False]
    assert logger["wandb"] == {"project": "nemo-rod", "name": "toy/rod"}


def scoring_job(**options: Any) -> dict[str, Any]:
    """A job of references in NeMo-RL's terms."""
    return translated(ReferenceJob, role="replay", model_digest="abc", lengths=[16], **options)


def test_scoring_job_in_nemo_rls_terms():
    values = scoring_job(keys={"cluster__gpus_per_node": 4})
    assert values["cluster"] == {"gpus_per_node": 4, "num_nodes": 2}
    assert values["policy"]["train_global_batch_size"] == 16  # divides over the four replicas


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("generation", {"temperature": 0.7}, "policy.generation is 'a section': expected null"),
        ("dynamic_batching.enabled", True, "policy.dynamic_batching.enabled is True: expected"),
        ("sequence_packing.enabled", True, "policy.sequence_packing.enabled is True: expected"),
        ("megatron_cfg.context_parallel_size", 2, "context_parallel_size is 2: expected 1"),
        ("megatron_cfg.use_linear_ce_fusion_loss", True, "use_linear_ce_fusion_loss is True"),
        ("megatron_cfg.use_fused_linear_logprobs", True, "use_fused_linear_logprobs is True"),
        ("megatron_cfg.enabled", False, "policy.megatron_cfg.enabled is False: expected true"),
        ("train_global_batch_size", 12, "expected 8: train.batch_size sets it"),
        ("max_total_sequence_length", 128, "expected 64: domain.block_size sets it"),
    ],
)
def test_what_cannot_run_is_refused(key, value, sentence):
    job = job_of(arm=rod_arm())
    ours = OmegaConf.load(config_folder() / "nemo_rl" / "rod.yaml")
    own = OmegaConf.create({"policy": {"megatron_cfg": {"context_parallel_size": 1}}})
    config = OmegaConf.merge(ours, own, of_job(job))
    assert config.policy.megatron_cfg.moe_router_load_balancing_type == "none"
    check(cast(Any, config), job)
    OmegaConf.update(config, f"policy.{key}", value)
    with pytest.raises(ValueError) as caught:
        check(cast(Any, config), job)
    assert str(caught.value).startswith("nemo_rl.") and sentence in str(caught.value)


@pytest.mark.parametrize(
    ("config", "fused"),
    [
        ({"hidden_act": "silu"}, True),
        ({"text_config": {"hidden_act": "silu"}, "hidden_act": "gelu"}, True),  # of Qwen3.5
        ({"hidden_act": "gelu_pytorch_tanh"}, False),
        ({"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu"}, False),  # of Nemotron
    ],
)
def test_activations_are_fused_where_megatron_can(config, fused, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert (
        scoring_job(start=str(tmp_path))["policy"]["megatron_cfg"]["bias_activation_fusion"]
        == fused
    )


@pytest.mark.parametrize("saves", [False, True])
def test_keys_that_save_memory_in_nemo_rls_terms(saves):
    small = {"recompute": "full", "grad_reduce": "bf16"} if saves else {}
    train = optimised(**small, precision_aware_optimizer=saves, optimizer_offload=saves)
    megatron = translated(arm=rod_arm(), keys={"train": train})["policy"]["megatron_cfg"]
    optimizer = megatron["optimizer"]
    assert megatron["activation_checkpointing"] is saves
    assert megatron.get("recompute_granularity") == ("full" if saves else None)
    assert megatron["distributed_data_parallel_config"] == {"grad_reduce_in_fp32": not saves}
    assert optimizer["use_precision_aware_optimizer"] is saves
    assert optimizer["optimizer_cpu_offload"] is saves
    assert optimizer["optimizer_offload_fraction"] == float(saves)  # all that NeMo-RL allows


@pytest.mark.parametrize("name", DTYPES)
def test_precisions_have_one_name_each(name):
    assert precision_name(DTYPES[name]) == precision_name(name) == name
    assert precision_name("float16") == "fp16"  # of NeMo-RL alone


def test_winners_are_dealt_by_whole_micro_batches():
    shares = deal(np.arange(100, 112), micro_batch_size=2, replicas=3)
    assert [share.tolist() for share in shares] == [
        [100, 101, 106, 107],
        [102, 103, 108, 109],
        [104, 105, 110, 111],
    ]


def test_metrics_of_an_update():
    trained = {"global_loss": [3.0], "grad_norm": [2.0], "all_mb_metrics": {"lr": [0.5, 0.5]}}
    metrics = {"train/loss": 3.0, "train/grad_norm": 2.0, "train/lr": 0.5}
    assert update_metrics(trained) == metrics
    assert update_metrics(trained | {"total_flops": 6.0}) == metrics | {"flops": 6.0}


def test_tflops_are_of_scoring_too():
    """An update of 8e12 operations on half of a pool of half blocks, in 2 s."""
    pool = Pool(0, np.arange(8), np.arange(8) > 3)
    loss = np.ones(8, dtype=np.float32)
    choice = choose(pool, Joint(), 4, loss, 0 * loss)
    assert model_tflops(choice, 8e12, 2.0, prefix=0.5) == pytest.approx(4 * (1 + 2 / 2 / 3))
    assert model_tflops(choose(pool, TakeAll(), 8), 8e12, 2.0, prefix=1.0) == 4.0
