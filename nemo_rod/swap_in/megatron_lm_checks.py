"""Checks that the selector can be swapped into this Megatron-LM and this job."""

from __future__ import annotations

from typing import Any

from nemo_rod.megatron.scoring.forward_only import refuse_unsafe
from nemo_rod.swap_in.job import INSTALLED
from nemo_rod.swap_in.roles import Roles, assign_roles
from nemo_rod.upstream.functions import check


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
