"""Where a report's numbers come from: code, command, configuration, machines, versions and data."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from nemo_rod.cli import latest_config
from nemo_rod.files import read_bytes, read_json
from nemo_rod.lab.data_alone import read_settings, without_secrets
from nemo_rod.lab.report.results import Results
from nemo_rod.run.stage_log import StageLog

_PACKAGES = ("numpy", "torch", "transformer-engine", "megatron-core", "megatron-bridge",
             "transformers", "lm-eval")  # fmt: skip


def provenance_of(run_dir: Path, results: Results) -> dict[str, Any]:
    """Returns the key `provenance` of `results.json`; unknown values are null or empty.

    Returns:
        Dates are of the stages' logs, in UTC. `hours` sums the arms' training on its machine;
        `gpu_hours` is null on a CPU, and `cost` without report.gpu_hour_price.
        `versions` are those of the machine of the report.
    """
    file = latest_config(run_dir)
    config: dict[str, Any] = without_secrets(read_settings(file)) if file else {}
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True) if config else None
    arms = results["arms"]
    trained, scored, seconds = (
        sum(arm[key] or 0 for arm in arms.values())
        for key in ("trained_tokens", "scored_tokens", "wall_seconds")
    )
    logs = sorted(run_dir.glob("launch/stages/*.jsonl"))
    events = [event for file in logs for event in StageLog(run_dir, file.stem).events()]
    times = [event["time"] for event in events]
    cluster: Mapping[str, Any] = config.get("cluster") or {}
    known = {key: cluster.get(key) for key in ("gpu", "nodes", "gpus_per_node")}
    gpus = (known["nodes"] or 1) * (known["gpus_per_node"] or 1)
    gpu_hours = seconds / 3600 * gpus if known["gpu"] else None
    price = (config.get("report") or {}).get("gpu_hour_price")
    typed = file.with_name("command") if file else None
    command = None
    if typed is not None and typed.is_file():
        command = read_bytes(typed, below=run_dir).decode(errors="replace")
    versions, data = {"python": platform.python_version()}, []
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    for role, counts in results["sources"].items():
        for source, blocks in counts.items():
            file = run_dir / "blocks" / role / source / "manifest.json"
            content = read_json(file) if file.is_file() else {}
            row = {"role": role, "source": source, "blocks": blocks}
            data.append(row | {key: content.get(key) for key in ("commit", "digest")})
    return {
        "version": sys.modules["nemo_rod"].__version__,
        "commit": _commit(),
        "command": command,
        "configuration": text,
        "began": _date(min(times, default=None)),
        "ended": _date(max(times, default=None)),
        "hosts": sorted({event["host"] for event in events if "host" in event}),
        "hardware": known | {"machine": _machine(), "system": platform.platform(terse=True)},
        "versions": versions,
        "data": data,
        "trained_tokens": trained,
        "scored_tokens": scored,
        "hours": seconds / 3600,
        "gpu_hours": gpu_hours,
        "cost": gpu_hours * price if gpu_hours is not None and price is not None else None,
    }


def _machine() -> str:
    """Returns the processor, cores, memory and GPUs of this machine, as Linux names them."""

    def values_of(key: str, *files: Path) -> list[str]:
        lines = [line for file in files for line in file.read_text().splitlines()]
        pairs = (line.partition(":") for line in lines)
        return [value.strip() for name, _, value in pairs if name.strip() == key]

    processors: list[str] = []
    gpus: Counter[str] = Counter()
    with suppress(OSError):
        processors = values_of("model name", Path("/proc/cpuinfo"))
        gpus.update(values_of("Model", *Path("/proc/driver/nvidia/gpus").glob("*/information")))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    parts = [*processors[:1], f"{os.cpu_count()} cores", f"{memory:.0f} GiB"]
    return ", ".join([platform.machine(), *parts, *(f"{n} x {name}" for name, n in gpus.items())])


def _commit() -> str | None:
    """Returns the commit of the installed code: of its checkout, or as pip has recorded it."""
    with suppress(metadata.PackageNotFoundError):
        recorded = metadata.distribution("nemo-rod").read_text("direct_url.json")
        commit = json.loads(recorded or "{}").get("vcs_info", {}).get("commit_id")
        if isinstance(commit, str):
            return commit
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    with suppress(OSError, subprocess.SubprocessError):
        words = ("git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")
        return subprocess.run(
            words, cwd=root, capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()
    return None


def _date(time: float | None) -> str | None:
    return None if time is None else datetime.fromtimestamp(time, UTC).isoformat(timespec="seconds")
