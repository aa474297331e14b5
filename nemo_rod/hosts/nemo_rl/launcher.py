"""`launcher=nemo_rl`: NeMo-RL's workers train and score, on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nemo_rod.config import Config
from nemo_rod.files import flat
from nemo_rod.hosts.nemo_rl.settings import SAVES_MEMORY, SECTIONS, resolve_job
from nemo_rod.jobs import Job, ReferenceJob, TrainJob
from nemo_rod.loggers import LOGGERS, logger_names
from nemo_rod.run.handover import Inputs
from nemo_rod.run.launch.local import Local
from nemo_rod.run.variants import ArmSettings
from nemo_rod.selection.policies import waits_for_update

# Keys of a recipe's section `nemo_rl` that do not affect the results of NeMo-RL's workers. The
# section overrides the job, so that all others of `policy` are inputs of their stages; as
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
)  # fmt: skip
_TRAINING_KEYS = (
    "policy.max_grad_norm", "policy.train_global_batch_size", "policy.train_micro_batch_size",
    "policy.optimizer", "policy.scheduler",
    "policy.megatron_cfg.optimizer", "policy.megatron_cfg.scheduler", "worker",
)  # fmt: skip


class NemoRL(Local):
    """Runs jobs that train or score on NeMo-RL; all other jobs run here."""

    environment = False
    bridge = False

    def check_arm(self, arm: ArmSettings, config: Config) -> None:
        """Refuses an arm that NeMo-RL's workers cannot train."""
        if unknown := sorted({*vars(config)["nemo_rl"]} - {*SECTIONS, "worker"}):
            raise ValueError(
                f"nemo_rl.{unknown[0]} is no key of NeMo-RL's that a run reads: expected worker, "
                f"or keys of {', '.join(SECTIONS)}."
            )
        scoring, parallel, policy = arm.scoring, config.parallel, arm.planned_arm.policy()
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
            (waits_for_update(policy), f"has selection.policy={arm.selection.policy}",
             "choose another policy"),
            (arm.scores and scoring.precision is not None,
             f"has scoring.precision={scoring.precision}", "leave scoring.precision unset"),
            (bool(arm.train.terms), f"has train.terms={arm.train.terms}", "take it out"),
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
        own = {name: keys[name] for name in ("policy", "worker") if keys.get(name)}
        return {
            f"nemo_rl.{key}": value
            for key, value in flat(own).items()
            if value != {} and not any(f"{key}.".startswith(f"{prefix}.") for prefix in left_out)
        }

    def exports(self, arm: str) -> bool:
        """Returns False: NeMo-RL's own converters export its checkpoints."""
        return False

    def run_tasks(
        self, run: Callable[[Path, int], int], folders: Sequence[Path], cores: int
    ) -> list[int]:
        """Runs work without a model as tasks of Ray, of which one that dies begins again.

        Args:
            run: the work, of a folder and its number.
            folders: one for each task, which all nodes see.
            cores: those of a task.

        Returns:
            What each task returns.

        Raises:
            Exception: as the first task that fails; all others are ended.
        """
        import ray

        if not ray.is_initialized():
            ray.init(address="auto", log_to_driver=True)
        options = {"num_cpus": cores, "max_retries": -1, "scheduling_strategy": "SPREAD"}

        def rod_task(folder: Path, number: int) -> int:  # Ray takes no other callable
            return run(folder, number)

        task = ray.remote(rod_task).options(**options)
        references = [task.remote(folder, number) for number, folder in enumerate(folders)]
        waiting = [*references]
        try:
            while waiting:
                done, waiting = ray.wait(waiting)
                ray.get(done)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        finally:
            for reference in waiting:
                ray.cancel(reference)
        return list(ray.get(references))

    def run_job(self, job: Job, file: Path, config: Config, log: Path) -> None:
        """Runs a job on the workers and waits, or here if it neither trains nor scores.

        Raises:
            ValueError: NeMo-RL does not support the job, or the configuration does not fit it.
            RuntimeError, Stopped: see `algorithm.run`.
        """
        if not isinstance(job, TrainJob | ReferenceJob):
            super().run_job(job, file, config, log)
            return
        from nemo_rod.hosts.nemo_rl import algorithm

        algorithm.run(job, resolve_job(job, vars(config)["nemo_rl"]))
