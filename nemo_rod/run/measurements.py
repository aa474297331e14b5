"""Registered measurements of trained models: the protocol, and their files."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from nemo_rod import parts
from nemo_rod.config import Config
from nemo_rod.run.model_jobs import ModelJobs


class Measurement(Protocol):
    """A registered measurement of trained models: a module, or an object.

    Attributes:
        FILE: Name of the file in an arm's folder that holds its result.
        PARTIAL: Names of files there that an interrupted attempt leaves.
    """

    FILE: str
    PARTIAL: tuple[str, ...]

    def wanted(self, config: Config) -> bool:
        """Returns whether the recipe asks for the measurement."""

    def check(self, config: Config) -> str | None:
        """Returns a line about the planned measurement, None for none.

        Raises:
            ValueError: if it cannot work.
        """

    def missing(self, jobs: ModelJobs, names: list[str]) -> list[str]:
        """Returns the arms without a result.

        Raises:
            ValueError: if a result has other inputs.
        """

    def measure(self, jobs: ModelJobs, names: list[str]) -> None:
        """Measures the arms without a result and writes `FILE` for each."""


def measurements() -> list[Measurement]:
    """Returns all registered measurements."""
    return [parts.load("measurements", name) for name in parts.names("measurements")]


def measured_files(folder: Path) -> tuple[Path, ...]:
    """Returns the results of a model, finished or not; they are void once it is made again."""
    return tuple(folder / file for m in measurements() for file in (m.FILE, *m.PARTIAL))
