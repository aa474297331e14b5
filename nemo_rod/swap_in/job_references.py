"""Reference losses of a job's own data, computed with a model that the job itself has loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config, unwrap_model

from nemo_rod.files import digest
from nemo_rod.megatron.reference_pass import is_complete, write_references
from nemo_rod.megatron.scoring.scorer import MegatronScorer
from nemo_rod.selection import ReferenceManifest, References
from nemo_rod.swap_in.blend import LOSS_DEFINITION, Blend
from nemo_rod.swap_in.host_selector import losses_and_mask
from nemo_rod.swap_in.stream import without_identity


def score_blend(
    blend: Blend,
    model: list,
    groups: Any,
    forward_step: Callable,
    *,
    out: Path,
    role: str,
    micro_batch_size: int,
) -> None:
    """Writes a model's losses on all samples of one role. Collective.

    After an interruption, another call in the same layout resumes where it stopped.

    Args:
        blend: the job's training data.
        model: the model's chunks on this rank.
        groups: Megatron's process groups (`tp`, `pp` and `dp`).
        forward_step: the job's own forward step, of an iterator and a chunk of the model.
        out: folder of the references, one per role.
        role: role of the samples, "adaptation" or "replay".
        micro_batch_size: samples in one forward pass of one replica, as in training.

    Raises:
        ValueError: there are no such samples, or the folder holds losses of other data or another
            model.
    """
    start, stop = blend.role_range(role)
    manifest = ReferenceManifest(
        model=model_digest(model, groups),
        tokenizer=blend.tokenizer_fingerprint,
        store=blend.digest,
        block_size=blend.block_size,
        start=start,
        stop=stop,
        precision=str(get_model_config(model[0]).params_dtype).removeprefix("torch."),
        loss=LOSS_DEFINITION,
    )
    if is_complete(out):
        (found,) = References.open([out]).manifests
        if found != manifest:
            raise ValueError(
                f"{out} holds references with {found.difference(manifest)}: name another folder, "
                "or remove it to score again."
            )
        return
    losses = MegatronScorer(
        model,
        blend,
        groups,
        micro_batch_size=micro_batch_size,
        batches=lambda ids, size: map(without_identity, blend.micro_batches(ids, size)),
        forward_step=losses_and_mask(forward_step),
    )
    write_references(losses, blend, out, manifest=manifest, name=f"{role} references")


def model_digest(model: list, groups: Any) -> str:
    """Returns the digest of a model's weights, hex, the same on every rank. Collective.

    Each rank digests its own tensor- and pipeline-parallel shard, so another layout of the same
    weights has another digest.
    """
    state = hashlib.blake2b(digest_size=16)
    for chunk in model:
        for name, weight in unwrap_model(chunk).named_parameters():
            state.update(name.encode())
            state.update(weight.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    mine = (groups.pp.rank(), groups.tp.rank(), state.hexdigest())
    shards: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shards, mine)
    return digest(repr(sorted(set(shards))).encode())
