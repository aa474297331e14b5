"""What a domain's blocks must be fit for, beyond being blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_rod.config import Domain
from nemo_rod.run.prepared_blocks import prepare_blocks

SOURCES = {
    "dialect": {"role": "adaptation", "kind": "synthetic", "files": ["dialect:0:0.25"]},
    "chain": {"role": "replay", "kind": "synthetic", "files": ["markov:0"]},
}


def domain(holdout_fraction: float) -> Domain:
    sources = {name: {**source, "max_bytes": 20_000} for name, source in SOURCES.items()}
    return Domain(
        sources=sources, tokenizer="byte", block_size=64, holdout_fraction=holdout_fraction
    )


def test_every_source_has_held_out_blocks(tmp_path: Path) -> None:
    found = prepare_blocks(domain(0.1), tmp_path / "held")
    assert found["num_adaptation"] > 0 and found["num_replay"] > 0
    with pytest.raises(ValueError, match="adaptation source dialect has no held-out block: give"):
        prepare_blocks(domain(0.0), tmp_path / "none")
