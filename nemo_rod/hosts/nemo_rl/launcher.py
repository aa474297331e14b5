"""`launcher=nemo_rl`: NeMo-RL's workers train and score, on a Ray cluster."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from nemo_rod.config import DTYPES, Config, config_folder
from nemo_rod.files import read_json
from nemo_rod.hosts.nemo_rl.settings import SAVES_MEMORY
from nemo_rod.jobs import Job, ReferenceJob, TrainJob
from nemo_rod.layout import check_nodes
from nemo_rod.loggers import LOGGERS, logger_names, project
from nemo_rod.run.handover import Inputs, flatten
from nemo_rod.run.launch.local import Local
from nemo_rod.run.launch.render import escaped
from nemo_rod.run.variants import ArmSettings
from nemo_rod.selection.policies import waits_for_update

# Keys of a recipe's section `nemo_rl` that do not affect the results of NeMo-RL's workers. The
# section overrides the job, so that all others of `policy` and `rod` are inputs of their stages; as
# elsewhere, the layout and settings that only save memory may change between two attempts.
_MACHINE_KEYS = (
    "policy.env_vars", "policy.generation", "policy.logprob_batch_size",
    "policy.make_sequence_length_divisible_by", "policy.offload_optimizer_for_logprob",
    *(f"policy.megatron_cfg.{key}" for key in (
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
        "expert_tensor_parallel_size", "context_parallel_size", "sequence_parallel",
        "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
        "activation_checkpointing", "recompute_granularity", "recompute_method",
        "recompute_modules", "recompute_num_layers", "empty_unused_memory_level", "env_vars",
        "distributed_data_parallel_config", *(f"optimizer.{key}" for key in SAVES_MEMORY),
    )),
    "rod.hf", "rod.stall_seconds", "rod.trust_remote_code", "rod.validation",
    "rod.scoring.micro_batch_size",
)  # fmt: skip
_TRAINING_KEYS = (
    "policy.max_grad_norm", "policy.train_global_batch_size", "policy.train_micro_batch_size",
    "policy.optimizer", "policy.scheduler",
    "policy.megatron_cfg.optimizer", "policy.megatron_cfg.scheduler", "rod",
)  # fmt: skip


class NemoRL(Local):
    """Runs jobs that train or score on NeMo-RL; all other jobs run here."""

    environment = False
    bridge = False

    def check_arm(self, arm: ArmSettings, config: Config) -> None:
        """Refuses an arm that NeMo-RL's workers cannot train."""
        scoring, parallel, policy = arm.scoring, config.parallel, arm.planned.policy()
        if parallel.context > 1 or parallel.virtual_pipeline > 1:
            raise ValueError(
                f"parallel.context={parallel.context} and virtual_pipeline="
                f"{parallel.virtual_pipeline} do not run on NeMo-RL: set both to 1."
            )
        if lacking := {*logger_names(config.logger)} - {*LOGGERS}:
            raise ValueError(
                f"logger={config.logger} needs {', '.join(sorted(lacking))}, which NeMo-RL lacks: "
                "leave it out, or use launcher=local or slurm."
            )
        for unsupported, feature, cure in (
            (waits_for_update(policy) and scoring.every != 1, f"has scoring.every={scoring.every}",
             "set scoring.prefix instead"),
            (waits_for_update(policy), f"has selection.policy={arm.selection.policy}",
             "choose another policy"),
            (arm.scores and scoring.precision is not None,
             f"has scoring.precision={scoring.precision}", "leave scoring.precision unset"),
            (arm.variant.converge, "ends when it has converged", "give it a number of steps"),
        ):  # fmt: skip
            if unsupported:
                raise ValueError(
                    f"{arm.name} {feature}, which NeMo-RL's workers cannot run: use "
                    f"launcher=local or slurm, or {cure}."
                )

    def inputs(self, config: Config, *, scoring: bool) -> Inputs:
        """Returns the overrides that determine a model's losses, or else the result of training."""
        left_out = (*_MACHINE_KEYS, *(_TRAINING_KEYS if scoring else ()))
        keys: dict[str, Any] = vars(config)["nemo_rl"]
        sections = [flatten(name, keys[name]) for name in ("policy", "rod") if keys.get(name)]
        return {
            f"nemo_rl.{key}": value
            for section in sections
            for key, value in section.items()
            if value != {} and not any(f"{key}.".startswith(f"{prefix}.") for prefix in left_out)
        }

    def exports(self, arm: str) -> bool:
        """Returns False: NeMo-RL's own converters export its checkpoints."""
        return False

    def run_job(self, job: Job, file: Path, config: Config, log: Path) -> None:
        """Runs a job on the workers and waits, or here if it neither trains nor scores.

        Raises:
            ValueError: NeMo-RL does not support the job, or the configuration does not fit it.
            RuntimeError, Stopped: see `algorithm.run`.
        """
        if not isinstance(job, TrainJob | ReferenceJob):
            super().run_job(job, file, config, log)
            return
        from nemo_rod.hosts.nemo_rl import algorithm, settings

        values = nemo_rl_values(job, gpus_per_node=config.cluster.gpus_per_node)
        merged: Any = OmegaConf.to_container(OmegaConf.merge(values, vars(config)["nemo_rl"]))
        command = "train" if isinstance(job, TrainJob) else "reference"
        algorithm.run(command, settings.compose(merged))


def nemo_rl_values(job: TrainJob | ReferenceJob, *, gpus_per_node: int = 0) -> dict[str, Any]:
    """Returns a job as sections of a NeMo-RL recipe, without keys set by NeMo-RL or `rod.yaml`.

    They combine the view of the job in `job.yaml` and `train_job.yaml` with computed values. The
    values come from the job rather than from our recipe, as an arm may differ from the recipe in
    any key. The processes are distributed over nodes of `gpus_per_node`, unless it is 0.

    Raises:
        ValueError: the layout does not fit the nodes; `NemoRL.check_arm` refuses the rest.
    """
    config, parallel = job.config, job.parallel
    files = ["job.yaml", "train_job.yaml"] if isinstance(job, TrainJob) else ["job.yaml"]
    layers = [OmegaConf.load(config_folder() / "nemo_rl" / file) for file in files]
    view: Any = OmegaConf.merge({"job": escaped(asdict(job))}, *layers)
    sections = [name for name in view if name != "job"]
    values = {name: OmegaConf.to_container(view[name], resolve=True) for name in sections}

    per_node = min(parallel.world_size, gpus_per_node or parallel.world_size)
    check_nodes(parallel, per_node)
    nodes = {"gpus_per_node": per_node, "num_nodes": parallel.world_size // per_node}
    file = Path(job.start) / "config.json"
    described = read_json(file) if file.is_file() else {}
    activation = described.get("text_config", described).get("hidden_act")
    optimizer: dict[str, Any] = {"bf16": config.model.precision == "bf16"}
    if parallel.distributed_optimizer is not None:
        optimizer["use_distributed_optimizer"] = parallel.distributed_optimizer
    fuses = activation == "silu"  # others Megatron may refuse
    megatron = {"bias_activation_fusion": fuses, "optimizer": optimizer}
    policy: dict[str, Any] = {"precision": DTYPES[config.model.precision], "megatron_cfg": megatron}
    rod: dict[str, Any] = {}
    if config.model.special_tokens == "renamed":  # compared with the base's after the download
        rod["tokenizer"] = config.domain.tokenizer
    logger: dict[str, Any] = {}
    if isinstance(job, TrainJob):
        o = config.train
        rod["config_digest"] = job.config_digest or None
        optimizer["min_lr"] = o.lr * o.min_lr_ratio
        optimizer["optimizer_offload_fraction"] = float(o.optimizer_offload)  # of its state
        reduced = {"grad_reduce_in_fp32": o.grad_reduce == "fp32"}
        megatron["distributed_data_parallel_config"] = reduced
        megatron["activation_checkpointing"] = o.recompute != "none"
        if o.recompute != "none":
            megatron["recompute_granularity"] = o.recompute  # v0.6.0 always recomputes all
        logger = {
            **{f"{name}_enabled": name in job.loggers for name in LOGGERS},
            "wandb": {"project": project("WANDB_PROJECT"), "name": job.run_name},
            "mlflow": {
                "experiment_name": project("MLFLOW_EXPERIMENT_NAME"),
                "tracking_uri": None,  # MLFLOW_TRACKING_URI of the environment
                "run_name": job.run_name,
            },
        }
    else:
        rod |= {"role": job.role, "model_digest": job.model_digest, "steps": 1}
        rod["wanted"] = job.wanted or None
        rod["lengths"] = [n for n in job.lengths if n < config.domain.block_size]
        size = config.scoring.micro_batch_size
        policy |= {"train_global_batch_size": size * parallel.data, "train_micro_batch_size": size}
    computed = {"rod": rod, "policy": policy, "cluster": nodes, "logger": logger}
    merged: Any = OmegaConf.to_container(OmegaConf.merge(values, computed))
    return merged
