"""Writes a saved step of a training run as a Hugging Face checkpoint, in a layout of its own."""

from __future__ import annotations

from pathlib import Path

from megatron.bridge.training.checkpointing import _load_model_weights_from_checkpoint

from nemo_rod.corpus.store import BlockStore
from nemo_rod.jobs import ExportJob
from nemo_rod.megatron.gaps import save_hf
from nemo_rod.megatron.models import build
from nemo_rod.megatron.watch import UNWATCHED, Signs


def export(job: ExportJob, signs: Signs = UNWATCHED) -> None:
    """Loads the weights of a distributed checkpoint, saved in any layout, and writes `hf/`.

    Raises:
        ValueError: the model cannot be built, or the version is untested.
    """
    bridge, chunks = build(job, job.model, BlockStore(job.blocks).block_size)
    signs.beat()
    _load_model_weights_from_checkpoint(job.checkpoint, chunks)
    signs.beat()
    save_hf(bridge, chunks, Path(job.out) / "hf")
