"""`nemo-rod time`: plain and RoD steps of a recipe on made-up text, beside the plan."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from statistics import median
from typing import Any

from nemo_rod.commands.run_stages import shows_dry_run
from nemo_rod.commands.text import table
from nemo_rod.config import Config, section
from nemo_rod.files import read_lines
from nemo_rod.lab.plan.command import make_plan
from nemo_rod.lab.probe.command import ARMS, probed, run_and_report, text_needed
from nemo_rod.lab.probe.section import Probe

FILE = "time.json"
_COUNTED = 10  # steps of either arm
_WARM_UP = 3  # steps before these: compilation, and the first use of memory


@shows_dry_run
def time(config: Config) -> None:
    """Times a recipe's own model, layout and shape, prints a table and writes it to `time.json`.

    Raises:
        ValueError: its folder is that of the run, or the recipe cannot run.
    """
    run_and_report(config, timed(config), FILE, measurements, text)


def timed(config: Config) -> Config:
    """Returns the configuration of a probe on made-up text, for ten counted steps of either arm."""
    config = copy.deepcopy(config)
    options = section(config, Probe)
    options.steps = _COUNTED + _WARM_UP
    options.run_dir = options.run_dir or f"{config.run_dir.rstrip('/')}_time"
    small = probed(config)
    if small.pretrain is not None:
        small.pretrain.steps = min(_COUNTED, small.pretrain.steps)
    made_up = {"kind": "synthetic", "max_tokens": text_needed(small)}
    sources = {
        spec.name: {"role": spec.role, "files": [f"markov:{number}"], **made_up}
        for number, spec in enumerate(config.domain.specs)
    }
    small.domain = dataclasses.replace(small.domain, sources=sources)
    return small


def measurements(config: Config, small: Config) -> dict[str, Any]:
    """Returns medians over the counted steps of either arm, beside the figures of the plan."""
    plan = make_plan(config)
    tokens = config.train.batch_size * config.domain.block_size
    arms = {}
    for name in ARMS[1:]:
        path = Path(small.run_dir) / "arms" / name / "metrics.jsonl"
        rows = read_lines(path, "timing/train/total")[_WARM_UP:]
        seconds = median(row["timing/train/total"] for row in rows)
        tflops = median(row["throughput/model_tflops_per_gpu"] for row in rows)
        peaks = [row["memory/peak_gib"] for row in rows if "memory/peak_gib" in row]
        stage = next(stage for stage in plan.stages if stage.name == name)
        arms[name] = {
            "seconds_per_step": seconds,
            "tokens_per_second": tokens / seconds,
            "tflops_per_process": tflops,
            "mfu": tflops / plan.assumptions["peak_tflops"],
            "peak_gib": max(peaks, default=None),
            "planned_seconds_per_step": stage.update_seconds + stage.scoring_seconds,
        }
    plain, rod = (arms[name]["seconds_per_step"] for name in ARMS[1:])
    return {
        "recipe": config.recipe,
        "processor": plan.assumptions["processor"],
        "peak_tflops": plan.assumptions["peak_tflops"],
        "planned_gib": plan.memory.total / 2**30,
        "rod_over_plain": rod / plain,
        "arms": arms,
    }


def text(measured: dict[str, Any]) -> str:
    """Returns the measurements for a terminal."""
    rows = [
        (
            name,
            *(f"{arm['seconds_per_step']:.3g}", f"{arm['planned_seconds_per_step']:.3g}"),
            *(f"{arm['tokens_per_second']:,.0f}", f"{arm['tflops_per_process']:.3g}"),
            *(f"{arm['mfu']:.0%}", arm["peak_gib"] and f"{arm['peak_gib']:.1f}"),
        )
        for name, arm in measured["arms"].items()
    ]
    header = ("arm", ">s a step", ">planned", ">tokens/s", ">TFLOP/s", ">MFU", ">peak GiB")
    return f"""
{measured["recipe"]}, {_COUNTED} steps of each arm on made-up text, {measured["processor"]} with a \
peak of {measured["peak_tflops"]:,g} TFLOP/s:
{table(header, rows)}
A step with RoD takes {measured["rod_over_plain"]:.2f} times as long as a plain one. Planned \
memory: {measured["planned_gib"]:.1f} GiB a process."""
