"""Writes a saved step of a training run as a Hugging Face checkpoint, in a layout of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron.bridge.training.checkpointing import _load_model_weights_from_checkpoint

from nemo_rod.corpus.store import BlockStore
from nemo_rod.jobs import ExportJob
from nemo_rod.megatron.gaps import save_hf
from nemo_rod.megatron.models import build
from nemo_rod.upstream import functions


def export(job: ExportJob, beat: Callable[[], None] = lambda: None) -> None:
    """Loads the weights of a distributed checkpoint, saved in any layout, and writes `hf/`.

    Raises:
        ValueError: the model cannot be built, or the version is untested.
    """
    functions.check("scoring", "trainer")
    bridge, chunks = build(job, job.model, BlockStore(job.blocks).block_size)
    beat()
    _load_model_weights_from_checkpoint(job.checkpoint, chunks)
    beat()
    save_hf(bridge, chunks, Path(job.out) / "hf")
