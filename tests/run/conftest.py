"""A real Slurm on this machine, for the tests that need one."""

from collections.abc import Iterator

import pytest
from slurm_cluster import Cluster, missing_programs, slurm_cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if missing := missing_programs():
        pytest.fail(f"{', '.join(missing)} missing: apt-get install slurm-wlm munge")
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started
