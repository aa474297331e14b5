"""Completions of held-out text by base, specialist, fixed replay and RoD, for the page."""

from __future__ import annotations

from typing import Any

import numpy as np

from nemo_rod.config import section
from nemo_rod.corpus.store import BlockStore
from nemo_rod.files import read_json
from nemo_rod.lab.block_text import block_text, find_tokenizer
from nemo_rod.lab.report.results import Results
from nemo_rod.lab.report.section import Report
from nemo_rod.lab.sample import continuations
from nemo_rod.roles import ROLES
from nemo_rod.run.stages import Stages

_GIVEN, _WRITTEN = 24, 48  # tokens
_SMALL = 200e6  # bytes of weights that a report loads without being asked


def complete(stages: Stages, results: Results) -> list[dict[str, Any]]:
    """Returns the likeliest tokens after every prompt by every arm, as text.

    Those of the earlier `results.json` are used again if model and prompt are the same.

    Returns:
        Rows of `prompt`, `source` (null for a prompt of the user's), `arm`, `weights` and `text`.

    Raises:
        ValueError: the tokenizer cannot be found, or a prompt has no token.
        OSError: a checkpoint cannot be read.
    """
    run, shown = stages.results, section(stages.config, Report)
    names = ["base", "no_replay", results["reference_arm"], "rod"]
    hf = {name: run.checkpoint(name) for name in names if name in results["arms"]}
    made = {name: folder for name, folder in hf.items() if (folder / "config.json").is_file()}
    sizes = [sum(f.stat().st_size for f in hf.glob("*.safetensors")) for hf in made.values()]
    is_asked = shown.prompts is not None or (
        max(sizes, default=0) < _SMALL and not shown.smoke_test
    )
    if not made or not is_asked or not run.blocks.is_dir():
        return []
    old = run.path / "report" / "results.json"
    earlier = (read_json(old).get("completions") or []) if old.is_file() else []
    known = {(row["weights"], row["prompt"]): row["text"] for row in earlier}
    store = BlockStore(run.blocks, split="holdout")
    tokenizer = find_tokenizer(store)
    prompts: list[tuple[str | None, str]] = [(None, text) for text in shown.prompts or []]
    if shown.prompts is None:
        for role in ROLES:  # the first block of a source that begins within a document
            source = next((s for s in store.sources if s.role == role and s.count), None)
            if source is not None:
                ids = np.arange(source.start, source.start + min(source.count, 64))
                whole = (store.tokens(ids)[:, :_GIVEN] != store.eod_id).all(axis=1)
                block_id = int(ids[whole.argmax()])
                text = block_text(store, tokenizer, block_id, length=_GIVEN)
                prompts.append((source.name, text))
    rows = []
    for arm, folder in made.items():
        weights = run.weights(arm)
        missing = [prompt for _, prompt in prompts if (weights, prompt) not in known]
        if missing:
            texts = continuations(
                folder, tokenizer, missing, tokens=_WRITTEN,
                trust_remote_code=stages.config.model.trust_remote_code,
            )  # fmt: skip
            known |= {(weights, prompt): text for prompt, text in zip(missing, texts, strict=True)}
        rows += [
            {"prompt": prompt, "source": name, "arm": arm, "weights": weights,
             "text": known[weights, prompt]}
            for name, prompt in prompts
        ]  # fmt: skip
    return rows
