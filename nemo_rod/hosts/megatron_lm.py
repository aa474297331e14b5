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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from nemo_rod.hosts.swap_in.job import INSTALLED, Job, SelectingJob
from nemo_rod.hosts.swap_in.job_references import HostReferenceJob
from nemo_rod.hosts.swap_in.patches import Installed
from nemo_rod.hosts.swap_in.roles import Roles, assign_roles
from nemo_rod.megatron.scoring.forward_only import refuse_unsafe
from nemo_rod.upstream.functions import check

Arguments = Callable[[Any], None]  # called with Megatron-LM's arguments


def install(**options: Any) -> Installed:
    """Makes the job that the script's `pretrain(...)` runs choose what it trains on.

    Older versions of Megatron-LM read their arguments inside `pretrain`. Unsupported arguments are
    refused there, before the model is built.

    Args:
        options: see `nemo_rod.hosts.swap_in.install`.
    """
    check_version()
    from megatron.training import get_args, training

    job = _SelectingJob(**options)

    def parsed(args: Any) -> None:
        refuse(args, job.roles)
        if job.out is None and args.save is not None:
            job.out = Path(args.save) / "rod"

    def place(_: dict[str, Any]) -> tuple[int, Any]:
        return get_args().curr_iteration, ProcessGroupCollection.use_mpu_process_groups()

    installed = Installed()
    _watch_arguments(installed, parsed)
    _show_data(installed, job)
    installed.replace(training, "train_step", job.selecting(training.train_step, place))
    return installed


def reference(**options: Any) -> None:
    """Makes the script's `pretrain(...)` write reference losses instead of training, and exit.

    Args:
        options: see `nemo_rod.hosts.swap_in.reference`.
    """
    check_version()
    from megatron.training import training

    job = HostReferenceJob(**options)

    def parsed(args: Any) -> None:
        refuse(args, job.roles)
        _load_weights_alone(args, job)

    def score_instead(forward_step_func: Callable, model: list, *_: Any, **__: Any) -> None:
        job.write(
            model,
            ProcessGroupCollection.use_mpu_process_groups(),
            forward_step_func,
            micro_batch_size=training.get_args().micro_batch_size,
        )
        dist.barrier()
        raise SystemExit(0)

    installed = Installed()
    _watch_arguments(installed, parsed)
    _show_data(installed, job)
    installed.replace(training, "train", score_instead)


def _watch_arguments(installed: Installed, parsed: Arguments) -> None:
    from megatron.training import get_args, training

    initialize = training.initialize_megatron

    def initialized(*args: Any, **kwargs: Any) -> Any:
        result = initialize(*args, **kwargs)
        parsed(get_args())
        return result

    installed.replace(training, "initialize_megatron", initialized)


def _load_weights_alone(args: Any, job: HostReferenceJob) -> None:
    from megatron.training.checkpointing import checkpoint_exists

    folder = job.model_folder(
        checkpoint_exists, args.pretrained_checkpoint, args.load, setting="'checkpoint' or --load"
    )
    args.load, args.pretrained_checkpoint, args.save = folder, None, None
    args.finetune = args.no_load_optim = args.no_load_rng = True


def _show_data(installed: Installed, job: Job) -> None:
    """Gives the job m times the training samples, and passes the dataset on.

    With virtual pipeline stages the trainer builds the same data once per stage.
    """
    from megatron.training import get_args, training

    count = training.get_train_valid_test_num_samples
    build = training.build_train_valid_test_datasets
    load = training.build_pretraining_data_loader

    def more_samples() -> tuple[int, int, int]:
        train, valid, test = count()
        return job.candidates(train), valid, test

    def shown(*args: Any, **kwargs: Any) -> tuple:
        with _built_on_every_rank() as wanted:
            datasets = build(*args, **kwargs)
        if datasets[0] is None:
            raise ValueError(
                "The job's dataset provider made no training data on some ranks: expected one "
                "that uses megatron-core's BlendedMegatronDatasetBuilder and is called on every "
                "rank (provider.is_distributed = True), as that of pretrain_gpt.py is."
            )
        given = get_args()
        job.built(
            datasets[0],
            num_drawn=more_samples()[0],
            dataloader_type=given.dataloader_type,
            batch_size=given.global_batch_size,
            seed=given.seed,
        )
        return datasets if all(wanted) else (None,) * len(datasets)

    def resumed(dataset: Any, consumed_samples: int, **options: Any) -> Any:
        return load(dataset, job.resumes_at(dataset, consumed_samples), **options)

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


class _SelectingJob(SelectingJob):
    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Shows the metrics in TensorBoard and W&B, if the job writes them."""
        from megatron.training import get_tensorboard_writer, get_wandb_writer

        done = step + 1  # as the trainer counts what it logs
        if writer := get_tensorboard_writer():
            for name, value in metrics.items():
                writer.add_scalar(name, value, done)
        if wandb := get_wandb_writer():
            wandb.log(metrics, done)


def check_version() -> None:
    """Refuses a Megatron-LM whose functions to replace differ from the tested ones.

    Raises:
        ValueError: a function differs or is missing, or a selector is already installed.
    """
    try:
        from megatron.training import training
    except ImportError as error:
        raise ValueError(
            f"Megatron-LM's megatron.training cannot be imported ({error}): run the job's script "
            "from a Megatron-LM checkout, or put the checkout on PYTHONPATH."
        ) from None

    if hasattr(training.train_step, INSTALLED):
        raise ValueError("A selector is installed already: uninstall() it before the next one.")
    check("scoring", "swap_in/megatron_lm")


def refuse(args: Any, roles: Roles) -> None:
    """Refuses jobs that selection does not support, before the model is built.

    Raises:
        ValueError: the job is not supported; the message names the argument, why it is refused and
            what to do.
    """
    from megatron.training.arguments import core_transformer_config_from_args
    from megatron.training.utils import get_blend_and_blend_per_split

    for name, why, instead in (
        ("use_megatron_fsdp", "is not supported yet", "leave it out"),
        ("use_torch_fsdp2", "is not supported yet", "leave it out"),
        ("sft", "packs samples of many lengths into a row", "leave it out"),
        ("dataloader_inter_document_masking", "packs documents into a row", "leave it out"),
        ("hybrid_context_parallel", "gives samples of many lengths", "leave it out"),
        ("fim_data", "would need references of samples that are made anew", "leave it out"),
        ("mock_data", "makes samples of no source", "give --data-path"),
        ("perform_rl_step", "trains on rollouts", "leave it out"),
        ("rampup_batch_size", "changes the size of the pools", "leave it out"),
        ("step_batch_size_schedule", "changes the size of the pools", "leave it out"),
        ("decrease_batch_size_if_needed", "changes the size of the pools", "leave it out"),
        ("iterations_to_skip", "skips another number of samples than a step draws", "leave it out"),
        ("phase_transition_iterations", "resumes at samples that were not counted", "leave it out"),
    ):
        if getattr(args, name, None):
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"Selection does not work with {flag}: it {why}; {instead}.")
    if args.dataloader_type == "external":
        raise ValueError(
            "Selection does not work with --dataloader-type external: it leaves it to the job "
            "where it resumes; use single."
        )
    if args.seq_length % 8:
        raise ValueError(
            f"--seq-length {args.seq_length}: expected a multiple of 8, for the 8 partial sums of "
            "each sample's loss."
        )
    blend, per_split = get_blend_and_blend_per_split(args)
    if blend is None and per_split is not None:
        blend = per_split[0]
    if blend is None:
        raise ValueError("The job names no data: give --data-path or --train-data-path.")
    assign_roles(blend[0], roles)
    refuse_unsafe(core_transformer_config_from_args(args))
