"""A measurement: the number of parameters of every arm, from the headers of its checkpoint."""

import json
import math
from pathlib import Path

from nemo_rod.config import Config, section
from nemo_rod.files import write_json
from nemo_rod.run.held_out_losses import is_measured
from nemo_rod.run.model_jobs import ModelJobs
from nemo_rod_example.section import Example

FILE = "parameters.json"
PARTIAL = ()


def wanted(config: Config) -> bool:
    return section(config, Example).parameters


def check(config: Config) -> str | None:
    return "parameters: counted from the checkpoints"


def missing(jobs: ModelJobs, names: list[str]) -> list[str]:
    inputs = {name: jobs.results.measured(name) for name in names}  # weights and blocks
    files = {name: jobs.results.arm(name) / FILE for name in names}
    return [name for name in names if not is_measured(files[name], inputs[name], "evaluate")]


def measure(jobs: ModelJobs, names: list[str]) -> None:
    for name in missing(jobs, names):
        count = sum(map(elements, jobs.results.checkpoint(name).glob("*.safetensors")))
        result = {"parameters": count, "inputs": jobs.results.measured(name)}
        write_json(jobs.results.arm(name) / FILE, result)


def elements(file: Path) -> int:
    """Returns the number of elements of all tensors in a safetensors file."""
    with file.open("rb") as handle:
        header = json.loads(handle.read(int.from_bytes(handle.read(8), "little")))
    header.pop("__metadata__", None)
    return sum(math.prod(tensor["shape"]) for tensor in header.values())
