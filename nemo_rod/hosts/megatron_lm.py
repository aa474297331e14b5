"""The host Megatron-LM: swaps the selector into `pretrain(...)` of scripts like `pretrain_gpt.py`.

    megatron.training.training
        .initialize_megatron                  makes the arguments known, so that they are checked
        .get_train_valid_test_num_samples     requests m times the training samples
        .build_train_valid_test_datasets      exposes the job's training data
        .train_step                           its schedule selects first

The names are module globals. Only the first tensor-parallel rank of the first and the last pipeline
stage reads data; the others call the same functions with `data_iterator=None`. Every rank must
know the data, though, so all of them map the dataset's index.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection

from nemo_rod.hosts.logger_runs import write_scalars
from nemo_rod.hosts.swap_in.job import (
    Installed,
    Job,
    SelectingJob,
    check_host,
    refuse_job,
    train_blend,
)
from nemo_rod.hosts.swap_in.job_references import HostReferenceJob
from nemo_rod.hosts.swap_in.roles import Roles
from nemo_rod.megatron.scoring.forward_only import refuse_unsafe


def install(**options: Any) -> Installed:
    """Makes the job of the script's `pretrain(...)` select its training samples.

    Older versions of Megatron-LM read their arguments inside `pretrain`. Unsupported arguments are
    refused there, before the model is built.

    Args:
        options: see `nemo_rod.hosts.swap_in.install`.
    """
    training = _training()
    job = _SelectingJob(**options)
    return _installed(training, job, lambda args: job.write_to(args.save))


def reference(**options: Any) -> None:
    """Makes the script's `pretrain(...)` write reference losses instead of training, and exit.

    Args:
        options: see `nemo_rod.hosts.swap_in.reference`.
    """
    training = _training()
    from megatron.training.checkpointing import checkpoint_exists

    job = HostReferenceJob(**options)

    def parsed(args: Any) -> None:
        folders = args.pretrained_checkpoint, args.load
        folder = job.model_folder(checkpoint_exists, *folders, setting="'checkpoint' or --load")
        job.load_weights_alone(args, folder)
        args.pretrained_checkpoint = None
        args.no_load_optim = args.no_load_rng = True

    _installed(training, job, parsed)


def _training() -> Any:
    """Imports Megatron-LM's `training` module and checks its functions; raises a ValueError."""
    try:
        from megatron.training import training
    except ImportError as error:
        raise ValueError(
            f"Megatron-LM's megatron.training cannot be imported ({error}): run the job's script "
            "from a Megatron-LM checkout, or put the checkout on PYTHONPATH."
        ) from None
    check_host("megatron_lm", training.train_step)
    return training


def _installed(training: Any, job: Job, parsed: Callable[[Any], None]) -> Installed:
    """Calls `parsed` with the arguments once they are known, and puts the job into the trainer."""
    from megatron.core.datasets import blended_megatron_dataset_builder as core

    initialize = training.initialize_megatron

    def initialized(*args: Any, **kwargs: Any) -> Any:
        result = initialize(*args, **kwargs)
        refuse(training.get_args(), job.roles)
        parsed(training.get_args())
        return result

    def facts() -> dict[str, Any]:
        args = training.get_args()
        return {
            "batch_size": args.global_batch_size,
            "seed": args.seed,
            "steps": args.train_iters,
            "every": args.eval_interval,
        }

    def place(_: dict[str, Any]) -> tuple[int, Any, int]:
        args, groups = training.get_args(), ProcessGroupCollection.use_mpu_process_groups()
        return args.curr_iteration, groups, args.consumed_train_samples

    installed = Installed()
    installed.replace(training, "initialize_megatron", initialized)
    installed.replace(training, "train_step", job.selecting(training.train_step, place))
    job.watch_data(installed, training, facts)
    build = training.build_train_valid_test_datasets
    make = core.BlendedMegatronDatasetBuilder.__init__
    signature = inspect.signature(make)

    def build_on_every_rank(*args: Any, **kwargs: Any) -> tuple:
        reads_here: list[bool] = []  # by builder: whether the job itself builds its data here

        def make_on_every_rank(*args: Any, **kwargs: Any) -> None:
            call = signature.bind(*args, **kwargs).arguments
            reads_here.append(bool(call["is_built_on_rank"]()))
            call["is_built_on_rank"] = lambda: True
            make(**call)

        with Installed() as patches:
            patches.replace(core.BlendedMegatronDatasetBuilder, "__init__", make_on_every_rank)
            datasets = build(*args, **kwargs)
        return datasets if all(reads_here) else (None,) * len(datasets)

    installed.replace(training, "build_train_valid_test_datasets", build_on_every_rank)
    return installed


class _SelectingJob(SelectingJob):
    def log(self, done: int, metrics: dict[str, float]) -> None:
        """Shows the metrics in TensorBoard and W&B, if the job writes them."""
        from megatron.training import get_tensorboard_writer, get_wandb_writer

        if writer := get_tensorboard_writer():
            write_scalars(writer, metrics, done)
        if wandb := get_wandb_writer():
            wandb.log(metrics, done)


def refuse(args: Any, roles: Roles) -> None:
    """Refuses jobs that selection does not support, before the model is built.

    Raises:
        ValueError: the job is not supported; the message names the argument, the reason and the
            cure.
    """
    from megatron.training.arguments import core_transformer_config_from_args
    from megatron.training.utils import get_blend_and_blend_per_split

    blend = train_blend(*get_blend_and_blend_per_split(args))
    if getattr(args, "mock_data", False) or blend is None:
        raise ValueError(
            "The job names no data, or --mock-data, whose samples have no source: give --data-path "
            "or --train-data-path."
        )
    refuse_job({"--": args}, blend=blend, roles=roles)
    refuse_unsafe(core_transformer_config_from_args(args), args)
