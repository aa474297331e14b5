"""RoD on NeMo-RL without NeMo-RL: configuration, refusals, translation of jobs."""

import copy
import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import yaml
from corpus_cases import run, source, texts, write
from omegaconf import OmegaConf
from places import ROOT
from tiny import configured

from nemo_rod.config import DTYPES, Optimisation, Parallel, config_folder
from nemo_rod.corpus.store import BlockStore
from nemo_rod.hosts.nemo_rl import compat, inputs, reference_losses, settings
from nemo_rod.hosts.nemo_rl.launcher import nemo_rl_values
from nemo_rod.hosts.nemo_rl.policy import FOLDER, separate_conversions
from nemo_rod.hosts.nemo_rl.settings import RoD, check
from nemo_rod.hosts.nemo_rl.worker import update_metrics
from nemo_rod.jobs import ReferenceJob, TrainJob
from nemo_rod.loggers import LOGGERS
from nemo_rod.selection import Joint, Pool, ReferenceWriter, TakeAll, choose
from nemo_rod.selection.arms import Arm, make_arm
from nemo_rod.selection.competition import model_tflops
from nemo_rod.selection.dealing import deal
from nemo_rod.selection.references.folder import precision_name, role_manifest

RECIPES = sorted((ROOT / "recipes" / "nemo_rl").glob("*.yaml"))

GOOD: dict[str, Any] = {
    "rod": {"steps": 3, "worker": "a.B", "hf": False, "blocks": "blocks", "out": "out",
            "selection": {"balance": "expected", "on_nonfinite": "refuse"},
            "scoring": {"micro_batch_size": 4, "prefix": "1", "every": 1, "precision": None}},
    "policy": {
        "train_global_batch_size": 16,
        "train_micro_batch_size": 2,
        "sequence_packing": {"enabled": False},
        "dynamic_batching": {"enabled": False},
        "megatron_cfg": {"enabled": True, "tensor_model_parallel_size": 2,
                         "pipeline_model_parallel_size": 1, "context_parallel_size": 1},
    },
    "cluster": {"gpus_per_node": 8, "num_nodes": 1},
}  # fmt: skip


def changed(key: str, value: Any) -> dict[str, Any]:
    """The good configuration with another value of a key in dotted form."""
    config = OmegaConf.create(copy.deepcopy(GOOD))
    OmegaConf.update(config, key, value)
    values: Any = OmegaConf.to_container(config)
    return values


STORE = cast(BlockStore, SimpleNamespace(num_adaptation=9, num_replay=9))


def rod_arm(**changes: Any) -> Arm:
    """The arm that the good configuration trains on that store, or one that differs from it."""
    known: dict[str, Any] = {"multiplier": 2.0, "balance": "expected", "kappa": 1.0, "seed": 5}
    return make_arm("rod", num_adaptation=9, num_replay=9, batch_size=16, **{**known, **changes})


@pytest.mark.parametrize(
    "key, value, sentence",
    [
        ("rod.steps", 0, "rod.steps=0 is not valid: expected in [1, 2**31)."),
        ("rod.seed", 0, "rod.seed=0 is not valid: expected in [1, 2**31)."),
        ("rod.selection.kappa", -1, "rod.selection.kappa=-1.0 is not valid: expected >= 0."),
        ("rod.worker", None, "rod.worker is None: expected a worker class"),
        ("rod.selection.balance", "half", "rod.selection.balance='half' is not valid"),
        ("rod.selection.on_nonfinite", "skip", "expected refuse or exclude"),
        ("rod.scoring.every", 4, "rod.scoring.every is 4: expected 1: NeMo-RL's workers"),
        ("rod.scoring.precision", "fp8", "rod.scoring.precision is 'fp8': expected null"),
        ("rod.scoring.prefix", "2/3", "prefix='2/3' is not valid: expected 1, 1/2, 1/4 or 1/8."),
        ("policy.generation", {"temperature": 0.7}, "policy.generation is 'a section'"),
        ("policy.dynamic_batching.enabled", True, "policy.dynamic_batching.enabled is True"),
        ("policy.sequence_packing.enabled", True, "policy.sequence_packing.enabled is True"),
        ("policy.megatron_cfg.context_parallel_size", 2, "context_parallel_size is 2: expected 1"),
        ("policy.megatron_cfg.use_linear_ce_fusion_loss", True, "use_linear_ce_fusion_loss is"),
        ("policy.megatron_cfg.use_fused_linear_logprobs", True, "use_fused_linear_logprobs is"),
        ("policy.megatron_cfg.enabled", False, "policy.megatron_cfg.enabled is False"),
        ("policy.megatron_cfg.tensor_model_parallel_size", 3, "not a multiple of the 3 processes"),
        ("policy.train_global_batch_size", 12, "needs a multiple of 8"),
    ],
)
def test_what_cannot_run_is_refused(key: str, value: Any, sentence: str) -> None:
    check(GOOD)
    with pytest.raises(ValueError) as caught:
        check(changed(key, value))
    assert sentence in str(caught.value)


@pytest.mark.parametrize("prefix", ["1/2", "1"])
@pytest.mark.parametrize("job", [True, False])
def test_an_arm_is_built_from_a_job_or_from_the_keys(job: bool, prefix: str) -> None:
    arm = rod_arm(prefix=prefix)
    config = changed("rod.scoring.prefix", "1" if job else prefix)
    variant = dataclasses.asdict(arm) if job else None
    config["rod"] |= {"arm": "rod", "seed": 5, "variant": variant}
    assert inputs.build_arm(config, STORE) == arm


def test_recipe_follows_schema_and_naming_and_trains_as_the_paper_does() -> None:
    (path,) = RECIPES
    values, legal, model = (
        yaml.safe_load(file.read_text())
        for file in (
            path,
            ROOT / "recipes" / "legal_nemotron_nano_12b_v2.yaml",
            config_folder() / "model" / "nemotron_nano_12b_v2.yaml",
        )
    )
    rod, policy = values["rod"], values["policy"]
    OmegaConf.merge(OmegaConf.structured(RoD), rod)  # refuses unknown keys
    nodes, gpus = values["cluster"]["num_nodes"], values["cluster"]["gpus_per_node"]
    tensor = policy["megatron_cfg"]["tensor_model_parallel_size"]
    assert re.fullmatch(rf"rod-.*-{nodes}n{gpus}g-megatron-tp{tensor}", path.stem)
    schedule = ("steps", "warmup_steps", "decay_steps")
    assert [rod[key] for key in schedule] == [legal["train"][key] for key in schedule]
    assert policy["train_global_batch_size"] == legal["train"]["batch_size"]
    assert policy["model_name"] == policy["tokenizer"]["name"] == model["hf"]


def test_our_defaults_follow_the_schema_and_train_on_the_loss_alone() -> None:
    values = yaml.safe_load((config_folder() / "nemo_rl" / "rod.yaml").read_text())
    OmegaConf.merge(OmegaConf.structured(RoD), values["rod"])
    megatron = values["policy"]["megatron_cfg"]
    assert megatron["moe_router_load_balancing_type"] == "none"
    assert megatron["mtp_num_layers"] == 0
    assert not megatron["bias_activation_fusion"] and not megatron["apply_rope_fusion"]


def test_vision_configurations_have_the_list_that_an_older_bridge_copies() -> None:
    configuration = pytest.importorskip("transformers.models.qwen3_5.configuration_qwen3_5")
    compat.complete_vision_configs()
    config = configuration.Qwen3_5VisionConfig()
    assert list(copy.deepcopy(config.deepstack_visual_indexes)) == []
    config = configuration.Qwen3_5VisionConfig(deepstack_visual_indexes=[1])
    assert config.deepstack_visual_indexes == [1]


def conversions_of(model: Path | str, variables: dict[str, str]) -> Path:
    separate_conversions(str(model), "run/out", variables)
    return Path(variables[FOLDER])


def test_every_state_of_a_checkpoint_is_converted_to_a_folder_of_its_own(tmp_path: Path) -> None:
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


def test_without_nemo_rl_the_command_says_so(tmp_path: Path) -> None:
    if importlib.util.find_spec("nemo_rl"):
        pytest.skip("NeMo-RL is here")
    (tmp_path / "recipe.yaml").write_text("rod: {}\n")
    command = [sys.executable, "-m", "nemo_rod.cli", "train", "--config", "recipe.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "NeMo-RL cannot be imported" in done.stderr and "v0.6.0" in done.stderr
    assert "Traceback" not in done.stderr


def translated(
    kind: type = TrainJob, gpus_per_node: int = 0, start: str = "base", **options: Any
) -> dict[str, Any]:
    """A job in NeMo-RL's terms."""
    keys = {
        "parallel": Parallel(data=4, tensor=2), "model__precision": "bf16",
        "scoring__micro_batch_size": 4, "seed": 5, "launcher__stall_seconds": 60.0,
    }  # fmt: skip
    config = configured(**keys, **options.pop("keys", {}))
    job = kind(name="rod", config=config, blocks="blocks", out="out", start=start, **options)
    return nemo_rl_values(job, gpus_per_node=gpus_per_node)


def optimised(**changes: Any) -> Optimisation:
    return Optimisation(**{"steps": 10, **changes}, batch_size=16, micro_batch_size=2, lr=1e-3)


def test_training_job_in_nemo_rls_terms() -> None:
    arm, keys = rod_arm(prefix="1/4"), {"checkpoint__every": 7, "recipe": "toy"}
    loggers = {"logger": ["wandb", "tensorboard"]}
    values = translated(
        arm=arm,
        keys={"train": optimised(), **keys, **loggers, "cluster__env": {"PS1": "${ no key"}},
        references=["r"],
        config_digest="abc",
    )
    rod = OmegaConf.merge(OmegaConf.structured(RoD), values["rod"])
    assert (rod.arm, rod.steps, rod.seed, rod.out, rod.hf) == ("rod", 10, 5, "out", True)
    assert Arm(**rod.variant) == arm and rod.config_digest == "abc"
    assert rod.references == ["r"] and rod.selection.on_nonfinite == "refuse"
    policy = values["policy"]
    assert policy["train_global_batch_size"] == 16 and policy["train_micro_batch_size"] == 2
    assert policy["precision"] == "bfloat16" and policy["max_total_sequence_length"] == 64
    assert policy["megatron_cfg"]["tensor_model_parallel_size"] == 2
    assert policy["megatron_cfg"]["optimizer"]["min_lr"] == pytest.approx(1e-4)
    assert values["cluster"] == {"gpus_per_node": 8, "num_nodes": 1}
    assert values["checkpointing"]["save_period"] == 7
    logger = values["logger"]
    assert [logger[f"{name}_enabled"] for name in LOGGERS] == [True, True, False]
    assert logger["wandb"] == {"project": "nemo-rod", "name": "toy/rod"}


def scoring_job(**options: Any) -> dict[str, Any]:
    """A job of references in NeMo-RL's terms."""
    return translated(ReferenceJob, role="replay", model_digest="abc", lengths=[16], **options)


def test_scoring_job_in_nemo_rls_terms() -> None:
    values = scoring_job(gpus_per_node=4)
    assert values["cluster"] == {"gpus_per_node": 4, "num_nodes": 2}
    rod = OmegaConf.merge(OmegaConf.structured(RoD), values["rod"])
    assert (rod.role, rod.model_digest, rod.out) == ("replay", "abc", "out")
    assert (rod.lengths, rod.steps) == ([16], 1)
    assert values["policy"]["train_global_batch_size"] == 16  # divides over the four replicas


@pytest.mark.parametrize(
    ("config", "fused"),
    [
        ({"hidden_act": "silu"}, True),
        ({"text_config": {"hidden_act": "silu"}, "hidden_act": "gelu"}, True),  # of Qwen3.5
        ({"hidden_act": "gelu_pytorch_tanh"}, False),
        ({"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu"}, False),  # of Nemotron
    ],
)
def test_activations_are_fused_where_megatron_can(
    config: dict[str, Any], fused: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert (
        scoring_job(start=str(tmp_path))["policy"]["megatron_cfg"]["bias_activation_fusion"]
        == fused
    )


@pytest.mark.parametrize("saves", [False, True])
def test_keys_that_save_memory_in_nemo_rls_terms(saves: bool) -> None:
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


def scheduler_of(*layers: Any) -> Any:
    """Scheduler that Megatron gets for layers over our defaults."""
    OmegaConf.register_new_resolver("rod_part", settings.schedule_part, replace=True)
    ours = OmegaConf.load(config_folder() / "nemo_rl" / "rod.yaml")
    config = OmegaConf.merge({"rod": OmegaConf.structured(RoD)}, ours, *layers)
    return config.policy.megatron_cfg.scheduler


@pytest.mark.parametrize(
    ("given", "share", "steps", "warmup", "decay"),
    [
        (None, 0.25, 10, 2, 2), (None, 0.0, 10, 0, 1), (None, 0.0, 1, 0, 1), (None, 0.4, 1, 0, 1),
        (None, 0.3, 3, 1, 1), (None, 0.99, 10, 9, 10), (7, 0.25, 10, 7, 7), (0, 0.25, 10, 0, 0),
        (7, 0.25, 5, 4, 5), (2, 0.99, 1, 0, 1),
    ],
)  # fmt: skip
def test_jobs_and_hand_written_configurations_have_one_schedule(
    given: int | None, share: float, steps: int, warmup: int, decay: int
) -> None:
    """Megatron asserts that the warm-up is shorter than the whole schedule."""
    written: dict[str, Any] = {"steps": steps, "warmup_fraction": share, "decay_fraction": share}
    written |= {"warmup_steps": given, "decay_steps": given}
    job = translated(arm=rod_arm(), keys={"train": optimised(**written)})["rod"]
    for rod in (job, written):
        scheduler = scheduler_of({"rod": rod})
        assert (scheduler.lr_warmup_iters, scheduler.lr_wsd_decay_iters) == (warmup, decay)


@pytest.mark.parametrize("steps", [1, 40, 50, 51])
def test_a_short_run_of_the_recipe_warms_up_for_less_than_it_lasts(steps: int) -> None:
    scheduler = scheduler_of(*map(OmegaConf.load, RECIPES), {"rod": {"steps": steps}})
    assert scheduler.lr_decay_iters == scheduler.lr_wsd_decay_iters == steps
    assert scheduler.lr_warmup_iters == min(50, steps - 1)


@pytest.mark.parametrize("name", DTYPES)
def test_precisions_have_one_name_each(name: str) -> None:
    assert precision_name(DTYPES[name]) == precision_name(name) == name
    assert precision_name("float16") == "fp16"  # of NeMo-RL alone


def test_references_of_another_model_or_precision_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = source("old", [write(tmp_path / "old.jsonl", texts(50, 1))])
    store, out = run(tmp_path / "blocks", [old]), tmp_path / "references"
    manifest = role_manifest(
        store, "replay", model="old", lengths=[store.block_size], precision="bf16"
    )
    writer = ReferenceWriter(out, manifest, store.hashes)
    writer.append(writer.missing, np.ones((len(writer.missing), 1), np.float32))
    writer.close()
    monkeypatch.setattr(reference_losses, "open_store", lambda config: store)
    rod = {"out": str(out), "role": "replay", "model_digest": None, "wanted": None}
    rod |= {"lengths": [], "scoring": {"micro_batch_size": 1}, "references": [str(out)]}
    policy = {"model_name": "old", "precision": "bfloat16"}
    reference_losses.write_reference({"rod": rod, "policy": policy})  # complete: nothing to do
    with pytest.raises(ValueError, match=r"references with .*model.*remove it to compute it again"):
        reference_losses.write_reference({"rod": rod, "policy": {**policy, "model_name": "new"}})
    assert inputs.open_references({"rod": rod, "policy": policy}, store).length == store.block_size
    with pytest.raises(ValueError, match=r"bf16.*fp32|fp32.*bf16"):
        inputs.open_references({"rod": rod, "policy": {**policy, "precision": "float32"}}, store)


def test_winners_are_dealt_by_whole_micro_batches() -> None:
    shares = deal(np.arange(100, 112), micro_batch_size=2, replicas=3)
    assert [share.tolist() for share in shares] == [
        [100, 101, 106, 107],
        [102, 103, 108, 109],
        [104, 105, 110, 111],
    ]


def test_metrics_of_an_update() -> None:
    trained = {"global_loss": [3.0], "grad_norm": [2.0], "all_mb_metrics": {"lr": [0.5, 0.5]}}
    metrics = {"train/loss": 3.0, "train/grad_norm": 2.0, "train/lr": 0.5}
    assert update_metrics(trained) == metrics
    assert update_metrics(trained | {"total_flops": 6.0}) == metrics | {"flops": 6.0}


def test_tflops_are_of_scoring_too() -> None:
    """An update of 8e12 operations on half of a pool of half blocks, in 2 s."""
    pool = Pool(0, np.arange(8), np.arange(8) > 3)
    loss = np.ones(8, dtype=np.float32)
    choice = choose(pool, Joint(), 4, loss, 0 * loss)
    assert model_tflops(choice, 8e12, 2.0, prefix=0.5) == pytest.approx(4 * (1 + 2 / 2 / 3))
    assert model_tflops(choose(pool, TakeAll(), 8), 8e12, 2.0, prefix=1.0) == 4.0
