"""What loggers have written, read back by their own packages."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_rod.loggers import read_steps

Curves = dict[str, dict[int, float]]  # name -> step -> value


def of_tensorboard(folder: Path) -> Curves:
    """All event files of a folder as one run, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events_file = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events_file.Reload()
    curves: Curves = {}
    for name in events_file.Tags()["scalars"]:
        events = events_file.Scalars(name)
        curves[name] = {event.step: event.value for event in events}
        assert len(curves[name]) == len(events), f"{name} has a step twice"
    return curves


def of_wandb(folder: Path) -> tuple[Curves, set[str]]:
    """All offline files of a folder in the order of their runs, and the ids of these runs.

    As in W&B, a step that is already there keeps its value.
    """
    from wandb.proto import wandb_internal_pb2

    files = pytest.importorskip(
        "wandb.sdk.internal.datastore", reason="from 0.30, wandb reads its files in Go alone"
    )
    curves: Curves = {}
    ids: set[str] = set()
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        store = files.DataStore()
        store.open_for_scan(str(file))
        while data := store.scan_data():
            record: Any = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                ids.add(record.run.run_id)
            if record.HasField("history"):
                row = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                for name, value in row.items():
                    curves.setdefault(name, {}).setdefault(record.history.step.num, value)
    return curves, ids


def of_metrics(folder: Path) -> Curves:
    """`metrics.jsonl` and `validation_start.json`, by name in loggers and number of steps done."""
    curves: Curves = {}
    for done, metrics in read_steps(folder, first=0, last=sys.maxsize):
        for name, value in metrics.items():
            curves.setdefault(name, {})[done] = value
    return curves
