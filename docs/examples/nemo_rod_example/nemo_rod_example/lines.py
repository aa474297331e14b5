"""A logger: appends the metrics of every step to a file of JSON lines."""

import json
from collections.abc import Mapping
from pathlib import Path


class Lines:
    def __init__(self, folder: Path, run_name: str) -> None:
        self.path, self.run_name = folder / "lines.jsonl", run_name

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"run": self.run_name, "step": step, **metrics}) + "\n")

    def finish(self) -> None:  # the training has ended
        pass
