"""Reference losses of a job's own data, computed with a model that the job itself has loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model

from nemo_rod.files import digest, read_json
from nemo_rod.hosts.swap_in.job import Job, precision_of, say_last
from nemo_rod.megatron.whole_checkpoints import TRACKER
from nemo_rod.ranks import from_recorder
from nemo_rod.selection.references.folder import holds, role_manifest
from nemo_rod.selection.references.reference_pass import write_references

# of a manifest: references of a block store have other targets
LOSS_DEFINITION = "mean next-token loss of the sample's targets under its loss mask, nats, fp32"


def refuse_unreadable(folder: Path) -> None:
    """Refuses a folder of checkpoints that Megatron-Bridge would not load, before a model is built.

    Raises:
        ValueError: what names the latest checkpoint is damaged, or a checkpoint of Megatron-LM is
            in another format than `torch_dist`.
    """
    tracker, state, place = folder / TRACKER, folder / "latest_train_state.pt", folder
    saved = sorted(path.name for path in folder.glob("iter_*"))
    cure = f"expected {TRACKER} to have the number of one of {', '.join(saved) or 'no checkpoint'}"
    if state.is_file() and not is_zipfile(state):
        raise ValueError(f"{state} is damaged: copy train_state.pt of one of {', '.join(saved)}.")
    if tracker.is_file():
        named = tracker.read_bytes().strip().decode("ascii", "replace")
        place = folder / (f"iter_{int(named):07d}" if named.isdecimal() else named or "-")
        if named != "release" and not (named.isdecimal() and place.is_dir()):
            raise ValueError(f"{tracker} names the checkpoint {named[:40]!r}: {cure}.")
    metadata, format = place / "metadata.json", "torch"
    if metadata.is_file():
        format = read_json(metadata, "sharded_backend")["sharded_backend"]
    elif not any(place.glob("mp_rank_*")):
        return
    if format != "torch_dist":
        raise ValueError(
            f"{place} is in Megatron's format {format}, which Megatron-Bridge does not load: "
            "convert it by Megatron-LM's --ckpt-convert-format torch_dist."
        )


class ReferencesWritten(SystemExit):
    """Ends a job, with exit status 0, when all samples have their loss."""


class HostReferenceJob(Job):
    """A job that scores instead of training; `swap_in.reference` describes its options."""

    out: Path

    def __init__(self, *, role: str, checkpoint: str | Path | None = None, **data: Any) -> None:
        super().__init__(**data)
        self.role, self.checkpoint = role, checkpoint

    def model_folder(
        self, exists: Callable[[str], bool], *others: Any, setting: str = "'checkpoint'"
    ) -> str:
        """Returns the folder of the reference model's checkpoint.

        Args:
            exists: the host's function that returns whether a folder has a checkpoint.
            others: folders that the job names, used in this order if `checkpoint` is not set.
            setting: the setting that the error names.

        Raises:
            ValueError: there is no such checkpoint.
        """
        folder = next(filter(None, (self.checkpoint, *others)), None)
        if folder is None or not exists(str(folder)):
            raise ValueError(
                f"There is no checkpoint in {folder}, so there is no reference model: expected a "
                f"folder that this job, or its specialist, has saved; set {setting}."
            )
        return str(folder)

    def load_weights_alone(self, settings: Any, folder: str | None) -> None:
        """Sets a job to start from the weights of a folder instead of its own checkpoint.

        Args:
            settings: the section, or arguments, of checkpoints, whose names all hosts share.
            folder: folder of the checkpoints; None if another setting names it.
        """
        settings.load, settings.finetune, settings.save = folder, True, None
        for name in ("ckpt_step", "non_persistent_ckpt_type", "non_persistent_save_interval"):
            if hasattr(settings, name):
                setattr(settings, name, None)

    def around(self, schedule: Any, optimizer: Any, step: int, groups: Any, _: Any) -> Callable:
        """Returns a replacement for the first step that writes the losses and ends the job."""

        def write_and_end(**options: Any) -> None:
            names = ("model", "forward_step_func", "micro_batch_size")
            self.write(groups=groups, **{name: options[name] for name in names})
            dist.barrier()
            raise ReferencesWritten(0)

        return write_and_end

    def write(self, *, model: list, groups: Any, **call: Any) -> None:
        """Writes a model's losses on all samples of the role. Collective.

        After an interruption, another call in the same layout resumes. See `JobData.scorer` for the
        arguments.

        Raises:
            ValueError: there are no such samples, or the folder holds losses of other data or
                another model.
        """
        manifest = role_manifest(
            self.data,
            self.role,
            model=model_digest(model, groups),
            lengths=[self.data.block_size],
            precision=precision_of(model),
        )
        manifest = replace(manifest, loss=LOSS_DEFINITION)
        if not holds(self.out, manifest):
            scorer = self.data.scorer(model, groups, **call)
            write_references(
                scorer,
                self.out,
                manifest=manifest,
                name=f"{self.role} references",
                agree=from_recorder,
            )
        if dist.get_rank() == 0:
            count = manifest.stop - manifest.start
            say_last(f"{self.out} has the {self.role} references of {count:,} samples.")


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
