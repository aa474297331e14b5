"""The section `plan` of the configuration."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rod.bounds import key


@dataclass
class Plan:
    """Assumptions of `nemo-rod plan` that differ between machines, corpora and models.

    A null value is taken from the profile of the processor in nemo_rod/lab/plan/speed.py.
    """

    adaptation_tokens: float | None = key(None, "> 0")  # corpus size; null: counted, or source caps
    replay_tokens: float | None = key(None, "> 0")  # corpus size; null: counted, or source caps
    peak_tflops: float | None = key(None, "> 0")  # dense peak TFLOP/s of a GPU in model.precision
    utilisation: float | None = key(None, "> 0")  # share of the peak that training reaches
    startup_seconds: float | None = key(None, ">= 0")  # a stage takes before its first pass
    expert_imbalance: float = key(1.5, ">= 1")  # tokens of the busiest expert GPU over the mean
    memory_reserve: float = key(0.1, "in [0, 1)")  # share kept for CUDA, NCCL and fragmentation
