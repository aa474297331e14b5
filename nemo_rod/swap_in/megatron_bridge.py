"""The host Megatron-Bridge: around its `pretrain(cfg, forward_step)`.

    megatron.bridge.training.train.train_step                 its schedule selects first
    megatron.bridge.data.loaders
        .get_train_valid_test_num_samples                     m times the training samples
        .build_train_valid_test_datasets                      shows the job's training data
        .build_pretraining_data_loader                        resumes m times as far in them

The names are module globals, the same in 0.3.1 and on main. Arguments are bound by name, as their
order differs between versions.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from nemo_rod.megatron.forward_only import refuse_unsafe
from nemo_rod.selection import Choice, Joint, Policy, References
from nemo_rod.swap_in.blend import Blend
from nemo_rod.swap_in.patches import Installed
from nemo_rod.swap_in.record import ChoiceRecord
from nemo_rod.swap_in.roles import Roles, assign_roles
from nemo_rod.swap_in.score import score_blend
from nemo_rod.swap_in.selector import StreamSelector

_MARK = "_nemo_rod"
# Functions that are replaced, and the parameters that are asked of them.
_BINDINGS = {
    "training.train": {
        "train_step": {"forward_backward_func", "global_state", "pg_collection", "data_iterator"}
    },
    "data.loaders": {
        "get_train_valid_test_num_samples": {"cfg"},
        "build_train_valid_test_datasets": {"cfg"},
        "build_pretraining_data_loader": {"dataset", "consumed_samples"},
    },
}


def install(
    cfg: Any,
    *,
    roles: Roles,
    references: Sequence[str | Path] = (),
    policy: Policy | None = None,
    multiplier: int = 2,
    out: str | Path | None = None,
) -> Installed:
    """Lets the job that `pretrain(cfg, ...)` runs choose what it trains on.

    Args:
        cfg: the job's ConfigContainer.
        roles: which of the job's sources are adaptation, which replay; see `roles.py`.
        references: folders of reference losses that cover the job's data, as `score` writes them.
        policy: how the batch is chosen from a pool; `Joint()` by default.
        multiplier: candidates per trained sample (m), a whole number.
        out: folder for `curriculum.rod` and `metrics.jsonl`; by default `rod/` where the job saves
            its checkpoints, and nowhere if it saves none.

    Returns:
        A handle that can `uninstall()`; also a context manager.

    Raises:
        ValueError: a version or a feature that is not supported; roles or references that do not
            fit the job.
    """
    policy = Joint() if policy is None else policy
    _check_host()
    refuse(cfg, roles, multiplier)
    if policy.needs_scores and not references:
        raise ValueError(
            f"{type(policy).__name__} chooses by reducible loss: give the folders of reference "
            "losses as 'references', or policy=TakeAll() with multiplier=1."
        )
    if references:
        References.open(references)  # what is missing or damaged shows before the job starts
    if out is None and cfg.checkpoint.save is not None:
        out = Path(cfg.checkpoint.save) / "rod"
    job = _Job(
        cfg,
        roles=roles,
        references=references,
        policy=policy,
        multiplier=multiplier,
        out=None if out is None else Path(out),
    )
    return job.install()


def score(
    cfg: Any,
    forward_step: Callable,
    *,
    role: str,
    out: str | Path,
    roles: Roles,
    multiplier: int = 2,
    checkpoint: str | Path | None = None,
) -> None:
    """Writes a checkpoint's losses on all samples of one role that the job may draw.

    The job's own `setup` builds the data, makes the model in the job's layout and loads it.

    Args:
        cfg: the ConfigContainer of the job that will select; it is not changed.
        forward_step: the job's own.
        role: "adaptation", for the specialist, or "replay", for the model that training starts
            from.
        out: folder of the references; one per role.
        roles: as for `install`.
        multiplier: as for `install`: the job draws that many times as much.
        checkpoint: folder of the reference model's checkpoints, in the job's format; by default
            what `cfg.checkpoint` says, where `pretrained_checkpoint` goes before `load`.

    Raises:
        ValueError: there is no such checkpoint, or the job is one that selection refuses.
    """
    from megatron.bridge.data.utils import get_dataset_provider
    from megatron.bridge.training.config import runtime_config_update
    from megatron.bridge.training.initialize import destroy_global_state
    from megatron.bridge.training.setup import setup
    from megatron.bridge.training.state import GlobalState
    from megatron.bridge.training.utils.train_utils import prepare_forward_step_func

    _check_host()
    refuse(cfg, roles, multiplier)
    cfg = _for_scoring(cfg, checkpoint)
    blends: list[Blend] = []
    state = GlobalState()
    began_here = not dist.is_initialized()
    with Installed() as installed:
        _TrainData(cfg, roles, multiplier, blends.append).install(installed)
        runtime_config_update(cfg)
        state.cfg = cfg
        ready = setup(state, get_dataset_provider(cfg.dataset))
    score_blend(
        blends[0],
        ready.model,
        ready.pg_collection,
        prepare_forward_step_func(forward_step, state),
        out=Path(out),
        role=role,
        micro_batch_size=cfg.train.micro_batch_size,
    )
    destroy_global_state()
    if began_here:
        dist.destroy_process_group()


def _for_scoring(cfg: Any, checkpoint: str | Path | None) -> Any:
    """A copy of the job's configuration that loads weights alone and saves nothing."""
    from megatron.bridge.training.checkpointing import checkpoint_exists

    cfg = copy.deepcopy(cfg)
    folder = checkpoint or cfg.checkpoint.pretrained_checkpoint or cfg.checkpoint.load
    if folder is None or not checkpoint_exists(str(folder)):
        raise ValueError(
            f"There is no checkpoint in {folder}, so there is no reference model: expected a "
            "folder that this job, or its specialist, has saved; set 'checkpoint'."
        )
    cfg.checkpoint.load, cfg.checkpoint.pretrained_checkpoint = str(folder), None
    cfg.checkpoint.finetune, cfg.checkpoint.save = True, None  # weights alone; begins at step 0
    cfg.dataset.num_workers, cfg.dataset.persistent_workers = 0, False
    return cfg


def refuse(cfg: Any, roles: Roles, multiplier: int) -> None:
    """Refuses jobs that selection does not work in, before anything starts.

    Raises:
        ValueError: naming the key, why it is refused and what to set.
    """
    if not isinstance(multiplier, int) or multiplier < 1:
        raise ValueError(
            f"multiplier={multiplier!r} is not valid: expected a whole number >= 1, as a job's "
            "iterators give whole micro-batches."
        )
    refuse_unsafe(cfg.model, cfg.ddp)
    data, train = cfg.dataset, cfg.train
    packed = getattr(data, "packed_sequence_specs", None) is not None
    for found, key, why, instead in (
        (getattr(cfg.dist, "use_megatron_fsdp", False), "dist.use_megatron_fsdp=True",
         "is not supported yet", "dist.use_megatron_fsdp=False"),
        (getattr(cfg.dist, "use_torch_fsdp2", False), "dist.use_torch_fsdp2=True",
         "is not supported yet", "dist.use_torch_fsdp2=False"),
        (packed or data.dataloader_type == "batch", "batches of packed or variable length",
         "gives samples of many lengths", "a GPTDatasetConfig with dataloader_type='single'"),
        (data.dataloader_type == "external", "dataset.dataloader_type='external'",
         "leaves resuming to the job", "dataloader_type='single'"),
        (train.rampup_batch_size is not None, "train.rampup_batch_size",
         "changes the size of the pools", "train.rampup_batch_size=None"),
        (bool(train.iterations_to_skip), "train.iterations_to_skip",
         "skips another number of samples than a step draws", "train.iterations_to_skip=[]"),
    ):  # fmt: skip
        if found:
            raise ValueError(f"Selection does not work with {key}: it {why}; set {instead}.")
    assign_roles(_prefixes(data), roles)
    if data.sequence_length % 8:
        raise ValueError(
            f"dataset.sequence_length={data.sequence_length}: expected a multiple of 8, for the 8 "
            "partial sums of each sample's loss."
        )


def _check_host() -> None:
    """Refuses a Megatron-Bridge in which the names to replace are not what they were."""
    from megatron.bridge.package_info import __version__
    from megatron.bridge.training import train

    if hasattr(train.train_step, _MARK):
        raise ValueError("A selector is installed already: uninstall() it before the next one.")
    for module, functions in _BINDINGS.items():
        home = importlib.import_module(f"megatron.bridge.{module}")
        for name, wanted in functions.items():
            function = getattr(home, name, None)
            found = set(inspect.signature(function).parameters) if callable(function) else set()
            if missing := sorted(wanted - found):
                raise ValueError(
                    f"Megatron-Bridge {__version__} has no {module}.{name} with "
                    f"{', '.join(missing)}: expected 0.3.1 or one that is like it there; install a "
                    "supported version, or a newer nemo_rod."
                )


def _prefixes(data: Any) -> list[str]:
    """Paths of the `.bin/.idx` files that the job trains on, in the blend's order."""
    blend = getattr(data, "blend", None)
    per_split = getattr(data, "blend_per_split", None)
    if blend is None and per_split is not None:
        blend = per_split[0]
    if blend is None:
        raise ValueError(
            f"The job's data is a {type(data).__name__} without a blend of files: expected a "
            "GPTDatasetConfig with 'blend' or 'blend_per_split'."
        )
    return list(blend[0])


class _TrainData:
    """The job's training data: m times as much of it, and known as a blend once it is built.

    Args:
        cfg: the job's ConfigContainer.
        roles: see `roles.py`.
        multiplier: candidates per trained sample (m).
        built: called with the blend, before training starts.
    """

    def __init__(
        self, cfg: Any, roles: Roles, multiplier: int, built: Callable[[Blend], None]
    ) -> None:
        self.cfg, self.roles, self.multiplier, self.built = cfg, roles, multiplier, built
        self.datasets: list[Any] = []  # one per virtual pipeline stage, all alike

    def install(self, installed: Installed) -> None:
        from megatron.bridge.data import loaders

        count, build = (
            loaders.get_train_valid_test_num_samples,
            loaders.build_train_valid_test_datasets,
        )
        load = loaders.build_pretraining_data_loader
        load_signature = inspect.signature(load)

        def more_samples(cfg: Any) -> tuple[int, int, int]:
            train, valid, test = count(cfg)
            return train * self.multiplier, valid, test

        def shown(*args: Any, **kwargs: Any) -> tuple:
            train, valid, test = build(*args, **kwargs)
            self._see(train, more_samples(self.cfg)[0])
            return train, valid, test

        def resumed(*args: Any, **kwargs: Any) -> Any:
            call = load_signature.bind(*args, **kwargs).arguments
            if any(call["dataset"] is dataset for dataset in self.datasets):
                call["consumed_samples"] *= self.multiplier
            return load(**call)

        installed.replace(loaders, "get_train_valid_test_num_samples", more_samples)
        installed.replace(loaders, "build_train_valid_test_datasets", shown)
        installed.replace(loaders, "build_pretraining_data_loader", resumed)

    def _see(self, dataset: Any, num_samples: int) -> None:
        first, self.datasets = not self.datasets, [*self.datasets, dataset]
        if not first:
            return
        # precision and overlap settings reach the model's configuration only when the job starts
        refuse(self.cfg, self.roles, self.multiplier)
        if self.cfg.dataset.dataloader_type == "cyclic":  # draws from all that there is
            num_samples = len(dataset)
        self.built(Blend(dataset, self.roles, num_samples=num_samples))


class _Job:
    """One job with the selector in it; the arguments are those of `install`."""

    def __init__(
        self,
        cfg: Any,
        *,
        roles: Roles,
        references: Sequence[str | Path],
        policy: Policy,
        multiplier: int,
        out: Path | None,
    ) -> None:
        self.cfg, self.policy, self.out = cfg, policy, out
        self.references, self.multiplier = references, multiplier
        self.data = _TrainData(cfg, roles, multiplier, self.ready)
        self.selector: StreamSelector | None = None
        self.record: ChoiceRecord | None = None
        self.state: Any = None  # the trainer's GlobalState, once it trains

    def install(self) -> Installed:
        from megatron.bridge.training import train

        installed = Installed()
        self.data.install(installed)
        installed.replace(train, "train_step", self.selecting(train.train_step))
        return installed

    def ready(self, blend: Blend) -> None:
        """Makes the selector, now that the job's data is known."""
        references = References.open(self.references, blend) if self.references else None
        self.record = ChoiceRecord(
            self.out,
            blend=blend,
            references=references,
            policy=self.policy,
            num_chosen=self.cfg.train.global_batch_size,
            multiplier=self.multiplier,
            seed=self.cfg.dataset.random_seed,
        )
        self.selector = StreamSelector(
            blend=blend,
            policy=self.policy,
            multiplier=self.multiplier,
            references=references,
            record=self.note,
        )

    def selecting(self, train_step: Callable) -> Callable:
        """The trainer's `train_step`, whose schedule selects first."""
        signature = inspect.signature(train_step)

        def rod_train_step(*args: Any, **kwargs: Any) -> Any:
            call = signature.bind(*args, **kwargs).arguments
            assert self.selector is not None and self.record is not None
            if self.state is not call["global_state"]:
                self.state = call["global_state"]
                self.record.begin(self.state.train_state.step)
            call["forward_backward_func"] = self.selector.around(
                call["forward_backward_func"],
                step=self.state.train_state.step,
                groups=call["pg_collection"],
            )
            return train_step(**call)

        setattr(rod_train_step, _MARK, True)
        return rod_train_step

    def note(self, choice: Choice, source_C: np.ndarray) -> None:
        """Records a choice, and shows its figures where the trainer shows its own."""
        assert self.record is not None
        metrics = {k: v for k, v in self.record(choice, source_C).items() if v is not None}
        done = choice.pool.step + 1  # as the trainer counts what it logs
        if metrics and (writer := self.state.tensorboard_logger):
            for name, value in metrics.items():
                writer.add_scalar(name, value, done)
        if metrics and (wandb := self.state.wandb_logger):
            wandb.log(metrics, done)
