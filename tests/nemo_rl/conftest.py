"""What the tests of NeMo-RL share: one Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from nemo_rl_runs import ray_cluster


@pytest.fixture(scope="session")
def environment() -> Iterator[dict[str, str]]:
    """A Ray cluster of one node and four logical CPUs; what a process needs to join it."""
    with ray_cluster() as variables:
        yield variables
