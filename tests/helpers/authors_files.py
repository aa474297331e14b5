"""Blocks and traces as bethgelab/replay-on-demand writes them, made up."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ORIGINS = (
    ("law", 0, "legal"), ("tos", 0, "legal"), ("wk_web", 1, "general"), ("math_web", 1, "general"),
)  # fmt: skip
SCHEMA = pa.schema(
    {
        "token_ids": pa.list_(pa.int64()), "origin": pa.string(), "origin_tag": pa.int64(),
        "domain": pa.string(), "capability": pa.string(), "n_bytes": pa.int64(),
        "content_hash": pa.string(), "split": pa.string(),
    }
)  # fmt: skip


def content_hash(origin: str, tokens: list[int]) -> str:
    payload = {"origin": origin, "token_ids": tokens}
    text = json.dumps(payload, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def write_blocks(
    folder: Path, count: int, *, size: int = 64, per_part: int = 50_000
) -> list[dict[str, Any]]:
    """Writes `count` blocks of byte tokens over all origins; returns their rows."""
    folder.mkdir(parents=True)
    dice, train, holdout = np.random.default_rng(0), [], []
    for index, (origin, tag, domain) in enumerate(ORIGINS):
        tokens = dice.integers(0, 256, (count // len(ORIGINS) + index, size))
        rows = [
            {
                "token_ids": row.astype(np.int32), "origin": origin, "origin_tag": tag,
                "domain": domain, "capability": origin, "n_bytes": None,
                "content_hash": content_hash(origin, row.tolist()),
            }
            for row in tokens
        ]  # fmt: skip
        rows.sort(key=lambda row: hashlib.sha256(f"42:{row['content_hash']}".encode()).digest()[:4])
        held = min(math.ceil(0.01 * len(rows)), max(1, len(rows) // 5))
        holdout += [row | {"split": "holdout"} for row in rows[:held]]
        train += [row | {"split": "train"} for row in rows[held:]]
    rows = train + holdout
    for number, first in enumerate(range(0, len(rows), per_part)):
        table = pa.Table.from_pylist(rows[first : first + per_part], schema=SCHEMA)
        pq.write_table(table, folder / f"part_{number:05d}.parquet", compression="snappy")
    return rows


def trace_rows(rows: list[dict[str, Any]], step: int, k: int, seed: int = 0) -> list[dict]:
    """A step of a trace: some training blocks, by descending rho."""
    dice = np.random.default_rng([step, seed])
    train = [row for row in rows if row["split"] == "train"]
    rho = -np.sort(-dice.normal(size=k).astype(np.float32))
    return [
        {
            "step": step, "content_hash": train[i]["content_hash"], "origin": train[i]["origin"],
            "origin_tag": train[i]["origin_tag"], "rho": float(score),
            "target_loss": float(score + np.float32(1.5)),
        }
        for i, score in zip(dice.choice(len(train), k, replace=False), rho, strict=True)
    ]  # fmt: skip


def write_lines(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def cache_rows(rows: list[dict], tag: int) -> list[dict]:
    """Losses of one role's training blocks, but for some that their last batch dropped."""
    dice = np.random.default_rng(tag)
    taken = [row for row in rows if row["split"] == "train" and row["origin_tag"] == tag][3:]
    return [
        {
            "content_hash": row["content_hash"], "origin": row["origin"], "origin_tag": tag,
            "ref_loss": float(np.float32(dice.gamma(2.0))),
            "n_response_tokens": len(row["token_ids"]) - 1,
        }
        for row in taken
    ]  # fmt: skip


def write_cache(folder: Path, rows: list[dict], *, per_file: int = 100) -> None:
    types = {"content_hash": pa.string(), "origin": pa.string(), "origin_tag": pa.int32()}
    schema = pa.schema(types | {"ref_loss": pa.float32(), "n_response_tokens": pa.int32()})
    folder.mkdir()
    for number, first in enumerate(range(0, len(rows), per_file)):
        table = pa.Table.from_pylist(rows[first : first + per_file], schema=schema)
        pq.write_table(table, folder / f"refloss_train_{number:012x}.parquet")
