import json
import subprocess
import sys
from pathlib import Path

MODULE = "nemo_rod.lab.report.across_runs"
FAR = 0.5  # a gap beyond the ends of the chord


def run_with(folder: Path, **gaps: float | None) -> str:
    """Writes results of arms that differ in their gap alone."""
    arms = {name: {"adapt_loss": 1.5, "val_forgetting": 0.25, "replay_share": 0.2} for name in gaps}
    compared = {name: {"gap": gap, "extrapolated": gap == FAR} for name, gap in gaps.items()}
    (folder / "report").mkdir(parents=True)
    (folder / "report" / "results.json").write_text(
        json.dumps({"arms": arms, "comparisons": compared})
    )
    return str(folder)


def printed(*words: str) -> list[list[str]]:
    done = subprocess.run([sys.executable, "-m", MODULE, *words], capture_output=True, text=True)
    return [line.split() for line in (done.stdout or done.stderr.splitlines()[-1]).splitlines()]


def test_arms_of_several_runs(tmp_path: Path) -> None:
    one = run_with(tmp_path / "one", fixed_20=None, rod=-0.03, only_here=0.1, far=FAR)
    two = run_with(tmp_path / "two", rod=-0.01, fixed_20=None)
    head, fixed, rod = printed(one, two)
    assert head[:3] == ["arm", "adaptation", "loss"]
    assert fixed == ["fixed_20", "1.500", "0.250", "0.200"]
    assert rod == ["rod", "1.500", "0.250", "0.200", "-0.020", "(-0.030", "to", "-0.010)"]
    assert printed(one, two, "--each", "gap") == [
        ["arm", "one", "two"], ["fixed_20"], ["rod", "-0.030", "-0.010"], ["only_here", "0.100"],
        ["far"],
    ]  # fmt: skip


def test_a_run_without_a_report(tmp_path: Path) -> None:
    (line,) = printed(str(tmp_path / "none"))
    expected = "none/report/results.json is missing: run `nemo-rod report` of that run first."
    assert " ".join(line).endswith(expected)
