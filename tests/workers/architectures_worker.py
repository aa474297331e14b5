"""Scores blocks and prefixes with models in several layouts, and exports every model.

torchrun ... tests/workers/architectures_worker.py PLAN.json

PLAN names a `folder` with a checkpoint per model, the `models`, the `layouts` of this many
processes, and `changes` of models' providers. The models go to `folder`/exported/MODEL_LAYOUT.
Rank 0 prints a line of JSON for each: the losses of every block and of the same parts of its
prefixes, and the objective, or why it is refused.
"""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jobs_worker import free_groups
from scoring_worker import RandomBlocks, scorer

from nemo_rod.config import Model, Parallel

BLOCKS, BLOCK_SIZE = 5, 128
# the model knows every token, those that stand for images included
STORE = RandomBlocks(BLOCKS, BLOCK_SIZE, 256)


def objective(model: list) -> dict[str, Any]:
    """What Megatron would train of a built model, and by which losses besides the next token's."""
    from megatron.core.transformer.moe.router import TopKRouter

    modules = [module for chunk in model for module in chunk.modules()]
    routers = [module for module in modules if isinstance(module, TopKRouter)]
    parameters = [pair for chunk in model for pair in chunk.named_parameters()]
    towers = "(embed_)?(vision|audio)|multi_modal_projector"
    vision = [p.requires_grad for name, p in parameters if re.match(towers, name)]
    return {
        "routers": len(routers),
        "balancing": sum(router.is_aux_loss_enabled() for router in routers),
        "z_loss": [router.config.moe_z_loss_coeff for router in routers if routers],
        "predictors": sum(type(module).__name__.startswith("MultiToken") for module in modules),
        "vision": len(vision),
        "vision_trained": sum(vision),
        "trained": sum(p.requires_grad for _, p in parameters),
        "parameters": len(parameters),
    }


def scored(hf: Path, parallel: Parallel, out: Path, changes: dict[str, Any]) -> dict[str, Any]:
    from nemo_rod.megatron.gaps import save_hf
    from nemo_rod.megatron.models import model_provider

    for name in ("FLASH", "FUSED", "UNFUSED"):  # Megatron sets them, and refuses another model's
        os.environ.pop(f"NVTE_{name}_ATTN", None)
    try:
        bridge, provider = model_provider(
            str(hf), parallel, Model(precision="fp32"), block_size=BLOCK_SIZE
        )
        for name, value in changes.items():
            setattr(provider, name, value)
        provider.finalize()
        provider.initialize_model_parallel(seed=0)
        model = provider.provide_distributed_model(wrap_with_ddp=False)
    except ValueError as refusal:
        return {"refused": str(refusal)}
    ids, lengths = np.arange(BLOCKS), (BLOCK_SIZE, BLOCK_SIZE // 2, BLOCK_SIZE // 8)
    losses = {n: scorer(model, STORE, length=n).losses(ids).tolist() for n in lengths}
    save_hf(bridge, model, out)
    return {"losses": losses, "objective": objective(model)}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    plan = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(plan["folder"])
    for model in plan["models"]:
        for name, layout in plan["layouts"].items():
            out = folder / "exported" / f"{model}_{name}"
            changes = plan["changes"].get(model, {})
            row = scored(folder / model, Parallel(**layout), out, changes)
            free_groups()
            if dist.get_rank() == 0:
                print(json.dumps({"model": model, "layout": name, **row}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
