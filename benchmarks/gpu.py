"""What a step of RoD costs on one GPU, and how near it comes to what the GPU can do.

A dense model of megatron-core trains on made-up text. The rows are times, memory, tokens/s and
model TFLOP/s of a plain step, of the forward pass of training, of scoring whole candidates and
prefixes (scoring 8/8 to 1/8) and of RoD's own steps by `RoDSelector`; the machine's limits (a
matrix product, which is "the ceiling", and a copy); and ratios:

    scoring_over_forward   candidates a second when scored, over blocks in training's forward pass
    rod_over_plain         RoD's step over a plain one
    limit                  1 + m x forward / plain: the same if scoring cost as much as training's
                           forward pass; rod_over_limit is the ratio of the two
    averages_over_plain    a step whose losses are gathered, as a blend that follows the model
                           needs them, over a plain one; transfer_over_plain: a step on a recorded
                           curriculum
    fp8_over_bf16          candidates a second in FP8, over those in bf16
    score moves            change of a score in another micro-batch, when repeated, and as a prefix
    logits in slices       cost of other limits of the logits that are held at once

Without a GPU the size is tiny and the model in fp32: that proves the program, and measures nothing.
The file has the device, the versions and the date beside the rows.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import _one_gpu as one
import torch
from _gpu_measurements import MEASUREMENTS, MIB, Bench, Setting
from _roofline import Roofline, draw


def setting(arguments: argparse.Namespace) -> Setting:
    """The command line over what each size has by default.

    Raises:
        ValueError: the model does not fit the device.
    """
    tiny = arguments.size == "tiny"
    chosen = Setting(
        size=arguments.size,
        seq=arguments.seq or (64 if tiny else 4096),
        vocab=arguments.vocab or (512 if tiny else 151_936),
        layers=arguments.layers,
        batch=8 if tiny else 16,
        micro_batch=2 if arguments.size in ("tiny", "05b") else 1,
        scoring_micro_batch=4 if arguments.size in ("tiny", "05b") else 2,
        repeats=arguments.repeats,
        matrix=256 if tiny else 8192,
        copied=(4 if tiny else 4096) * MIB,
        slices=(1, 2, 4) if tiny else (64, 128, 250, 512, 1024),
    )
    need = chosen.shape.parameters(chosen.vocab) * one.BYTES_PER_PARAMETER
    if one.on_gpu() and need > (has := torch.cuda.get_device_properties(0).total_memory):
        raise ValueError(
            f"--size {chosen.size} needs {need / one.GIB:.0f} GiB for weights and optimizer, and "
            f"this GPU has {has / one.GIB:.0f}: choose a smaller size or vocabulary."
        )
    return chosen


def versions() -> dict[str, str]:
    """What the figures were measured with."""
    packages = {"Python": platform.python_version(), "torch": torch.__version__}
    packages["CUDA"] = str(torch.version.cuda)
    for package in ("megatron-core", "megatron-bridge", "transformer-engine"):
        try:
            packages[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            packages[package] = "not installed"
    return packages


def measure(s: Setting, only: list[str]) -> Bench:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(s, Path(folder), one.start())
        for name in ("limits", *only):
            MEASUREMENTS[name](bench)
    return bench


def options() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "--size", {"choices": one.SIZES, "default": "05b" if one.on_gpu() else "tiny"}
    yield "--seq", {"type": int, "help": "tokens per block"}
    yield "--vocab", {"type": int, "help": "tokens that the model knows"}
    yield "--layers", {"choices": ("local", "te"), "default": "local"}
    yield "--repeats", {"type": int, "default": 6, "help": "of which the median counts"}
    yield "--only", {"nargs": "+", "choices": list(MEASUREMENTS), "default": list(MEASUREMENTS)}
    yield "--json", {"type": Path, "help": "file for the rows"}
    yield "--picture", {"type": Path, "help": "file for the roofline, .png; others are beside it"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, values in options():
        parser.add_argument(name, **values)
    arguments = parser.parse_args()
    try:
        chosen = setting(arguments)
    except ValueError as error:
        parser.error(str(error))
    device = torch.cuda.get_device_name() if one.on_gpu() else "CPU"
    print(f"{device}; " + ", ".join(f"{name} {version}" for name, version in versions().items()))
    bench = measure(chosen, [name for name in arguments.only if name != "limits"])
    roofline = Roofline(device, bench.ceiling, bench.bandwidth, tuple(bench.points))
    result = {
        "device": device,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": versions(),
        "setting": {**asdict(chosen), "dtype": str(chosen.dtype).removeprefix("torch.")},
        "rows": [asdict(row) for row in bench.rows],
        "roofline": asdict(roofline),
    }
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    if arguments.picture:
        arguments.picture.parent.mkdir(parents=True, exist_ok=True)
        draw(roofline, arguments.picture)


if __name__ == "__main__":
    main()
