"""Reference losses of a store by plain PyTorch: one command a role.

torchrun references.py BASE BLOCKS replay OUT
torchrun references.py SPECIALIST BLOCKS adaptation OUT
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from nemo_rod import BlockStore
from nemo_rod.hosts.plain_torch import write_references

if __name__ == "__main__":
    folder, blocks, role, out = sys.argv[1:5]
    if "RANK" in os.environ:
        dist.init_process_group()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if torch.cuda.is_available():
        model.to(int(os.environ.get("LOCAL_RANK", "0")))
    write_references(model, BlockStore(blocks), out, role=role, micro_batch_size=8)
    if dist.is_initialized():
        dist.destroy_process_group()
