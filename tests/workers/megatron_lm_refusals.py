"""Prints the message of every refusal of a Megatron-LM job, by changes of its arguments."""

import copy
from typing import Any

from job_notes import answer, say
from megatron.training import training
from megatron.training.arguments import parse_args, validate_args

import nemo_rod
from nemo_rod.hosts.megatron_lm import refuse
from nemo_rod.hosts.swap_in.job import Job

ROLES = {0: "adaptation", 1: "replay"}
CASES: dict[str, dict[str, Any]] = {
    "accepted": {},
    "mock_data": {"mock_data": True},
    "use_megatron_fsdp": {"use_megatron_fsdp": True},
    "use_torch_fsdp2": {"use_torch_fsdp2": True},
    "sft": {"sft": True},
    "dataloader_inter_document_masking": {"dataloader_inter_document_masking": True},
    "step_batch_size_schedule": {"step_batch_size_schedule": "0:8 1M:16"},
    "rampup_batch_size": {"rampup_batch_size": [4, 4, 64]},
    "iterations_to_skip": {"iterations_to_skip": [3]},
    # newer versions derive the scope from the implementation where none is given
    "cuda_graph_impl": {"cuda_graph_impl": "local", "inference_cuda_graph_scope": None},
    "context_parallel_size": {"context_parallel_size": 2},
    "dataloader_type": {"dataloader_type": "cyclic"},
    "data_path": {"data_path": ["1", "data/new", "1", "data/old", "1", "data/other"]},
}


def main() -> None:
    args = parse_args()
    validate_args(args)
    messages = {}
    for case, changes in CASES.items():
        changed = copy.copy(args)
        vars(changed).update(changes)
        messages[case] = answer(refuse, Job(roles=ROLES), changed)
    options = {"roles": ROLES, "policy": nemo_rod.TakeAll(), "multiplier": 1}
    with nemo_rod.install("megatron_lm", **options):
        messages["twice"] = answer(nemo_rod.install, "megatron_lm", **options)
    training.train_step = lambda model: None
    messages["other version"] = answer(nemo_rod.install, "megatron_lm", **options)
    say(messages)


main()
