"""What the metrics of a step cost beside a step of the toy: the competition's, and the loggers'.

A pool of 2,048 candidates from the sources of the paper's German setting is measured as a step of
the journal measures it: the metrics, and their line of JSON. Beside it stands one step of the toy:
a forward pass over its 64 candidates, and an update on its batch of 32, in plain torch, without
what a trainer adds.

    metrics          the metrics of the competition and their line of JSON, over the step
    ms tensorboard   what showing the line in TensorBoard takes, if asked for

Times are the processor's, medians of neighbouring rounds.

    python benchmarks/metrics.py --json rows.json [--quick]
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from _rows import Measurement, Row, Setting, run, under
from omegaconf import OmegaConf

from nemo_rod.installation import config_folder
from nemo_rod.loggers import write_scalars
from nemo_rod.selection import Choice, Joint, Pool, choose, selection_metrics

NUM_CANDIDATES, NUM_SOURCES, NUM_ADAPTATION = 2048, 23, 9
GOAL = 0.5  # percent of a step


def made_up_choice() -> tuple[Choice, np.ndarray, list[str]]:
    """A choice among candidates of 9 adaptation and 14 replay sources."""
    rng = np.random.default_rng(0)
    source_C = rng.integers(0, NUM_SOURCES, NUM_CANDIDATES)
    pool = Pool(0, np.arange(NUM_CANDIDATES), source_C >= NUM_ADAPTATION)
    loss_C = rng.normal(2.0, 0.5, NUM_CANDIDATES).astype(np.float32)
    choice = choose(pool, Joint(), NUM_CANDIDATES // 2, loss_C, np.ones_like(loss_C))
    return choice, source_C, [f"source_{number}" for number in range(NUM_SOURCES)]


def step_of_the_toy() -> Callable[[], object]:
    """One step of RoD of the toy's model at the toy's size, in plain torch."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.set_num_threads(1)
    group = config_folder()
    model_of = OmegaConf.load(group / "model" / "toy_qwen3.yaml")
    block_size = OmegaConf.load(group / "domain" / "debian_german.yaml").block_size
    recipe = OmegaConf.load(Path(__file__).parent.parent / "recipes" / "toy.yaml")
    values: Any = OmegaConf.to_container(model_of.architecture)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**values))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    size = recipe.train.micro_batch_size
    candidates = torch.randint(0, 256, (2 * recipe.train.batch_size, block_size))
    batch = candidates[: recipe.train.batch_size]

    def step() -> None:
        with torch.no_grad():
            for part in candidates.split(recipe.scoring.micro_batch_size):
                model(input_ids=part, labels=part)
        optimizer.zero_grad()
        for part in batch.split(size):
            model(input_ids=part, labels=part).loss.backward()
        optimizer.step()

    return step


def seconds(action: Callable[[], object]) -> float:
    begin = time.process_time()
    action()
    return time.process_time() - begin


def metrics(setting: Setting) -> Iterator[Row]:
    """The metrics of a step, over a step of the toy."""
    from torch.utils.tensorboard import SummaryWriter

    choice, source_C, names = made_up_choice()
    step, rounds = step_of_the_toy(), 5 if setting.quick else 20
    row = selection_metrics(choice, source_C, names)
    writer = SummaryWriter(str(setting.folder / "tensorboard"))
    shown = {name: value for name, value in row.items() if value is not None}
    times: dict[str, list[float]] = {name: [] for name in ("step", "metrics", "line", "board")}
    for number in range(rounds):
        times["step"].append(seconds(step))
        for _ in range(20):
            times["metrics"].append(seconds(lambda: selection_metrics(choice, source_C, names)))
            times["line"].append(seconds(lambda: json.dumps(row)))
        begin = time.process_time()
        write_scalars(writer, shown, number)
        times["board"].append(time.process_time() - begin)
    writer.close()
    median = {name: float(np.median(values)) for name, values in times.items()}
    share = 100 * (median["metrics"] + median["line"]) / median["step"]
    yield under(f"metrics {NUM_CANDIDATES} candidates", share, "%", GOAL)
    yield Row("ms step of the toy", 1e3 * median["step"], "ms")
    yield Row("ms metrics", 1e3 * median["metrics"], "ms")
    yield Row("ms line", 1e3 * median["line"], "ms")
    yield Row(f"ms tensorboard, {len(shown)} values", 1e3 * median["board"], "ms")


MEASUREMENTS: dict[str, Measurement] = {"metrics": metrics}

if __name__ == "__main__":
    run(__doc__, MEASUREMENTS)
