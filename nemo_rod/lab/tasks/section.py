"""The section `tasks` of the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nemo_rod.bounds import key, one_of


@dataclass
class Tasks:
    """Benchmarks that lm-eval runs on every arm, by capability (paper, appendix B.5).

    `tasks=paper` is the paper's list, `tasks=held_out` needs no network, `tasks=none` runs nothing.
    """

    capabilities: dict[str, list[str]] = field(default_factory=dict)  # capability -> lm-eval tasks
    include: str | None = None  # folder of all task definitions, in place of lm-eval's own
    held_out: int = key(0, ">= 0")  # questions from each replay source's held-out blocks; 0: none
    backend: str = one_of("hf", "vllm")  # model backend of lm-eval
    arguments: dict[str, Any] = field(default_factory=dict)  # options, such as tensor_parallel_size
    batch_size: int = key(16, ">= 1")  # requests per forward pass
    few_shot: int | None = key(None, ">= 0")  # examples before a question; null: the task's default
    limit: int | None = key(None, ">= 1")  # questions per task at most, for trials; null: all
    seed: int = key(1234, "in [0, 2**32)")  # determines the choice of examples

    def check(self) -> None:
        """Refuses two kinds of tasks in one run, and capabilities without any (ValueError)."""
        if empty := [name for name, tasks in self.capabilities.items() if not tasks]:
            raise ValueError(
                f"tasks.capabilities.{empty[0]} lists no task, expected one or more of lm-eval's: "
                "name them, or leave the capability out."
            )
        if self.capabilities and self.held_out:
            raise ValueError(
                "tasks.capabilities and tasks.held_out are both set: run them in two runs, because "
                "the forgetting of tasks is the mean over all capabilities."
            )
