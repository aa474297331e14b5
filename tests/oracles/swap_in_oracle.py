"""Jobs of a host, and what a swapped-in selector must have trained on, by plain arithmetic."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from places import ROOT

from nemo_rod.lab.curriculum_tools import CurriculumArrays, arrays
from nemo_rod.selection import Curriculum

RECIPES = ROOT / "recipes" / "swap_in"
BATCH, MULTIPLIER = 8, 2  # samples trained on in one step of every job, candidates for each
HELD_OUT = ("adaptation/new", "replay/old")
NUMBERS = ("step", "loss", "grad_norm")


class Jobs:
    """Jobs with a folder each below one root, where they write their steps and their choices."""

    def __init__(self, root: Path, torchrun: Callable[..., list[str]]) -> None:
        self.root, self.torchrun = root, torchrun

    def on_cpu(self, processes: int, *arguments: Any, path: str, **options: Any) -> list[str]:
        """Runs a host's program without a GPU."""
        return self.torchrun(
            processes, "nemo_rod.cpu.on_cpu", *arguments, fresh=True, env={"PYTHONPATH": path},
            cwd=self.root, **options,
        )  # fmt: skip

    def make_data(self) -> None:
        make_data = RECIPES / "megatron_bridge" / "make_data.py"
        self.on_cpu(1, "core", make_data, "data", path=str(ROOT), timeout=900)

    def steps(self, name: str, key: str) -> list[Any]:
        return [json.loads(line)[key] for line in (self.root / name / "steps.jsonl").open()]

    def metrics(self, name: str) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.root / name / "rod" / "metrics.jsonl").open()]

    def start(self, name: str) -> dict[str, float]:
        """Held-out losses before the first step."""
        return json.loads((self.root / name / "rod" / "validation_start.json").read_text())

    def curriculum(self, name: str) -> CurriculumArrays:
        path = self.root / name / "rod" / "curriculum.rod"
        with Curriculum.open(path, read_only=True) as curriculum:
            return arrays(curriculum)

    def assert_watched(self, name: str, *, every: int) -> None:
        """Losses and times of every step, held-out losses at the start and at intervals."""
        rows, start = self.metrics(name), self.start(name)
        held_out = {f"validation/{kind}/text_document/loss" for kind in HELD_OUT}
        assert set(start) == held_out and all(0 < loss < 10 for loss in start.values())
        for row in rows:
            assert (held_out <= set(row)) == ((row["step"] + 1) % every == 0), row
            assert 0 < row["timing/train/update"] <= row["timing/train/total"]
        for name_of_number in ("loss", "grad_norm"):
            values = [row[f"train/{name_of_number}"] for row in rows]
            np.testing.assert_allclose(values, self.steps(name, name_of_number), rtol=1e-6)
        (replay,) = (key for key in held_out if "/replay/" in key)
        forgotten = max(0.0, rows[-1][replay] - start[replay])
        np.testing.assert_allclose(rows[-1]["validation/forgetting"], forgotten, rtol=1e-9)

    def assert_trained_on_the_top(self, name: str, *, steps: int) -> None:
        """Every sample was drawn once, the highest scores were trained on, and the base scores 0.

        The job runs from the base on a blend of two corpora of one size, replay the second.
        """
        curriculum, num_drawn = self.curriculum(name), MULTIPLIER * steps * BATCH
        assert curriculum.block_ids.shape == (steps, MULTIPLIER * BATCH)
        assert sorted(curriculum.block_ids.ravel()) == list(range(num_drawn))
        self.assert_highest_scores_trained(name)
        is_replay = curriculum.block_ids[0] >= num_drawn // 2
        assert is_replay.any() and (curriculum.score[0][is_replay] == 0).all()

    def assert_highest_scores_trained(self, name: str, *, batch: int = BATCH) -> None:
        """In every step of the record, which ends with the job's last step."""
        curriculum, trained = self.curriculum(name), []
        for loss, score, chosen, threshold in zip(
            *(getattr(curriculum, field) for field in ("loss", "score", "chosen", "threshold")),
            strict=True,
        ):
            order = sorted(range(len(score)), key=lambda i: (-score[i], i))
            assert sorted(order[:batch]) == np.flatnonzero(chosen).tolist()
            assert threshold == score[order[batch - 1]]
            trained.append(loss[chosen].astype(np.float64).mean())
        losses = self.steps(name, "loss")[-len(trained) :]
        np.testing.assert_allclose(losses, trained, rtol=0, atol=2e-6)

    def assert_same_steps(self, name: str, other: str, *keys: str) -> None:
        for key in keys or NUMBERS:
            assert self.steps(name, key) == self.steps(other, key), key

    def assert_same_choices(self, name: str, other: str, *close: str) -> None:
        """The same pools and choices; scores, and the named numbers of each step, are close."""
        one, two = self.curriculum(name), self.curriculum(other)
        assert (one.block_ids == two.block_ids).all()
        assert (one.chosen == two.chosen).all()
        np.testing.assert_allclose(one.score, two.score, rtol=0, atol=1e-5)
        for key in close:
            np.testing.assert_allclose(self.steps(name, key), self.steps(other, key), rtol=1e-4)

    def assert_resumed(self, name: str, whole: str, *, steps: list[int], repeated: int) -> None:
        """A killed and resumed job did these steps, the last of them as the uninterrupted did."""
        assert self.steps(name, "step") == steps
        one, two = self.curriculum(name), self.curriculum(whole)
        for field in ("step", "block_ids", "score", "chosen"):
            assert (getattr(one, field) == getattr(two, field)).all(), field
        assert self.steps(name, "loss")[-repeated:] == self.steps(whole, "loss")[-repeated:]


def answers(outputs: list[str]) -> dict[str, str]:
    """The message of every case, from the line that a program of refusals prints."""
    lines = "".join(outputs).splitlines()
    (line,) = (line for line in lines if line.startswith("SAID "))
    return dict(json.loads(line.removeprefix("SAID ")))
