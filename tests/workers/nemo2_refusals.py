"""Prints the message of every refusal of a NeMo job: python -m ... on_cpu nemo2 THIS DATA

The name of every case is part of its message.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes" / "swap_in" / "nemo2"))

from before import make_job
from nemo.collections import llm

import nemo_rod
from nemo_rod.hosts.nemo2 import refuse_version

Change = Callable[[dict[str, Any]], None]
CASES: dict[str, Change] = {
    "accepted": lambda job: None,
    "llm.PreTrainingDataModule": lambda job: job.update(
        data=llm.MockDataModule(seq_length=64, tokenizer=job["data"].tokenizer)
    ),
    "Megatron FSDP": lambda job: setattr(
        job["trainer"].strategy.ddp_config, "use_megatron_fsdp", True
    ),
    "dataloader_type='cyclic'": lambda job: setattr(
        job["data"].data_sampler, "dataloader_type", "cyclic"
    ),
    "rampup_batch_size": lambda job: setattr(
        job["data"].data_sampler, "rampup_batch_size", [4, 4, 64]
    ),
    "dataloader_type='batch'": lambda job: setattr(
        job["data"].data_sampler, "dataloader_type", "batch"
    ),
    "limit_train_batches": lambda job: setattr(job["trainer"], "limit_train_batches", 7),
    "enable_cuda_graph=True": lambda job: setattr(job["model"].config, "enable_cuda_graph", True),
    "moe_router_force_load_balancing": lambda job: setattr(
        job["model"].config, "moe_router_force_load_balancing", True
    ),
    "delayed FP8 scaling": lambda job: vars(job["model"].config).update(
        fp8="hybrid", fp8_recipe="delayed"
    ),
}


def answer(function: Any, *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return ""


def main() -> None:
    messages = {}
    options = {
        "roles": {0: "adaptation", 1: "replay"},
        "policy": nemo_rod.TakeAll(),
        "multiplier": 1,
    }
    for case, change in CASES.items():
        job = make_job(Path(sys.argv[1]), Path("out"))
        change(job)
        parts = job["model"], job["data"], job["trainer"]
        messages[case] = answer(nemo_rod.install, "nemo2", *parts, **options)
        if case == "accepted":
            messages["installed already"] = answer(nemo_rod.install, "nemo2", *parts, **options)
    messages["no LLM collection"] = answer(refuse_version, "3.0.0")
    messages["2.2.0"] = answer(refuse_version, "2.2.0")
    print("SAID " + json.dumps(messages), flush=True)


main()
