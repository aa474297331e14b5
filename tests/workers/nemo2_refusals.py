"""Prints the message of every refusal of a NeMo job: python -m ... on_cpu nemo2 THIS DATA

The name of every case is part of its message.
"""

import sys
from pathlib import Path
from typing import Any

from job_notes import answer, change, say

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes" / "swap_in" / "nemo2"))

from before import make_job
from nemo.collections import llm

import nemo_rod
from nemo_rod.hosts.nemo2 import check_version

# name -> what is changed: attributes below the job's trainer, data and model
CASES: dict[str, dict[str, Any]] = {
    "accepted": {},
    "llm.PreTrainingDataModule": {},
    "Megatron FSDP": {"trainer.strategy.ddp_config.use_megatron_fsdp": True},
    "dataloader_type='cyclic'": {"data.data_sampler.dataloader_type": "cyclic"},
    "rampup_batch_size": {"data.data_sampler.rampup_batch_size": [4, 4, 64]},
    "dataloader_type='batch'": {"data.data_sampler.dataloader_type": "batch"},
    "limit_train_batches": {"trainer.limit_train_batches": 7},
    "enable_cuda_graph=True": {"model.config.enable_cuda_graph": True},
    "moe_router_force_load_balancing": {"model.config.moe_router_force_load_balancing": True},
    "delayed FP8 scaling": {"model.config.fp8": "hybrid", "model.config.fp8_recipe": "delayed"},
}


def main() -> None:
    messages = {}
    policy = nemo_rod.TakeAll()
    options = {"roles": {0: "adaptation", 1: "replay"}, "policy": policy, "multiplier": 1}
    for case, changes in CASES.items():
        job = make_job(Path(sys.argv[1]), Path("out"))
        if case == "llm.PreTrainingDataModule":
            job["data"] = llm.MockDataModule(seq_length=64, tokenizer=job["data"].tokenizer)
        for key, value in changes.items():
            part, _, name = key.partition(".")
            change(job[part], name, value)
        parts = job["model"], job["data"], job["trainer"]
        messages[case] = answer(nemo_rod.install, "nemo2", *parts, **options)
        if case == "accepted":
            messages["installed already"] = answer(nemo_rod.install, "nemo2", *parts, **options)
    messages["no LLM collection"] = answer(check_version, "3.0.0")
    messages["2.2.0"] = answer(check_version, "2.2.0")
    say(messages)


main()
