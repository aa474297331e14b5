"""Measurements of trained models, registered by name, and the stage that makes them."""

from __future__ import annotations

from typing import Protocol

from nemo_rod import parts
from nemo_rod.config import Config
from nemo_rod.run.handover import Stage
from nemo_rod.run.held_out_losses import partial_folder
from nemo_rod.run.model_jobs import ModelJobs
from nemo_rod.run.stages import Stages, measured_files


class Measurement(Protocol):
    """A registered measurement of trained models: a module, or an object.

    Attributes:
        FILE: name of the file in an arm's folder that holds its result.
        PARTIAL: names of files there that an interrupted attempt leaves.
    """

    FILE: str
    PARTIAL: tuple[str, ...]

    def wanted(self, config: Config) -> bool:
        """Returns whether the recipe asks for the measurement."""

    def check(self, config: Config) -> str | None:
        """Returns a line about the planned measurement, None for none.

        Raises:
            ValueError: the measurement cannot work.
        """

    def missing(self, jobs: ModelJobs, names: list[str]) -> list[str]:
        """Returns the arms without a result.

        Raises:
            ValueError: a result has other inputs.
        """

    def measure(self, jobs: ModelJobs, names: list[str]) -> None:
        """Measures the arms without a result and writes `FILE` for each."""


def evaluate_stages(stages: Stages) -> list[Stage]:
    """Returns the stage that measures every arm without a result."""
    jobs, config = stages.jobs, stages.config
    chosen = [config.arm] if config.arm else config.arms
    names = ["base", *(name for name in chosen if name != "base")]
    known: list[Measurement] = parts.load_all("measurements")
    requested = [measurement for measurement in known if measurement.wanted(config)]
    folders = [jobs.results.arm(name) for name in names]

    def run() -> None:
        for measurement in requested:  # finds a wrong name before hours of work
            if measurement.missing(jobs, names):
                measurement.check(config)
        for measurement in requested:
            measurement.measure(jobs, names)

    def preview() -> str:
        return "\n    ".join(filter(None, (m.check(config) for m in requested)))

    stage = Stage(
        name="evaluate",
        command="evaluate" + (f" arm={config.arm}" if config.arm else ""),
        title=f"evaluate {config.arm or 'every arm'}",
        folder=jobs.results.path / "arms",
        proof=tuple(folder / m.FILE for folder in folders for m in requested),
        is_done=lambda: not any(m.missing(jobs, names) for m in requested),
        run=run,
        results=(
            *(file for folder in folders for file in measured_files(folder)),
            partial_folder(jobs.results.path),
        ),
        needs=tuple(names),
        preview=preview,
    )
    return [stage]
