"""The runs of NeMo-RL's own loggers, and the speed that they show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nemo_rod.hosts.logger_runs import Prepared, keep_run, mark_restart, prepare_runs, recorded
from nemo_rod.hosts.nemo_rl.policy import Workers
from nemo_rod.loggers import LOGGERS, check_installed
from nemo_rod.selection import Choice
from nemo_rod.selection.arms import Arm
from nemo_rod.selection.competition import model_tflops


def use_loggers(section: dict[str, Any], out: Path) -> Prepared:
    """Makes NeMo-RL's loggers continue the runs of an earlier attempt; see `logger_runs.py`."""
    names = [name for name in LOGGERS if section.get(f"{name}_enabled")]
    check_installed(names)
    out.mkdir(parents=True, exist_ok=True)
    return prepare_runs(names, out)


def keep_runs(logger: Any, out: Path, *, step: int) -> None:
    """Notes MLflow's run, and marks where TensorBoard's curves are written again."""
    for backend in logger.loggers:
        if step and hasattr(backend, "writer"):
            mark_restart(backend.writer, step + 1)
        if step and type(backend).__name__ == "WandbLogger":
            for done, metrics in recorded(out, first=backend.run.step, last=step):
                backend.log_metrics(metrics, done)
        if type(backend).__name__ == "MLflowLogger":
            import mlflow

            keep_run(out, "mlflow", mlflow.active_run().info.run_id)


def end_runs(logger: Any, prepared: Prepared, *, failed: bool = False) -> None:
    """Ends the run in all loggers, so that the next arm of this process has runs of its own."""
    if logger.gpu_monitor:
        logger.gpu_monitor.stop()  # a thread of its own, which logs
    for backend in logger.loggers:
        if hasattr(backend, "writer"):
            backend.writer.close()
    # MLflow's backend ends whatever run is current when it is collected: now, not in the next arm
    logger.loggers.clear()
    prepared.end(failed=failed)


def model_speed(
    workers: Workers, choice: Choice, metrics: dict[str, Any], arm: Arm, num_gpus: int
) -> dict[str, float]:
    """Returns `throughput/model_tflops_per_gpu`, if NeMo-RL can count this model's operations.

    Removes `flops`, the count of NeMo-RL's workers, from the step's metrics.
    """
    flops = metrics.pop("flops", None) or workers.update_flops(len(choice.chosen))
    if not flops:
        return {}
    share, seconds = arm.scored_part, metrics["timing/train/total"]
    tflops = model_tflops(choice, flops, seconds, scored_share=share)
    return {"throughput/model_tflops_per_gpu": tflops / num_gpus}
