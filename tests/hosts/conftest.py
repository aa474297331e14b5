"""Fixtures of the tests of NeMo-RL: one Ray cluster, and the Megatron that a checkout pins."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from nemo_rl_runs import CHECKOUT, ray_cluster


@pytest.fixture(scope="session")
def environment():
    """A Ray cluster of one node and four logical CPUs; what a process needs to join it."""
    with ray_cluster() as variables:
        yield variables


@pytest.fixture(scope="session")
def pinned(environment):
    """The environment in which the checkout's own worker can be imported.

    A recursive clone has Megatron-Bridge and Megatron-LM.
    """
    if sys.version_info < (3, 12):
        pytest.skip("the pinned Megatron needs Python 3.12: make test-nemo-rl-worker")
    third = Path(CHECKOUT) / "3rdparty"
    bridge = third / "Megatron-Bridge-workspace" / "Megatron-Bridge"
    own = third / "Megatron-LM-workspace" / "Megatron-LM"
    core = own if (own / "megatron").is_dir() else bridge / "3rdparty" / "Megatron-LM"
    if not (core / "megatron").is_dir() or not (bridge / "src").is_dir():
        pytest.skip("the checkout has no submodules: git submodule update --init --recursive")
    path = os.pathsep.join([str(bridge / "src"), str(core), environment["PYTHONPATH"]])
    variables = {**environment, "PYTHONPATH": path}
    probe = [sys.executable, "-c", "import nemo_rod.hosts.nemo_rl.megatron_worker"]
    done = subprocess.run(probe, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return variables
