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

from nemo_rod.hosts.swap_in.job import Facts, Installed, Job, SelectingJob
from nemo_rod.hosts.swap_in.job_references import HostReferenceJob
from nemo_rod.loggers import legal_names, write_scalars


def install(**options: Any) -> Installed:
    """Makes the job of the script's `pretrain(...)` select its samples; see `swap_in.install`.

    Megatron-LM reads its arguments inside `pretrain`. Unsupported ones are refused there, before
    the model is built.
    """
    return _put_into_trainer(_SelectingJob(**options), lambda args: None)


def reference(**options: Any) -> None:
    """Makes the script's `pretrain(...)` write reference losses instead of training, and exit.

    See `swap_in.reference` for the arguments.
    """
    job = HostReferenceJob(**options)

    def after_parsing(args: Any) -> None:
        from megatron.training.checkpointing import checkpoint_exists

        folders = args.pretrained_checkpoint, args.load
        folder = job.model_folder(checkpoint_exists, *folders, setting="'checkpoint' or --load")
        job.load_weights_alone(args, folder)
        args.pretrained_checkpoint = None
        args.no_load_optim = args.no_load_rng = True

    _put_into_trainer(job, after_parsing)


def _put_into_trainer(job: Job, after_parsing: Callable[[Any], None]) -> Installed:
    """Puts a job into the trainer; calls `after_parsing` with the arguments once they are known.

    Raises:
        ValueError: the trainer's functions are not there, or not those that were tested.
    """
    try:
        from megatron.training import training
    except ImportError as error:
        raise ValueError(
            f"Megatron-LM's megatron.training cannot be imported ({error}): run the job's script "
            "from a Megatron-LM checkout, or put the checkout on PYTHONPATH."
        ) from None
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder as Builder,
    )

    initialize = training.initialize_megatron

    def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
        result = initialize(*args, **kwargs)
        refuse(job, training.get_args())
        after_parsing(training.get_args())
        return result

    def facts() -> Facts:
        args = training.get_args()
        size, steps = args.global_batch_size, args.train_iters
        return Facts(size, args.seed, steps, args.eval_interval, args.save, args.load)

    def place(_: dict[str, Any]) -> tuple[int, Any, int]:
        args, groups = training.get_args(), ProcessGroupCollection.use_mpu_process_groups()
        return args.curr_iteration, groups, args.consumed_train_samples

    installed = job.put_into("megatron_lm", training, training, facts, place)
    build, signature = training.build_train_valid_test_datasets, inspect.signature(Builder.__init__)

    def build_on_every_rank(*args: Any, **kwargs: Any) -> tuple:
        reads_here: list[bool] = []  # per builder: whether the job itself builds its data here
        make = Builder.__init__

        def make_on_every_rank(*args: Any, **kwargs: Any) -> None:
            call = signature.bind(*args, **kwargs).arguments
            reads_here.append(bool(call["is_built_on_rank"]()))
            call["is_built_on_rank"] = lambda: True
            make(**call)

        with Installed() as patches:
            patches.replace(Builder, "__init__", make_on_every_rank)
            datasets = build(*args, **kwargs)
        if all(reads_here):
            return datasets
        # several validation sets are a list on every rank
        return tuple([None] * len(each) if isinstance(each, list) else None for each in datasets)

    installed.replace(training, "initialize_megatron", initialize_megatron)
    installed.replace(training, "build_train_valid_test_datasets", build_on_every_rank)
    return installed


class _SelectingJob(SelectingJob):
    def log(self, done: int, metrics: dict[str, float]) -> None:
        """Shows the metrics in TensorBoard and W&B, if the job writes them."""
        from megatron.training import get_tensorboard_writer, get_wandb_writer

        if writer := get_tensorboard_writer():
            write_scalars(writer, metrics, done)
        if wandb := get_wandb_writer():
            wandb.log(legal_names(metrics, "wandb"), done)


def refuse(job: Job, args: Any) -> None:
    """Refuses arguments that selection does not support; see `Job.refuse`."""
    from megatron.training.arguments import core_transformer_config_from_args
    from megatron.training.utils import get_blend_and_blend_per_split

    blends = job.blends(*get_blend_and_blend_per_split(args))
    if getattr(args, "mock_data", False) or not blends:
        raise ValueError(
            "The job names no data, or --mock-data, whose samples have no source: give --data-path "
            "or --train-data-path."
        )
    job.refuse(core_transformer_config_from_args(args), args, {"--": args}, blends=blends)
