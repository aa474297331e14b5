"""What the tests of the trainer share."""

import gc

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # importing Megatron warns of what a machine without CUDA lacks
    config.addinivalue_line("filterwarnings", "ignore:::(megatron|torch.jit)")


@pytest.fixture(scope="session")
def megatron():
    """Makes Megatron importable without CUDA; the import takes seconds."""
    import nemo_rod.megatron  # noqa: F401


@pytest.fixture
def alone():
    """This process as the only rank of a job."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    gc.collect()  # of a model that is still held, each group has a thread that wakes every 10 ms
