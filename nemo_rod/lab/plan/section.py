"""The section `plan` of the configuration."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rod.bounds import key


@dataclass
class Plan:
    """Assumptions of `nemo-rod plan`. All of them are estimates, so all of them are keys.

    A null value is taken from the profile of the processor in nemo_rod/lab/plan/speed.py.
    """

    adaptation_tokens: float | None = key(None, "> 0")  # corpus size; null: counted, or source caps
    replay_tokens: float | None = key(None, "> 0")  # corpus size; null: counted, or source caps
    peak_tflops: float | None = key(None, "> 0")  # dense peak TFLOP/s of a GPU in model.precision
    utilisation: float | None = key(None, "> 0")  # share of the peak that training reaches
    backward: float | None = key(None, "> 0")  # time of a backward pass, in forward passes
    startup_seconds: float | None = key(None, ">= 0")  # of a stage, before its first pass
    scoring: float | None = key(None, "> 0")  # time of a scoring pass, in training's forward ones
    launch_seconds: float | None = key(None, ">= 0")  # least of a micro-batch, by residual block
    checkpoint_rate: float = key(5e9, "> 0")  # bytes of a checkpoint written per second, all nodes
    offload_rate: float = key(20e9, "> 0")  # bytes of its state that a host updates, per GPU and s
    expert_imbalance: float = key(1.5, ">= 1")  # tokens of the busiest expert GPU over the mean
    memory_reserve: float = key(0.1, "in [0, 1)")  # share kept for CUDA, NCCL and fragmentation
    tokenise_rate: float = key(450_000.0, "> 0")  # tokens made of text per second and core
    read_rate: float = key(100e6, "> 0")  # bytes of text read per second
