"""Texts in several files of two sources, and a recipe that prepares them in one task or in many."""

import json
import random
from pathlib import Path
from typing import Any

WORDS = ("alpha", "beta", "gamma", "delta", "")


def write_texts(folder: Path, rows: int = 90) -> Path:
    """Seven files, of which documents recur, are empty, and one is tokenised in pieces."""
    draw = random.Random(3)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(7):
        texts = [" ".join(draw.choices(WORDS, k=draw.randint(0, 9))) for _ in range(rows)]
        if number == 2:
            texts[40] = "x y" * 370_000
        lines = (json.dumps({"text": text}) + "\n" for text in texts * (1 + number % 3))
        (folder / f"f{number}.jsonl").write_text("".join(lines))
    return folder


def sources_of(texts: Path, **keys: Any) -> dict[str, Any]:
    new = {"role": "adaptation", "kind": "jsonl", "files": [f"{texts}/f[0-3].jsonl"], **keys}
    old = {"role": "replay", "kind": "jsonl", "files": [f"{texts}/f[4-6].jsonl"], **keys}
    return {"new": new, "old": old}


def recipe_of(texts: Path, folder: Path) -> list[str]:
    """Words of the command line that choose these texts."""
    (folder / "domain").mkdir(parents=True)
    domain = {"tokenizer": "byte", "block_size": 64, "sources": sources_of(texts)}
    (folder / "domain" / "mine.yaml").write_text(json.dumps(domain))
    return ["recipe=toy_synthetic", "--config-dir", str(folder), "domain=mine"]
