"""All differences between NeMo-RL v0.6.0, v0.7.0 and main (August 2026), and nothing else.

Code here checks for features rather than version numbers: main still calls itself 0.6.0.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SUPPORTED = "v0.6.0, v0.7.0 and main of August 2026"
# key that enables the fused output layer and loss: until v0.7.0, and on main
FUSED_LOSS = ("use_linear_ce_fusion_loss", "use_fused_linear_logprobs")


def check_supported() -> None:
    """Refuses, by a ValueError, a NeMo-RL without the features that this package builds on."""
    try:
        from nemo_rl import __version__
        from nemo_rl.models.policy.lm_policy import Policy
    except ModuleNotFoundError as error:
        raise ValueError(
            f"NeMo-RL cannot be imported ({error}): run this in NeMo-RL's image or environment, "
            f"or put a checkout on PYTHONPATH; supported are {SUPPORTED}."
        ) from None
    if "worker_extension_cls_fqn" not in inspect.signature(Policy.__init__).parameters:
        raise ValueError(f"NeMo-RL {__version__} has no worker extensions: use one of {SUPPORTED}.")


def example_config() -> Path:
    """Returns the path of NeMo-RL's own SFT configuration, which sets every key that it reads."""
    import nemo_rl

    path = Path(nemo_rl.__file__).parent.parent / "examples" / "configs" / "sft.yaml"
    if not path.exists():
        raise ValueError(
            f"{path} is missing: NeMo-RL's examples hold the defaults of its own keys, so use a "
            "whole checkout, as its image does."
        )
    return path


def run_config(values: dict[str, Any]) -> Any:
    """Returns the configuration in the form that the checkpoint manager saves.

    v0.6.0 takes a dict; later versions take a pydantic model and validate their sections with it.
    """
    from nemo_rl.utils.checkpoint import CheckpointingConfig, CheckpointManager

    parameter = inspect.signature(CheckpointManager.init_tmp_checkpoint).parameters["run_config"]
    if "BaseModel" not in str(parameter.annotation):
        return values
    from nemo_rl.distributed.virtual_cluster import ClusterConfig
    from nemo_rl.models.policy import PolicyConfig
    from nemo_rl.utils.logger import LoggerConfig
    from pydantic import BaseModel, ConfigDict, ValidationError, create_model

    class Section(BaseModel):
        model_config = ConfigDict(extra="allow")

    fields: dict[str, Any] = {
        "policy": (PolicyConfig, ...),
        "logger": (LoggerConfig, ...),
        "cluster": (ClusterConfig, ...),
        "checkpointing": (CheckpointingConfig, ...),
    }
    try:
        return create_model("MasterConfig", __base__=Section, **fields)(**values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ValueError(
            f"NeMo-RL does not accept {key}={first['input']!r}: {first['msg']}."
        ) from None


def make_cluster(cluster_cfg: Mapping[str, Any], *, use_gpus: bool) -> Any:
    """Creates one bundle per GPU (without GPUs, per process) on the configured number of nodes."""
    from nemo_rl.distributed import virtual_cluster

    options: dict[str, Any] = {}
    known = inspect.signature(virtual_cluster.RayVirtualCluster.__init__).parameters
    if "port_range_low" in known:
        for end in ("low", "high"):
            options[f"port_range_{end}"] = cluster_cfg.get(f"master_port_range_{end}")
    size, nodes = cluster_cfg.get("segment_size"), cluster_cfg["num_nodes"]
    if size is not None and "segment_size" in known:
        constraints, _, _ = virtual_cluster.prepare_segment_topology(size, nodes)
        options |= {"segment_size": size, "node_resource_constraints": constraints}
    return virtual_cluster.RayVirtualCluster(
        name="rod_cluster",
        bundle_ct_per_node_list=[cluster_cfg["gpus_per_node"]] * nodes,
        use_gpus=use_gpus,
        num_gpus_per_node=cluster_cfg["gpus_per_node"],
        max_colocated_worker_groups=1,
        **options,
    )


def complete_vision_configs() -> None:
    """Gives Qwen3.5's vision configurations the list that v0.6.0's Megatron-Bridge reads.

    It copies `deepstack_visual_indexes`, which Qwen3-VL has and Qwen3.5 has not; later versions
    take a missing list for an empty one.
    """
    for family in ("qwen3_5", "qwen3_5_moe"):
        try:
            module = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
        except ModuleNotFoundError:  # an older transformers has no such models to train
            continue
        for name, config in vars(module).items():
            if name.endswith("VisionConfig") and not hasattr(config, "deepstack_visual_indexes"):
                config.deepstack_visual_indexes = []


def finish_checkpoint(checkpointer: Any, policy: Any, path: Any) -> None:
    """Renames a written checkpoint to its final name, once all writers are done."""
    if hasattr(policy, "finalize_async_save"):
        policy.finalize_async_save()
    checkpointer.finalize_checkpoint(path)
