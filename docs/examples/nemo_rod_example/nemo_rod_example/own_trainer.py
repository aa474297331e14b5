"""A host: a trainer whose jobs keep the ConfigContainer of Megatron-Bridge in an attribute."""

from typing import Any

from nemo_rod.hosts import swap_in


def install(job: Any, /, **options: Any) -> Any:
    return swap_in.install("megatron_bridge", job.container, **options)


def reference(job: Any, /, **options: Any) -> None:
    swap_in.reference("megatron_bridge", job.container, job.forward_step, **options)
