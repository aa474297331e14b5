"""What must hold on many GPUs, on one node or several (make test-gpus).

In each layout, RoD's steps are those of Megatron-Bridge's own trainer on the blocks that RoD chose,
and the first choice has the losses of one process. The same bodies run on two CPUs (make
test-layouts), but where attention shares a block: that is TransformerEngine's, in bf16.
"""

import functools
import importlib.util
import os
from collections.abc import Callable

import numpy as np
import pytest
import torch
from test_side_effects import DROPOUT, assert_update_is_ordinary
from tiny import ARCHITECTURE, BATCH, MOE_ARCHITECTURE, Setting

from nemo_rod.config import Parallel
from nemo_rod.selection import Curriculum

GPUS = int(os.environ.get("GPUS", torch.cuda.device_count()))
EXPERTS = 8
# of as many processes; pipeline stages are the farthest apart, on two nodes one on each
LAYOUTS: dict[str, Callable[[int], Parallel]] = {
    "replicas": lambda n: Parallel(data=n, distributed_optimizer=True),
    "experts": lambda n: Parallel(data=n, expert=min(n, EXPERTS)),
    "tensor": lambda n: Parallel(data=n // 2, tensor=2, sequence=True),
    "pipeline": lambda n: Parallel(data=n // 2, pipeline=2),
    "context": lambda n: Parallel(data=n // 2, context=2),
}
# how far a score may differ from that of one process, nats per token: rounding
MOVES = {"fp32": 1e-4, "bf16": 3e-2}
Made = Callable[[str], Setting]


@pytest.fixture(scope="module")
def made(torchrun, tmp_path_factory):
    """The tiny setting with or without experts, in a precision."""

    @functools.cache
    def setting(experts: bool, precision: str) -> Setting:
        model = {**MOE_ARCHITECTURE, "num_experts": EXPERTS} if experts else ARCHITECTURE
        return Setting(tmp_path_factory.mktemp("many"), torchrun, model, precision)

    return lambda layout: setting(layout == "experts", "bf16" if layout == "context" else "fp32")


def assert_holds(setting: Setting, layout: str, processes: int) -> None:
    parallel, moves = LAYOUTS[layout](processes), MOVES[setting.precision]
    batch, changes = {"batch_size": BATCH // 2 * parallel.data}, {"model": DROPOUT}
    assert_update_is_ordinary(setting, layout, parallel, changes, rounding=moves, **batch)
    alone = setting.rod_run(setting.root / f"{layout}_alone", Parallel(), steps=1, **batch)
    one, other = (
        next(iter(Curriculum.open(folder / "curriculum.rod", read_only=True)))
        for folder in (alone, setting.root / f"{layout}_rod")
    )
    assert one.block_ids.tolist() == other.block_ids.tolist()
    np.testing.assert_allclose(one.score, other.score, rtol=0, atol=moves)


@pytest.mark.layouts
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "context"])
def test_layout_of_two_processes(made, layout):
    assert_holds(made(layout), layout, 2)


@pytest.mark.gpus
@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs or more")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_all_gpus(made, layout):
    if layout == "context" and importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("TransformerEngine is not installed")
    assert_holds(made(layout), layout, GPUS)
