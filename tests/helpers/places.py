"""Where the tests' files are."""

from pathlib import Path

TESTS = Path(__file__).parent.parent
ROOT = TESTS.parent
GOLDEN = TESTS / "golden"
WORKERS = TESTS / "workers"  # programs that tests start, most of them under torchrun
