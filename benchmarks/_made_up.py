"""Blocks of made-up text and made-up reference losses, the same on every machine."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nemo_rod.corpus import BlockStore, SourceSpec, load_tokenizer, prepare
from nemo_rod.roles import ROLES
from nemo_rod.selection import ReferenceWriter
from nemo_rod.selection.references.folder import role_manifest


def make_store(folder: Path, *, length: int, blocks: int) -> BlockStore:
    """A store of made-up text, in bytes: at least `blocks` blocks of each role."""
    size = int(1.1 * blocks * length) + 4096
    made = {"adaptation": ("dialect", "dialect:0:0.25"), "replay": ("chain", "markov:0")}
    sources = [
        SourceSpec(
            name=made[role][0], role=role, kind="synthetic", files=[made[role][1]], max_bytes=size
        )
        for role in ROLES
    ]
    tokenizer = load_tokenizer("byte")
    prepare(folder, sources, tokenizer=tokenizer, block_size=length, holdout_fraction=0)
    store = BlockStore(folder)
    assert min(store.num_adaptation, store.num_replay) >= blocks
    return store


def make_references(folder: Path, store: BlockStore) -> list[Path]:
    """References of made-up losses, the same on every machine."""
    folders = []
    lengths = [store.block_size // n for n in (1, 2, 4, 8)]
    for role in ROLES:
        manifest = role_manifest(store, role, model="made up", lengths=lengths, precision="fp32")
        out = folder / role
        writer = ReferenceWriter(out, manifest, store.hashes)
        ids = writer.missing
        losses = np.random.default_rng(0).random((len(ids), len(lengths)), dtype=np.float32)
        writer.append(ids, 5.5 + losses / store.block_size)
        writer.close()
        folders.append(out)
    return folders
