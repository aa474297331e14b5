"""Every pair of versions against what a user does with it, as a table: make test-matrix.

    python tests/matrix.py [--sets bridge-0.6 bridge-0.5 ...] [--only "main job" layouts ...]

Builds an environment for every set of requirements/ (some gigabytes each). A cell says how long it
took; what failed is printed in full behind the table.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SETS = ("bridge-0.6", "bridge-0.5", "bridge-0.4", "bridge-0.3")
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "1800")
COLUMNS: dict[str, tuple[str, ...]] = {
    "main job": (*("-m", "nemo_rod.cli", "run", "recipe=toy_synthetic", "arms=[no_replay,rod]"),
                 "run_dir={out}/run"),
    "layouts": (*PYTEST, "-m", "layouts", "tests/megatron/test_layouts.py", "-k",
                "same_choice_and_training"),
    "resume": (*PYTEST, "-m", "slow", "tests/megatron/test_resume.py", "-k", "single or dp2"),
    "export": (*PYTEST, "tests/megatron/test_layouts.py"),
    "swap-in": (*PYTEST, "-m", "swap_in", "tests/hosts/test_bridge.py"),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", nargs="*", default=SETS)
    parser.add_argument("--only", nargs="*", default=[*COLUMNS])
    options = parser.parse_args()
    failed: list[tuple[str, str, str]] = []
    choices: dict[str, str] = {}
    print("| versions | " + " | ".join(options.only) + " |")
    print("|---" * (len(options.only) + 1) + "|", flush=True)
    for name in options.sets:
        python = environment(name)
        cells = [name + ": " + versions(python)]
        for column in options.only:
            start = time.monotonic()
            with tempfile.TemporaryDirectory() as out:
                output = attempt(python, COLUMNS[column], out)
                if column == "main job" and output is None:
                    choices[name] = choice(python, out)
            if output is not None:
                failed.append((name, column, output))
            seconds = f"{time.monotonic() - start:.0f} s"
            cells.append(f"passed, {seconds}" if output is None else f"FAILED, {seconds}")
        print("| " + " | ".join(cells) + " |", flush=True)
    first, *others = choices or [""]
    different = [name for name in others if choices[name] != choices[first]]
    for name in others:
        same = "NOT the same" if name in different else "the same"
        print(f"chosen in the first 20 steps: {same} under {name} as under {first}")
    uninterrupted = 0
    if "resume" in options.only:
        for old, new in zip(options.sets[1:], options.sets, strict=False):
            for begun, after in ((old, new), (new, old)):
                end = across(begun, after)
                uninterrupted += end is None
                print(f"begun on {begun}, gone on with {after}: {end or 'NOT tried'}", flush=True)
    for name, column, output in failed:
        print(f"\n--- {name}, {column} ---\n{output}")
    return bool(failed or different or uninterrupted)


def environment(name: str) -> Path:
    """The interpreter of a set's environment, which is built if it is not there."""
    venv = f".venv-{name}"
    subprocess.run(
        ["make", "--no-print-directory", f"VENV={venv}", f"SET={name}", "venv"],
        cwd=ROOT,
        check=True,
        stdout=sys.stderr,
    )
    return ROOT / venv / "bin" / "python"


def across(first: str, second: str) -> str | None:
    """How a run ends that is stopped under one set and taken up again under another.

    None if it had ended before it could be stopped.
    """
    before, after = (environment(name) for name in (first, second))
    with tempfile.TemporaryDirectory() as out:
        command = ["-m", "nemo_rod.cli", "run", "recipe=toy_synthetic", "arms=[no_replay,rod]"]
        command += [f"run_dir={out}/run", "checkpoint.every=10"]
        options: dict[str, Any] = {
            "cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True,
        }  # fmt: skip
        begun = subprocess.Popen([before, *command], **options)
        arms = Path(out) / "run" / "arms"
        under_way = arms / "rod.partial" / "metrics.jsonl"
        while begun.poll() is None and len(lines(under_way)) < 25:
            time.sleep(0.2)
        begun.terminate()
        begun.communicate()
        steps = len(lines(under_way))
        if not steps:
            return None
        done = subprocess.run([after, *command], **options)
        if done.returncode:
            errors = [line for line in done.stdout.splitlines() if "error" in line.lower()]
            return "refused: " + (errors[-1] if errors else done.stdout[-300:])
        return f"trained {steps} steps, then to {len(lines(arms / 'rod' / 'metrics.jsonl'))}"


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def versions(python: Path) -> str:
    """Python's, Megatron-Bridge's, Megatron-core's and transformers'."""
    program = (
        "import importlib.metadata as m, platform; print(platform.python_version(), *(m.version(p) "
        "for p in ('megatron-bridge', 'megatron-core', 'transformers')), sep=', ')"
    )
    return subprocess.run([python, "-c", program], capture_output=True, text=True).stdout.strip()


def choice(python: Path, out: str) -> str:
    """The blocks that RoD chose in the first 20 steps of the main job."""
    program = (
        "import sys; from nemo_rod.selection import Curriculum; "
        "print([r.block_ids[r.chosen].tolist() for r in Curriculum.open(sys.argv[1], "
        "read_only=True)][:20])"
    )
    curriculum = Path(out) / "run" / "arms" / "rod" / "curriculum.rod"
    command = [python, "-c", program, str(curriculum)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def attempt(python: Path, arguments: tuple[str, ...], out: str) -> str | None:
    """None if the command passes, else the end of what it printed."""
    done = subprocess.run(
        [str(python), *(argument.format(out=out) for argument in arguments)], cwd=ROOT,
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return None if done.returncode == 0 else (done.stdout + done.stderr)[-4000:]


if __name__ == "__main__":
    sys.exit(main())
