"""The lanes of tests: what each runs and needs, and at which commit it last passed.

    python tests/lanes.py                         a table (make lanes)
    python tests/lanes.py run --minutes 20        runs lanes whose code has changed, cheapest first
    python tests/lanes.py check test-slurm        fails where something is missing that it needs
    python tests/lanes.py arguments test-slurm    what its make target hands to pytest

A lane is a make target with tests of one pytest marker. Whenever one passes whole on a clean
checkout, a line of `lanes.json` says so; that file is committed with the change. A lane covers all
code but the tests of other lanes.
"""

import argparse
import dataclasses
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
RECORD = TESTS / "lanes.json"
# what every lane reads, whatever it imports
COMMON = (
    *("pyproject.toml", "Makefile", "requirements/", "tests/conftest.py"),
    "nemo_rod/upstream/functions.txt",
)
ROOTS = ("nemo_rod/", "tests/", "docs/examples/")


@dataclasses.dataclass(frozen=True)
class Lane:
    """Tests that are run together, and what running them needs.

    Attributes:
        name: the make target is `test-` and the name with dashes.
        about: what it runs, in one line.
        seconds: limit for a test and what it is the first to need.
        needs: programs, environment variables and files that must be there; `VARIABLE/path` is a
            file of the checkout that the variable names.
        options: further ones of pytest.
        only: the test files; all by default.
        marker: pytest's; the name by default. The fast tests are those with the marker of no lane.
    """

    name: str
    about: str
    seconds: int = 300
    needs: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    marker: str = ""

    @property
    def target(self) -> str:
        return "test" if self.name == "fast" else f"test-{self.name.replace('_', '-')}"

    @property
    def expression(self) -> str:
        """What pytest selects the tests by."""
        marker = self.marker or self.name
        return f"not ({' or '.join(MARKERS)})" if marker == "fast" else marker

    def arguments(self) -> list[str]:
        """Pytest's, without those that it takes by itself (`conftest.py`)."""
        fast = self.expression.startswith("not")
        selected = () if fast else ("-m", self.expression, "-o", f"timeout={self.seconds}")
        return [*selected, *self.options, *self.only]

    def missing(self) -> list[str]:
        """What this machine lacks for it."""
        return [
            re.sub("^([A-Z_]+)/(.*)", r"\1=<a checkout with \2>", name)
            for name in self.needs
            if not _is_there(name)
        ]

    def files(self) -> set[str]:
        """Paths below the root that it covers."""
        marks = [f"mark.{self.marker or self.name}{end}" for end in "\n(,"]

        def is_of_another(path: str) -> bool:
            if self.name == "fast" or not re.fullmatch("tests/[^/]*/test_[^/]*[.]py", path):
                return False
            text = (ROOT / path).read_text()
            return path not in self.only if self.only else not any(m in text for m in marks)

        covered = {path for path in _tracked() if path.startswith(ROOTS)}
        covered.discard(str(RECORD.relative_to(ROOT)))  # it changes when a lane has passed
        return {path for path in covered if not is_of_another(path)}


# Three processes for two cores, as tests wait; those that share what is expensive stay on one.
PARALLEL = ("-n", "3", "--no-loadscope-reorder")
SLURM = ("slurmctld", "munged")
MAIN = ("MEGATRON_LM/megatron/core", "MEGATRON_BRIDGE/src/megatron/bridge")
LANES = (
    Lane("fast", "whatever is quick", options=PARALLEL),
    Lane(
        "second",
        "fast tests of NVIDIA's functions, refusals and jobs on Megatron-Bridge 0.3",
        options=PARALLEL,
        only=(
            *("tests/project/test_upstream.py", "tests/megatron/test_forward_only.py"),
            *("tests/megatron/test_identity.py", "tests/megatron/test_layouts.py"),
            *("tests/lab/test_shapes.py", "tests/lab/test_merging_architectures.py"),
            *("tests/hosts/test_units.py", "tests/hosts/test_refusals.py"),
            "tests/commands/test_cli.py",
        ),
        marker="fast",
    ),
    Lane("layouts", "trains and scores in many parallel layouts on gloo", 900),
    Lane(
        "main",
        "NVIDIA's functions, forward passes and jobs on main of Megatron-LM and Megatron-Bridge",
        needs=MAIN,
        only=(
            *("tests/project/test_upstream.py", "tests/megatron/test_forward_only.py"),
            "tests/megatron/test_identity.py",
        ),
        marker="fast",
    ),
    Lane("main_layouts", "layouts on main of Megatron-LM and Megatron-Bridge", 900, MAIN,
         only=("tests/megatron/test_layouts.py", "tests/run/test_ends.py"), marker="layouts"),
    Lane("architectures", "every job of Qwen3.5 and Nemotron-H in many layouts", 3600),
    Lane("swap_in", "the selector in a job of Megatron-Bridge, in several layouts", 1800),
    Lane("rehearsal", "every setting of the paper in small, with all arms", 3600),
    Lane("slow", "whatever takes minutes", 1800),
    Lane("fuzz", "damaged files and random words", 1200, options=("-s",)),
    Lane("slurm", "recipes on a real Slurm of two nodes", 7200, SLURM, ("-s",)),
    Lane("kills", "kills every stage under a real Slurm", 14400, SLURM, ("-s",)),
    Lane("images", "builds both container images, and a recipe in each", 7200,
         ("buildah", "mmdebstrap"), options=("-s",)),
    Lane("megatron_lm",
         "the selector in pretrain_gpt.py of Megatron-LM: core_v0.16.1, core_v0.19.0 or main", 3600,
         ("MEGATRON_LM/pretrain_gpt.py",)),
    Lane("examples", "our examples in LLaMA-Factory's and NeMo Automodel's own training", 1800,
         ("LLAMA_FACTORY/src/llamafactory/train/megatron_bridge",)),
    Lane("nemo_rl", "RoD on NeMo-RL, v0.6.0 or later", 3000, ("NEMO_RL/nemo_rl",)),
    Lane(
        "nemo_rl_worker",
        "NeMo-RL's own Megatron worker, of a recursive clone",
        3000,
        ("NEMO_RL/3rdparty/Megatron-Bridge-workspace/Megatron-Bridge/src",),
        only=tuple(
            f"tests/hosts/test_{name}.py" for name in ("own_worker", "ray_node")
        ),
        marker="nemo_rl",
    ),
    Lane(
        "gpu",
        "what must hold on NVIDIA GPUs, with torch of PYTHON",
        900,
        ("nvidia-smi", "PYTHON"),
        # all files of it: others need packages, such as Hypothesis, that GPU images lack
        only=("tests/gpu/test_gpu.py", "tests/megatron/test_side_effects.py"),
    ),
    Lane("gpus",
         "every kind of layout on all GPUs of a node, or on GPUS= of several with PER_NODE= each",
         900, ("nvidia-smi", "PYTHON"), only=("tests/megatron/test_gpus.py",)),
)  # fmt: skip
MARKERS = [lane.name for lane in LANES if not lane.marker and lane.name != "fast"]


def of_run(expression: str, arguments: list[str]) -> Lane | None:
    """The lane whose tests pytest runs, if it runs those of a whole lane."""
    chosen = [lane for lane in LANES if lane.expression == expression]
    return next((lane for lane in chosen if arguments == [*(lane.only or ("tests",))]), None)


def record(lane: Lane, outcome: dict[str, object]) -> None:
    """Notes that a lane has passed at this commit; nothing on changed files, or without git."""
    commit = _git("rev-parse", "--short=10", "HEAD", fails=True)
    changes = ("status", "--porcelain", "--untracked-files=no", "--", ".", ":!tests/lanes.json")
    if not commit or _git(*changes):
        return
    records = read()
    records[lane.name] = {"commit": commit, **outcome}
    RECORD.write_text(json.dumps(dict(sorted(records.items())), indent=2) + "\n")


def read() -> dict[str, dict[str, object]]:
    """What is known of every lane."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def changed(lane: Lane) -> list[str] | None:
    """Files it covers that changed since it last passed; None if that is not known."""
    commit = read().get(lane.name, {}).get("commit")
    if commit is None or _git("cat-file", "-t", f"{commit}^{{commit}}", fails=True) != "commit":
        return None
    files = _git("diff", "--name-only", str(commit), "HEAD").splitlines()
    covered = lane.files()
    return [file for file in files if file in covered or file.startswith(COMMON)]


def show() -> None:
    print(f"{'make':<20} {'last passed':<12} {'passed':>6} {'minutes':>7}  about")
    for lane in LANES:
        known, files = read().get(lane.name, {}), changed(lane)
        notes = [f"{len(files)} of its files changed since"] if files else []
        if missing := lane.missing():
            notes.append(f"needs {', '.join(missing)}")
        print(
            f"{lane.target:<20} {known.get('commit', 'never'):<12} {known.get('passed', '-'):>6} "
            f"{float(str(known.get('seconds', 0))) / 60:>7.1f}  {'; '.join([lane.about, *notes])}"
        )
    print(
        f"{'test-matrix':<72} every pair of versions: job, layouts, resume, export, swap-in; hours"
    )


def run(minutes: float, without: set[str]) -> int:
    """Runs the lanes whose code changed, as many as there is time for."""
    end, status = time.monotonic() + 60 * minutes, 0
    stale = [lane for lane in LANES if lane.name not in without and changed(lane) != []]
    for lane in sorted(stale, key=_seconds):
        left = end - time.monotonic()
        if missing := lane.missing():
            print(f"lane {lane.name}: not run, needs {', '.join(missing)}", flush=True)
        elif _seconds(lane) > left:
            print(
                f"lane {lane.name}: not run, takes {_seconds(lane) / 60:.0f} minutes and "
                f"{left / 60:.0f} are left: run make {lane.target}",
                flush=True,
            )
        else:
            print(f"lane {lane.name}: make {lane.target}", flush=True)
            status |= subprocess.run(["make", "--no-print-directory", lane.target]).returncode
    return status


def _seconds(lane: Lane) -> float:
    """How long it took when it last passed; an hour if nobody knows."""
    return float(str(read().get(lane.name, {}).get("seconds", 3600)))


def _is_there(name: str) -> bool:
    if name.startswith("."):
        return (ROOT / name).exists()
    variable, _, path = name.partition("/")
    if variable.isupper():
        value = os.environ.get(variable)
        return bool(value) and (not path or Path(value, path).exists())
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is not None


@functools.cache
def _tracked() -> frozenset[str]:
    return frozenset(_git("ls-files").splitlines())


def _git(*arguments: str, fails: bool = False) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode and not fails:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    actions = ("show", "run", "check", "arguments")
    parser.add_argument("action", nargs="?", choices=actions, default="show")
    parser.add_argument("target", nargs="?", help="of make, to check or to give arguments for")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--without", nargs="*", default=[], help="lanes that ran just now")
    options = parser.parse_args()
    if options.action == "run":
        return run(options.minutes, {"fast", *options.without})
    if options.action == "show":
        show()
        return 0
    lane = next((lane for lane in LANES if lane.target == options.target), None)
    if lane is None:
        raise SystemExit(f"no target {options.target}: make lanes lists them")
    if options.action == "arguments":
        print(*lane.arguments())
    elif missing := lane.missing():
        raise SystemExit(f"make {lane.target} needs {', '.join(missing)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
