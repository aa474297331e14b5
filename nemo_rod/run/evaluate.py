"""The stage that measures every arm: held-out losses, and registered measurements."""

from __future__ import annotations

from nemo_rod.run.handover import Stage
from nemo_rod.run.held_out_losses import partial_folder
from nemo_rod.run.measurements import measured_files, measurements
from nemo_rod.run.stages import Stages


def evaluate_stages(stages: Stages) -> list[Stage]:
    """Returns the stage that measures every arm without a result."""
    jobs, config = stages.jobs, stages.config
    chosen = [config.arm] if config.arm else config.arms
    names = ["base", *(name for name in chosen if name != "base")]
    requested = [m for m in measurements() if m.wanted(config)]
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
