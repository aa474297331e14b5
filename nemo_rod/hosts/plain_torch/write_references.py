"""Reference losses of a store, by a model in plain PyTorch (paper, "reference caching")."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from nemo_rod.corpus.store import BlockStore
from nemo_rod.hosts.plain_torch.scorer import TorchScorer
from nemo_rod.selection.references import reference_pass
from nemo_rod.selection.references.folder import role_manifest


def write_references(
    model: torch.nn.Module,
    store: BlockStore,
    out: str | Path,
    *,
    role: str,
    micro_batch_size: int,
    length: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Writes a model's losses on all blocks of a role. Collective over the replicas.

    After an interruption, the same call resumes; a complete folder is left as it is.

    Args:
        model: the specialist for "adaptation", the model that training starts from for "replay";
            its precision and its wrapping as in the training that will use the references.
        store: the store that holds the blocks.
        out: folder of the references.
        role: "adaptation" or "replay".
        micro_batch_size: blocks in one forward pass of one replica.
        length: leading tokens of a block that are scored; None for whole blocks.
        group: process group of the replicas; by default all processes, if there are several.

    Raises:
        ValueError: the folder holds references of another model, store or precision, or a loss is
            not finite.

    Example:
        >>> write_references(base, store, "references/base", role="replay", micro_batch_size=8)
    """
    scorer = TorchScorer(
        model, store, micro_batch_size=micro_batch_size, length=length, group=group
    )
    scorer.losses(np.array([0]))  # to learn the precision
    manifest = role_manifest(
        store,
        role,
        model=weights_digest(scorer.model),
        lengths=[scorer.length],
        precision=scorer.precision,
    )
    name = f"{role} references"
    reference_pass.write_references(
        scorer, Path(out), manifest=manifest, name=name, agree=scorer.from_first
    )


def weights_digest(model: torch.nn.Module) -> str:
    """Returns the hex digest of a model's weights, whole or sharded by FSDP2. Collective if so."""
    state = hashlib.blake2b(digest_size=16)
    for name, weight in model.state_dict().items():  # with buffers that are saved
        if not torch.is_tensor(weight):
            continue
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        state.update(f"{name} {whole.dtype} {tuple(whole.shape)}\n".encode())
        flat = whole.detach().cpu().contiguous().view(-1)
        state.update(flat.view(torch.uint8).numpy().data)
    return state.hexdigest()
