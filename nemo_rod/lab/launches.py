"""The launches of a run folder: their configuration, and Slurm's view of their jobs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from nemo_rod.cli import latest_config
from nemo_rod.commands.text import say
from nemo_rod.config import Config, config_class
from nemo_rod.lab.data_alone import read_settings, without_code
from nemo_rod.run.checks import to_config
from nemo_rod.run.launch.queue import QueuedJob, ask, by_cluster, in_queue, read_jobs
from nemo_rod.run.launch.render import CONFIG_HEAD, escape_interpolations


def read_launch(run_dir: Path, *, trusted: bool | None = None) -> tuple[str, Config]:
    """Returns the latest launch of a run folder: the launcher's name and its configuration.

    The folder may be somebody else's, so nothing of it switches on code; see `without_code`.

    Args:
        run_dir: the folder.
        trusted: whether the user of this command lets code run that lies beside a checkpoint;
            None for a command that runs none.

    Raises:
        ValueError: nothing was launched there, or its configuration is damaged.
    """
    if (file := latest_config(run_dir)) is None:
        raise ValueError(
            f"{run_dir} holds no launch: expected the run_dir of `nemo-rod run`, such as runs/toy."
        )
    composed, _, left = _as_data(file, trusted=bool(trusted))
    composed.run_dir = str(run_dir.absolute())  # the folder may have been moved since
    composed.model.trust_remote_code = bool(trusted)
    if file.lstat().st_uid != os.geteuid():  # another user may read the page of these results
        composed.report.seeds, composed.report.settings = [], []
    if left and trusted is not None:
        say(
            f"nemo-rod: {file} names {', '.join(left)}, which this command does "
            "not use: code is named on the command line or in its recipe, not by a folder."
        )
    try:
        return file.parent.name, to_config(composed)
    except ValueError as error:
        raise ValueError(f"{file} was changed since the launch: {error}") from None


def in_place_of_recipe(file: Path, words: list[str]) -> list[str]:
    """Returns the words of a command whose recipe is the latest launch of a folder.

    Nothing of the folder configures Hydra or names code; whatever the words say, counts.

    Args:
        file: the configuration of the launch.
        words: the folder, which may have been moved since, and the words after it.

    Raises:
        ValueError: the launch is another user's, is damaged, or names code.
    """
    cure = f"type the recipe instead, as at first: {file.with_name('command')} may have it."
    if file.lstat().st_uid != os.geteuid():
        raise ValueError(f"{file} is another user's, and says what is read and written: {cure}")
    _, values, left = _as_data(file, trusted="model.trust_remote_code=true" in words)
    if left:
        raise ValueError(
            f"{file} names {', '.join(left)}, code which a folder alone does not run: {cure}"
        )
    place = escape_interpolations({"run_dir": os.path.abspath(words[0])})
    node = {**values, **yaml.safe_load(CONFIG_HEAD), **place}
    ConfigStore.instance().store(name="launched", node=node)
    return ["launcher.kind=local", *words[1:], "--config-name", "launched"]


def _as_data(file: Path, *, trusted: bool) -> tuple[DictConfig, dict[str, Any], list[str]]:
    """Returns a launch without code: composed, its values, and the names of what was left out."""
    settings = read_settings(file)
    try:
        values, left = without_code(settings, trusted=trusted)
        own = {key: values[key] for key in values.keys() - {"defaults", "hydra"}}
        if len(own) + 2 > len(values):
            raise ValueError("it is none of a launch")
        composed: Any = OmegaConf.merge(OmegaConf.structured(config_class()), own)
    except Exception as error:  # YAML's and OmegaConf's have no class in common
        why = str(error).partition("\n")[0]
        sentence = f"{file} is damaged ({why}): restore it, or launch the run again."
        raise ValueError(sentence) from None
    return composed, values, left


def jobs_by_stage(run_dir: Path, launcher: str) -> dict[str, tuple[str, QueuedJob | None]]:
    """Returns every stage's job number and job; None for jobs that Slurm no longer lists.

    Queries squeue, then for jobs that it no longer lists sacct, then the controller. Of other
    launchers than the latest, only jobs in the queue count.

    Raises:
        ValueError: squeue does not respond.
    """
    jobs = read_jobs(run_dir)
    own, others = in_queue(run_dir, jobs)
    of_latest = [number for number, job in jobs.items() if job.launcher == launcher]
    latest = [number for number in of_latest if number not in others]
    ended: dict[str, QueuedJob] = {}
    groups = by_cluster(sorted(set(latest) - set(own)))
    for cluster, numbers in groups.items():
        command = ["sacct", *cluster, "--noheader", "--parsable2", "--allocations"]
        lines = ask(*command, f"--jobs={','.join(numbers)}", "--format=JobID,State,NodeList")
        for line in lines if isinstance(lines, list) else []:
            short, state, nodes = [*line.split("|"), "", ""][:3]
            if short in numbers and state:  # a site's own sacct may print more
                # the state of a cancelled job is "CANCELLED by 1000"
                ended[numbers[short]] = QueuedJob(state.partition(" ")[0], nodes)
    for cluster, numbers in groups.items() if not ended else ():
        for short, number in numbers.items():
            lines = ask("scontrol", *cluster, "show", "job", "--oneliner", short)
            for line in lines if isinstance(lines, list) else []:
                fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
                nodes = fields.get("NodeList", "").replace("(null)", "")
                if "JobState" in fields:
                    ended[number] = QueuedJob(fields["JobState"], nodes)
    known = own | ended
    return {jobs[number].stage: (number, known.get(number)) for number in [*latest, *own]}
