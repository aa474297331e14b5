"""How a run on NeMo-RL's workers ends that was asked to stop; neither Ray nor NeMo-RL is needed."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from tiny import configured

from nemo_rod.hosts.nemo_rl import algorithm
from nemo_rod.hosts.nemo_rl.policy import WorkerFailed
from nemo_rod.jobs import TrainJob
from nemo_rod.signals import Stopped


class RayError(Exception):
    """Stands for Ray's."""


class Nothing:
    """Stands for what no step reaches: any call of any method is fine."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    """Stand-ins for the imports from Ray and NeMo-RL."""
    for name, content in {
        "ray": {"is_initialized": lambda: True},
        "ray.exceptions": {"RayError": RayError, "RayActorError": type("Died", (RayError,), {})},
        **{name: {} for name in ("nemo_rl", "nemo_rl.distributed", "nemo_rl.utils")},
        "nemo_rl.distributed.virtual_cluster": {"init_ray": None},
        "nemo_rl.utils.timer": {"TimeoutChecker": Nothing},
    }.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


def job_of(folder: Path, steps: int) -> Any:
    config = configured(train__steps=steps, validation__every=0)
    arm = SimpleNamespace(name="rod", scored_prefix=1.0)
    return SimpleNamespace(out=str(folder), config=config, arm=arm)


def ending(folder: Path, error: Exception, *, signalled: bool, saves: bool) -> BaseException:
    """The exception of a run whose workers end in its third step by an error."""

    def call(method: str, *, step: int) -> None:
        if signalled:
            signal.raise_signal(signal.SIGTERM)
        raise error

    saving = {"enabled": saves, "checkpoint_must_save_by": None, "save_period": 2}
    config, rest = {"checkpointing": saving}, cast(Any, Nothing())
    workers: Any = SimpleNamespace(policy=rest, call=call)
    with pytest.raises(BaseException) as caught:
        algorithm.train_steps(job_of(folder, 9), config, workers, rest, rest, rest, step=2)
    return caught.value


DIED = WorkerFailed("rank 1: its process died")


@pytest.mark.parametrize(
    ("error", "signalled", "saves", "why"),
    [
        (DIED, True, True, "rank 1: its process died"),
        (RayError("no connection"), True, True, "RayError: no connection"),
        # a failure stays one without a signal, without checkpoints, and if it is a mistake
        (DIED, False, True, ""),
        (DIED, True, False, ""),
        (KeyError("a mistake in this program"), True, True, ""),
    ],
)
def test_workers_that_end_after_the_signal_do_not_fail_a_run_that_saves(
    tmp_path, error, signalled, saves, why
):
    end = ending(tmp_path, error, signalled=signalled, saves=saves)
    if not why:
        assert end is error
        return
    assert isinstance(end, Stopped)
    assert str(end) == (
        f"rod was asked to stop, and ended in step 3 before it had saved ({why}): run it again to "
        "resume"
    )


@pytest.mark.parametrize(
    ("raised", "expected"),
    [(Stopped("rod stopped after step 3"), Stopped), (RayError("no connection"), WorkerFailed)],
)
def test_a_stop_is_told_from_a_failure(monkeypatch, raised, expected):
    def train(*_: object) -> None:
        raise raised

    monkeypatch.setattr(algorithm, "separate_conversions", lambda *_: None)
    monkeypatch.setattr(algorithm, "train", train)
    with pytest.raises(expected):
        job = TrainJob(
            name="rod", config=configured(), blocks="b", out="out", start="base",
            arm=cast(Any, None),
        )  # fmt: skip
        algorithm.run(job, {"policy": {"model_name": "base"}})


@pytest.mark.parametrize(
    ("flops", "counter", "speed"), [(8e12, None, 4.0), (None, 8e12, 4.0), (None, None, None)]
)
def test_a_step_shows_its_speed_where_nemo_rl_counts_operations(
    tmp_path, monkeypatch, flops, counter, speed
):
    """The operations of an update are counted by its workers, by its policy or not at all."""
    monkeypatch.setattr(algorithm, "model_tflops", lambda _, work, *__, **___: work / 1e12)
    rows: list[dict[str, Any]] = []
    step = SimpleNamespace(chosen=[1]), {} if flops is None else {"flops": flops}
    rest, journal = cast(Any, Nothing()), SimpleNamespace(append=lambda *row: rows.append(row[2]))
    workers: Any = SimpleNamespace(
        policy=rest, count=2, call=lambda *_, **__: step, update_flops=lambda blocks: counter
    )
    saving = {"enabled": False, "checkpoint_must_save_by": None, "save_period": 2}
    monkeypatch.setattr(algorithm, "known_metrics", lambda row: row)
    config = {"checkpointing": saving}
    job = job_of(tmp_path, 1)
    algorithm.train_steps(job, config, workers, cast(Any, journal), rest, rest, step=0)
    (row,) = rows
    assert row.pop("timing/train/total") > 0
    assert row == ({} if speed is None else {"throughput/model_tflops_per_gpu": speed})
