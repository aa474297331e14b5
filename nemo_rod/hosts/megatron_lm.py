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
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from nemo_rod.hosts.swap_in.job import Installed, Job, SelectingJob, check_host, refuse_job
from nemo_rod.hosts.swap_in.job_references import HostReferenceJob
from nemo_rod.hosts.swap_in.roles import Roles
from nemo_rod.loggers import write_scalars
from nemo_rod.megatron.scoring.forward_only import refuse_unsafe


def install(**options: Any) -> Installed:
    """Makes the job of the script's `pretrain(...)` select its training samples.

    Older versions of Megatron-LM read their arguments inside `pretrain`. Unsupported arguments are
    refused there, before the model is built.

    Args:
        options: see `nemo_rod.hosts.swap_in.install`.
    """
    training = _training()
    from megatron.training import get_args

    job = _SelectingJob(**options)

    def parsed(args: Any) -> None:
        refuse(args, job.roles)
        if job.out is None and args.save is not None:
            job.out = Path(args.save) / "rod"

    def place(_: dict[str, Any]) -> tuple[int, Any, int]:
        args, groups = get_args(), ProcessGroupCollection.use_mpu_process_groups()
        return args.curr_iteration, groups, args.consumed_train_samples

    installed = Installed()
    _watch(installed, job, parsed)
    installed.replace(training, "train_step", job.selecting(training.train_step, place))
    return installed


def reference(**options: Any) -> None:
    """Makes the script's `pretrain(...)` write reference losses instead of training, and exit.

    Args:
        options: see `nemo_rod.hosts.swap_in.reference`.
    """
    training = _training()
    from megatron.training.checkpointing import checkpoint_exists

    job = HostReferenceJob(**options)

    def parsed(args: Any) -> None:
        refuse(args, job.roles)
        folders = args.pretrained_checkpoint, args.load
        folder = job.model_folder(checkpoint_exists, *folders, setting="'checkpoint' or --load")
        args.load, args.pretrained_checkpoint, args.save = folder, None, None
        args.finetune = args.no_load_optim = args.no_load_rng = True  # weights only

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
    _watch(installed, job, parsed)
    installed.replace(training, "train", score_instead)


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


def _watch(installed: Installed, job: Job, parsed: Callable[[Any], None]) -> None:
    """Calls `parsed` with the arguments once they are known, and passes the data on to the job."""
    from megatron.core.datasets import blended_megatron_dataset_builder as core
    from megatron.training import get_args, training

    initialize = training.initialize_megatron

    def initialized(*args: Any, **kwargs: Any) -> Any:
        result = initialize(*args, **kwargs)
        parsed(get_args())
        return result

    def built(train: Any, valid: Any) -> None:
        if train is None:
            raise ValueError(
                "The job's dataset provider made no training data on some ranks: expected one "
                "that uses megatron-core's BlendedMegatronDatasetBuilder and is called on every "
                "rank (provider.is_distributed = True), as that of pretrain_gpt.py is."
            )
        args = get_args()
        job.built(
            train,
            valid,
            num_drawn=training.get_train_valid_test_num_samples()[0],
            batch_size=args.global_batch_size,
            seed=args.seed,
            steps=args.train_iters,
            every=args.eval_interval,
        )

    installed.replace(training, "initialize_megatron", initialized)
    job.watch_data(installed, training, built, lambda: get_args().global_batch_size)
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

    blend, per_split = get_blend_and_blend_per_split(args)
    if blend is None and per_split is not None:
        blend = per_split[0]
    if blend is None and not getattr(args, "mock_data", False):
        raise ValueError("The job names no data: give --data-path or --train-data-path.")
    resizes = "changes the size of the pools"
    reasons = {
        **dict.fromkeys(("use_megatron_fsdp", "use_torch_fsdp2"), "is not supported yet"),
        "sft": "packs samples of many lengths into a row",
        "dataloader_inter_document_masking": "packs documents into a row",
        "hybrid_context_parallel": "makes samples of many lengths",
        "fim_data": "needs references of samples that are drawn anew",
        "mock_data": "makes samples without a source",
        "perform_rl_step": "trains on rollouts",
        **dict.fromkeys(("rampup_batch_size", "step_batch_size_schedule"), resizes),
        "decrease_batch_size_if_needed": resizes,
        "iterations_to_skip": "skips a different number of samples from a step's draw",
        "phase_transition_iterations": "resumes at samples that were not counted",
    }
    features = [
        (
            getattr(args, name, None),
            "--" + name.replace("_", "-"),
            reason,
            "give --data-path" if name == "mock_data" else "leave it out",
        )
        for name, reason in reasons.items()
    ]
    cyclic = args.dataloader_type == "cyclic"
    reason = "reads in an order of its own"
    features.append((cyclic, "--dataloader-type cyclic", reason, "use single"))
    external = args.dataloader_type == "external"
    reason = "resumes at an offset that only the job knows"
    features.append((external, "--dataloader-type external", reason, "use single"))
    refuse_job(
        features,
        sample_length=args.seq_length,
        length_key="--seq-length ",
        prefixes=None if blend is None else blend[0],
        roles=roles,
    )
    refuse_unsafe(core_transformer_config_from_args(args), args)
