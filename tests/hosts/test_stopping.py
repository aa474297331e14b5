"""How a run on NeMo-RL's workers ends that was asked to stop; neither Ray nor NeMo-RL is needed."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from nemo_rod.hosts.nemo_rl import algorithm, cluster
from nemo_rod.hosts.nemo_rl.policy import WorkerFailed
from nemo_rod.signals import Stopped


class RayError(Exception):
    """Stands for Ray's."""


class Nothing:
    """Stands for NeMo-RL's timeout and our journal: any call of any method is fine."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the imports from Ray and NeMo-RL, and for the journal."""
    parts: dict[str, dict[str, Any]] = {
        "ray": {},
        "ray.exceptions": {"RayError": RayError, "RayActorError": type("Died", (RayError,), {})},
        "nemo_rl": {},
        "nemo_rl.utils": {},
        "nemo_rl.utils.timer": {"TimeoutChecker": Nothing},
    }
    for name, content in parts.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(algorithm, "Journal", Nothing)


def ending(folder: Path, error: Exception, *, signalled: bool, saves: bool = True) -> BaseException:
    """The exception of a run whose workers end in its third step by an error."""

    def step(number: int) -> None:
        if signalled:
            signal.raise_signal(signal.SIGTERM)
        raise error

    rod = {"arm": "rod", "out": str(folder), "steps": 9, "validation": {"every": 0}}
    saving = {"enabled": saves, "checkpoint_must_save_by": None, "save_period": 2}
    run: Any = SimpleNamespace(
        config={"rod": rod, "checkpointing": saving}, policy=Nothing(),
        workers=SimpleNamespace(step=step), header=None, step=2,
    )  # fmt: skip
    with pytest.raises(BaseException) as caught:
        algorithm.rod_train(run)
    return caught.value


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (WorkerFailed("rank 1: its process died"), "rank 1: its process died"),
        (RayError("no connection"), "RayError: no connection"),
    ],
    ids=["worker", "ray"],
)
def test_workers_that_end_after_the_signal_do_not_fail_the_run(
    tmp_path: Path, error: Exception, why: str
) -> None:
    stop = ending(tmp_path, error, signalled=True)
    assert isinstance(stop, Stopped)
    assert str(stop) == (
        f"rod was asked to stop, and ended in step 3 before it had saved ({why}): run it again to "
        "resume"
    )


def test_a_failure_stays_one_without_a_signal_or_checkpoints(tmp_path: Path) -> None:
    died = WorkerFailed("rank 1: its process died")
    assert ending(tmp_path, died, signalled=False) is died
    assert ending(tmp_path, died, signalled=True, saves=False) is died
    wrong = KeyError("a mistake in this program")
    assert ending(tmp_path, wrong, signalled=True) is wrong


@pytest.mark.parametrize(
    ("raised", "expected"),
    [(Stopped("rod stopped after step 3"), Stopped), (RayError("no connection"), WorkerFailed)],
    ids=["stop", "failure"],
)
def test_a_stop_is_told_from_a_failure(
    monkeypatch: pytest.MonkeyPatch, raised: BaseException, expected: type[BaseException]
) -> None:
    def train(_: object) -> None:
        raise raised

    monkeypatch.setattr(cluster, "separate_conversions", lambda *_: None)
    monkeypatch.setattr(cluster, "start_ray", lambda: None)
    monkeypatch.setattr(cluster, "train", train)
    with pytest.raises(expected):
        cluster.run("train", {"policy": {"model_name": "base"}, "rod": {"out": "out"}})
