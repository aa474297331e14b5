"""The interface of launchers, and `launcher=local`, which runs stages on this machine."""

from __future__ import annotations

import shlex
from pathlib import Path

from nemo_rod.config import Config
from nemo_rod.jobs import Job
from nemo_rod.run.handover import Inputs, Stage
from nemo_rod.run.launch.render import frozen_config, stage_command
from nemo_rod.run.processes.torchrun import run_job
from nemo_rod.run.variants import ArmSettings

_SCRIPT = """\
#!/bin/bash
# The whole run on this machine, one command after the other; each skips what is done.
set -euo pipefail
cd {cwd}
"""


class Local:
    """Runs every stage in this process and its jobs under torchrun. Others override the rest.

    Attributes:
        submits: whether it renders jobs for a queue (`render`) instead of running stages here.
        environment: whether jobs run in this environment, so that its packages can be checked.
        bridge: whether Megatron-Bridge trains every arm, as opposed to another host's workers.
    """

    submits = False
    environment = True
    bridge = True

    def check_arm(self, arm: ArmSettings, config: Config) -> None:
        """Refuses an arm of a recipe that its jobs cannot train.

        Raises:
            ValueError: a key is at fault; the message has it and the remedy.
        """

    def check_cluster(self, config: Config) -> None:
        """Refuses a cluster that it cannot use; called by launchers that submit.

        Raises:
            ValueError: a key is at fault; the message has it and the remedy.
        """

    def inputs(self, config: Config, *, scoring: bool) -> Inputs:
        """Returns its own keys that affect the result of a job, beside the recipe's."""
        return {}

    def exports(self, arm: str) -> bool:
        """Returns whether steps of an arm can be exported, by Megatron-Bridge."""
        return True

    def run_job(self, job: Job, file: Path, config: Config, log: Path) -> None:
        """Runs a job, already written to `file`, and waits for it; see `torchrun.run_job`."""
        run_job(file, world_size=job.parallel.world_size, launcher=config.launcher, log=log)

    def render(self, config: Config, stages: list[Stage]) -> dict[str, str]:
        """Returns the files of a launch, by name."""
        kind = config.launcher.kind  # the frozen configuration has launcher.kind=local
        host = "" if kind == "local" else f" launcher.kind={kind}"
        lines = [stage_command(config, stage) + host for stage in stages]
        script = _SCRIPT.format(cwd=shlex.quote(str(Path.cwd()))) + "\n".join(lines) + "\n"
        return {"config.yaml": frozen_config(config), "run.sh": script}
