"""The host Megatron-LM: swaps the selector into `pretrain(...)` of scripts like `pretrain_gpt.py`.

    megatron.training.training
        .initialize_megatron                  makes the arguments known, so that they are checked
        .get_train_valid_test_num_samples     requests m times the training samples
        .build_train_valid_test_datasets      exposes the job's training data
        .build_pretraining_data_loader        resumes at m times the offset
        .train_step                           its schedule selects first

The names are module globals. Only the first tensor-parallel rank of the first and the last pipeline
stage reads data; the others call the same functions with `data_iterator=None`. Every rank must
know the data, though, so all of them map the dataset's index.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nemo_rod.selection import Policy
from nemo_rod.swap_in.blend import Blend
from nemo_rod.swap_in.job import SelectingJob, check_multiplier
from nemo_rod.swap_in.job_references import score_blend
from nemo_rod.swap_in.megatron_lm_checks import INSTALLED, check_version, refuse
from nemo_rod.swap_in.patches import Installed
from nemo_rod.swap_in.roles import Roles

Arguments = Callable[[Any], None]  # called with Megatron-LM's arguments


def install(
    *,
    roles: Roles,
    references: Sequence[str | Path] = (),
    policy: Policy | None = None,
    multiplier: int = 2,
    out: str | Path | None = None,
) -> Installed:
    """Makes the job that the script's `pretrain(...)` runs choose what it trains on.

    Older versions of Megatron-LM read their arguments inside `pretrain`. Unsupported arguments are
    refused there, before the model is built.

    Args:
        roles: role of each of the job's sources, adaptation or replay; see `roles.py`.
        references: folders of reference losses for all of the job's data, written by `reference`.
        policy: policy that chooses the batch from a pool; `Joint()` by default.
        multiplier: candidates per trained sample (m), a whole number.
        out: folder for `curriculum.rod` and `metrics.jsonl`; by default `rod/` in the folder of
            `--save`, and none if the job saves nothing.

    Returns:
        A handle that can `uninstall()`; also a context manager.

    Raises:
        ValueError: the version is not supported, or the multiplier or references cannot be used.
    """
    from megatron.training import get_args

    check_version()
    job = SelectingJob(
        references=references,
        policy=policy,
        multiplier=multiplier,
        out=None if out is None else Path(out),
        log=_log,
    )

    def parsed(args: Any) -> None:
        refuse(args, roles)
        if job.out is None and args.save is not None:
            job.out = Path(args.save) / "rod"

    def ready(blend: Blend) -> None:
        args = get_args()
        job.ready(blend, batch_size=args.global_batch_size, seed=args.seed)

    installed = Installed()
    _watch_arguments(installed, parsed)
    _show_data(installed, roles, multiplier, ready)
    _select(installed, job)
    return installed


def reference(
    *,
    role: str,
    out: str | Path,
    roles: Roles,
    multiplier: int = 2,
    checkpoint: str | Path | None = None,
) -> Installed:
    """Makes the script's `pretrain(...)` write reference losses instead of training, and exit.

    The arguments stay those of the job that will select. The job's own code builds the data, builds
    the model in the job's layout and loads only its weights; nothing is saved.

    Args:
        role: "adaptation", for the specialist, or "replay", for the model that training starts
            from.
        out: folder of the references, one per role.
        roles: roles of the sources, as for `install`.
        multiplier: candidates per trained sample, as for `install`.
        checkpoint: folder of the reference model's checkpoints, in the job's format; by default
            that of `--pretrained-checkpoint`, or else of `--load`.

    Returns:
        A handle that can `uninstall()`; also a context manager.

    Raises:
        ValueError: the version is not supported, or the multiplier cannot be used.
    """
    from megatron.training import training

    check_version()
    check_multiplier(multiplier)
    blends: list[Blend] = []

    def parsed(args: Any) -> None:
        refuse(args, roles)
        _load_weights_alone(args, checkpoint)

    def score_instead(forward_step_func: Callable, model: list, *_: Any, **__: Any) -> None:
        score_blend(
            blends[0],
            model,
            _groups(),
            forward_step_func,
            out=Path(out),
            role=role,
            micro_batch_size=training.get_args().micro_batch_size,
        )
        dist.barrier()
        raise SystemExit(0)

    installed = Installed()
    _watch_arguments(installed, parsed)
    _show_data(installed, roles, multiplier, blends.append)
    installed.replace(training, "train", score_instead)
    return installed


def _watch_arguments(installed: Installed, parsed: Arguments) -> None:
    from megatron.training import get_args, training

    initialize = training.initialize_megatron

    def initialized(*args: Any, **kwargs: Any) -> Any:
        result = initialize(*args, **kwargs)
        parsed(get_args())
        return result

    installed.replace(training, "initialize_megatron", initialized)


def _load_weights_alone(args: Any, checkpoint: str | Path | None) -> None:
    from megatron.training.checkpointing import checkpoint_exists

    folder = checkpoint or args.pretrained_checkpoint or args.load
    if folder is None or not checkpoint_exists(str(folder)):
        raise ValueError(
            f"There is no checkpoint in {folder}, so there is no reference model: expected a "
            "folder that this job, or its specialist, has saved; set 'checkpoint' or --load."
        )
    args.load, args.pretrained_checkpoint, args.save = str(folder), None, None
    args.finetune = args.no_load_optim = args.no_load_rng = True


def _show_data(
    installed: Installed, roles: Roles, multiplier: int, built: Callable[[Blend], None]
) -> None:
    """Gives the job m times the training samples, and passes their blend to `built`.

    With virtual pipeline stages the trainer builds the same data once per stage.
    """
    from megatron.training import get_args, training

    count = training.get_train_valid_test_num_samples
    build = training.build_train_valid_test_datasets
    load = training.build_pretraining_data_loader
    train_sets: list[Any] = []

    def more_samples() -> tuple[int, int, int]:
        train, valid, test = count()
        return train * multiplier, valid, test

    def shown(*args: Any, **kwargs: Any) -> tuple:
        with _built_on_every_rank() as wanted:
            datasets = build(*args, **kwargs)
        train = datasets[0]
        if train is None:
            raise ValueError(
                "The job's dataset provider made no training data on some ranks: expected one "
                "that uses megatron-core's BlendedMegatronDatasetBuilder and is called on every "
                "rank (provider.is_distributed = True), as that of pretrain_gpt.py is."
            )
        in_order = get_args().dataloader_type == "single"  # else it draws from all samples
        num_samples = more_samples()[0] if in_order else len(train)
        built(Blend(train, roles, num_samples=num_samples))
        if not all(wanted):
            return (None,) * len(datasets)
        train_sets.append(train)
        return datasets

    def resumed(dataset: Any, consumed_samples: int, **options: Any) -> Any:
        if any(dataset is train for train in train_sets):
            consumed_samples *= multiplier
        return load(dataset, consumed_samples, **options)

    installed.replace(training, "get_train_valid_test_num_samples", more_samples)
    installed.replace(training, "build_train_valid_test_datasets", shown)
    installed.replace(training, "build_pretraining_data_loader", resumed)


@contextmanager
def _built_on_every_rank() -> Iterator[list[bool]]:
    """Makes megatron-core's builder also build on ranks that do not read data.

    Yields:
        A list that receives, per builder, whether the job wanted to build on this rank.
    """
    from megatron.core.datasets import blended_megatron_dataset_builder as core

    make = core.BlendedMegatronDatasetBuilder.__init__
    signature = inspect.signature(make)
    wanted: list[bool] = []

    def make_everywhere(*args: Any, **kwargs: Any) -> None:
        call = signature.bind(*args, **kwargs).arguments
        wanted.append(bool(call["is_built_on_rank"]()))
        call["is_built_on_rank"] = lambda: True
        make(**call)

    with Installed() as installed:
        installed.replace(core.BlendedMegatronDatasetBuilder, "__init__", make_everywhere)
        yield wanted


def _select(installed: Installed, job: SelectingJob) -> None:
    """Makes every training step select before it runs forward-backward."""
    from megatron.training import get_args, training

    train_step = training.train_step
    signature = inspect.signature(train_step)

    def rod_train_step(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs).arguments
        call["forward_backward_func"] = job.around(
            call["forward_backward_func"], step=get_args().curr_iteration, groups=_groups()
        )
        return train_step(**call)

    setattr(rod_train_step, INSTALLED, True)
    installed.replace(training, "train_step", rod_train_step)


def _groups() -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection

    return ProcessGroupCollection.use_mpu_process_groups()


def _log(step: int, metrics: dict[str, float]) -> None:
    """Shows the metrics in TensorBoard and W&B, if the job writes them."""
    from megatron.training import get_tensorboard_writer, get_wandb_writer

    done = step + 1  # as the trainer counts what it logs
    if writer := get_tensorboard_writer():
        for name, value in metrics.items():
            writer.add_scalar(name, value, done)
    if wandb := get_wandb_writer():
        wandb.log(metrics, done)
