"""Which lane of tests last passed at which commit, and what it covers has changed since.

    python tests/lanes.py                     a table (make lanes)
    python tests/lanes.py run --minutes 20    runs the lanes whose code has changed, cheapest first

A lane is a pytest marker with a make target. Whenever one passes whole on a clean checkout, a line
of `lanes.json` says so; that file is committed with the change. A lane covers the modules that its
test files reach: by imports, and by the programs that they start.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
RECORD = TESTS / "lanes.json"
# what every lane reads, whatever it imports
COMMON = (
    *("pyproject.toml", "Makefile", "requirements/"),
    *("tests/conftest.py", "tests/helpers/preloaded.py"),
)


@dataclasses.dataclass(frozen=True)
class Lane:
    """A marker of pytest and what running its tests needs.

    Attributes:
        marker: pytest's; the make target is `test-` and the marker with dashes.
        needs: programs, environment variables and files that must be there.
        everything: it starts `nemo-rod` and so covers the whole package.
    """

    marker: str
    needs: tuple[str, ...] = ()
    everything: bool = False

    @property
    def target(self) -> str:
        return "test" if self.marker == "fast" else f"test-{self.marker.replace('_', '-')}"

    def missing(self) -> list[str]:
        """What this machine lacks for it."""
        return [name for name in self.needs if not _is_there(name)]

    def files(self) -> set[str]:
        """Paths below the root that it covers."""
        if self.everything or self.marker == "fast":
            covered = {path for path in _tracked() if path.startswith(("nemo_rod/", "tests/"))}
            return covered - {str(RECORD.relative_to(ROOT))}  # it changes when a lane has passed
        marks = (f"mark.{self.marker}\n", f"mark.{self.marker}(", f"mark.{self.marker},")
        own = [f for f in TESTS.glob("*/test_*.py") if any(mark in f.read_text() for mark in marks)]
        return {str(path.relative_to(ROOT)) for path in _reached(own)}


LANES = (
    Lane("fast"),
    Lane("layouts"),
    Lane("architectures"),
    Lane("swap_in"),
    Lane("rehearsal", everything=True),
    Lane("fuzz", everything=True),
    Lane("slow", everything=True),
    Lane("slurm", ("slurmctld", "munged"), everything=True),
    Lane("kills", ("slurmctld", "munged"), everything=True),
    Lane("images", ("buildah", "mmdebstrap"), everything=True),
    Lane("megatron_lm", ("MEGATRON_LM",)),
    Lane("nemo2", (".venv-nemo2/.ready",)),  # make test-nemo2 builds it in some minutes
    Lane("nemo_rl", ("NEMO_RL",)),
)


def record(marker: str, outcome: dict[str, object]) -> None:
    """Notes that a lane has passed at this commit; nothing on changed files, or without git."""
    commit = _git("rev-parse", "--short=10", "HEAD", fails=True)
    changes = ("status", "--porcelain", "--untracked-files=no", "--", ".", ":!tests/lanes.json")
    if not commit or _git(*changes):
        return
    records = read()
    records[marker] = {"commit": commit, **outcome}
    RECORD.write_text(json.dumps(dict(sorted(records.items())), indent=2) + "\n")


def read() -> dict[str, dict[str, object]]:
    """What is known of every lane."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def changed(lane: Lane) -> list[str] | None:
    """Files it covers that changed since it last passed; None if that is not known."""
    commit = read().get(lane.marker, {}).get("commit")
    if commit is None or _git("cat-file", "-t", f"{commit}^{{commit}}", fails=True) != "commit":
        return None
    files = _git("diff", "--name-only", str(commit), "HEAD").splitlines()
    covered = lane.files()
    return [file for file in files if file in covered or file.startswith(COMMON)]


def show() -> None:
    print(f"{'lane':<14} {'last passed at':<15} {'passed':>6} {'minutes':>8}  since then")
    for lane in LANES:
        known, files = read().get(lane.marker, {}), changed(lane)
        since = "never passed" if files is None else f"{len(files)} of its files changed"
        if files is not None and not files:
            since = "nothing that it covers changed"
        if missing := lane.missing():
            since += f"; needs {', '.join(missing)}"
        print(
            f"{lane.marker:<14} {known.get('commit', '-'):<15} {known.get('passed', '-'):>6} "
            f"{float(str(known.get('seconds', 0))) / 60:>8.1f}  {since}"
        )


def run(minutes: float, without: set[str]) -> int:
    """Runs the lanes whose code changed, as many as there is time for."""
    end, status = time.monotonic() + 60 * minutes, 0
    stale = [lane for lane in LANES if lane.marker not in without and changed(lane) != []]
    for lane in sorted(stale, key=_seconds):
        left = end - time.monotonic()
        if missing := lane.missing():
            print(f"lane {lane.marker}: not run, needs {', '.join(missing)}", flush=True)
        elif _seconds(lane) > left:
            print(
                f"lane {lane.marker}: not run, takes {_seconds(lane) / 60:.0f} minutes and "
                f"{left / 60:.0f} are left: run make {lane.target}",
                flush=True,
            )
        else:
            print(f"lane {lane.marker}: make {lane.target}", flush=True)
            status |= subprocess.run(["make", "--no-print-directory", lane.target]).returncode
    return status


def _seconds(lane: Lane) -> float:
    """How long it took when it last passed; an hour if nobody knows."""
    return float(str(read().get(lane.marker, {}).get("seconds", 3600)))


def _is_there(name: str) -> bool:
    if name.startswith("."):
        return (ROOT / name).exists()
    if name.isupper():
        return bool(os.environ.get(name))
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is not None


def _reached(files: list[Path]) -> set[Path]:
    """The files themselves, and those of the project that they import or start."""
    found, waiting = set(), [TESTS / "conftest.py", *files]
    while waiting:
        file = waiting.pop()
        if file not in found and file.exists():
            found.add(file)
            waiting.extend(_mentioned(file))
    return found


@functools.cache
def _mentioned(file: Path) -> frozenset[Path]:
    """What a file imports, and what its strings name: modules, and scripts of the tests."""
    found: set[Path] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value] if " " not in node.value else []
        else:
            continue
        for name in names:
            found.update(_files_of(name))
    return frozenset(found)


def _files_of(name: str) -> Iterator[Path]:
    if name.endswith(".py"):
        yield from TESTS.glob(f"*/{name}")
        return
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        return
    for count in range(1, len(parts) + 1):
        for home in (ROOT, *_helpers()):
            path = home.joinpath(*parts[:count])
            yield path.with_suffix(".py")
            yield path / "__init__.py"
            yield path / "__main__.py"


@functools.cache
def _helpers() -> tuple[Path, ...]:
    """Folders whose modules tests import by name."""
    return tuple(sorted({path.parent for path in TESTS.glob("*/*.py")}))


@functools.cache
def _tracked() -> tuple[str, ...]:
    return tuple(_git("ls-files").splitlines())


def _git(*arguments: str, fails: bool = False) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode and not fails:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", nargs="?", choices=("show", "run"), default="show")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--without", nargs="*", default=[], help="lanes that ran just now")
    options = parser.parse_args()
    if options.action == "run":
        return run(options.minutes, {"fast", *options.without})
    show()
    return 0


if __name__ == "__main__":
    sys.exit(main())
