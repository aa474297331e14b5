"""A real Slurm on this machine, for the tests that need one."""

import pytest
from slurm_cluster import PROGRAMS, path_of, slurm_cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if missing := [program for program in PROGRAMS if path_of(program) is None]:
        pytest.fail(f"{', '.join(missing)} missing: apt-get install slurm-wlm munge")
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started
