"""Progress lines: how far, how fast, how long yet."""

import pytest

from nemo_rod.progress import PREFIX, Progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds; tests move it."""
    now = [100.0]
    monkeypatch.setattr("nemo_rod.progress.time.monotonic", lambda: now[0])
    return now


def test_resumed_work_has_its_own_pace(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress("references/base", 10_000, unit="blocks")
    progress.start(4_000)
    clock[0] += 1
    progress.step(4_100)  # too soon for a line
    clock[0] += 9
    progress.step(5_000, "slow")
    clock[0] += 50
    progress.step(10_000)
    assert capsys.readouterr().err.splitlines() == [
        PREFIX + "references/base  5,000/10,000 blocks  slow  100 blocks/s  0:00:50 left",
        PREFIX + "references/base  10,000/10,000 blocks  100 blocks/s  0:00:00 left",
    ]


@pytest.mark.parametrize(
    ("total", "unit", "tokens", "done", "line"),
    [
        (0, "bytes", 0, 600, "600 bytes  20 bytes/s"), (0, "", 0, 600, "600"),
        (1200, "", 0, 600, "600/1,200  0:00:30 left"),
        (6, "models", 0, 2, "2/6 models  15 s a model  0:01:00 left"),
        (6, "", 4096, 2, "2/6  273 tokens/s  0:01:00 left"),
        (6, "blocks", 64, 6, "6/6 blocks  5 s a block  13 tokens/s  0:00:00 left"),
    ],
)  # fmt: skip
def test_a_line_has_what_is_known(
    total: int, unit: str, tokens: int, done: int, line: str,
    clock: list[float], capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    progress = Progress("web", total, unit=unit, tokens=tokens)
    clock[0] += 30
    progress.step(done)
    assert capsys.readouterr().err == f"{PREFIX}web  {line}\n"
