"""Runs stock Megatron-Bridge jobs, with and without the selector: torchrun ... SPEC.json

The job is that of `recipes/swap_in/megatron_bridge/before.py`; each run of the specification only
says what differs. All runs of a process share its process group, as its start takes longest.
"""

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from job_notes import change, note_step

RECIPE = Path(__file__).parents[2] / "recipes" / "swap_in" / "megatron_bridge"


def main() -> None:
    from nemo_rod.cpu import trainers

    from megatron.core.rerun_state_machine import RerunStateMachine  # isort: skip

    torch.set_num_threads(1)
    trainers.install_megatron_bridge()
    # megatron-core 0.16.1 cannot print what a job that runs every step twice has found
    RerunStateMachine._maybe_report_stats = lambda self: None
    dist.init_process_group("gloo")
    sys.path.insert(0, str(RECIPE))
    spec = json.loads(Path(sys.argv[1]).read_text())
    if not (data := Path(spec["root"]) / "data").exists():  # by the first job, of one process
        import make_data

        make_data.make(data)
    for run in spec["runs"]:
        one_run(Path(spec["root"]), spec["layout"], **run)
    dist.barrier()
    dist.destroy_process_group()


def one_run(
    root: Path,
    layout: dict[str, Any],
    *,
    name: str,
    kind: str,
    steps: int = 6,
    base: str | None = None,  # run that it starts from, or scores with
    references: list[str] = (),  # type: ignore[assignment]  # runs that scored
    role: str = "",
    multiplier: float = 2,
    corpora: Sequence[str] = ("new", "old"),
    settings: dict[str, Any] | None = None,  # by dotted keys of the configuration, like the layout
    lora: dict[str, Any] | None = None,  # the adapters that it trains in place of the base
    die_at: int | None = None,  # step in which the process kills itself
    refused: str | None = None,  # what must be said when the job is refused as it starts
    validation_every: int | None = None,
) -> None:
    """One job: kind "stock", "watch", "joint", "mix", or "score" for references of one role.

    `root` has `data` and gets a folder `name` with checkpoints and `steps.jsonl`.
    """
    from before import make_config
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.initialize import destroy_global_state
    from megatron.bridge.training.pretrain import pretrain

    import nemo_rod
    from nemo_rod.hosts import swap_in
    from nemo_rod.selection.mix import Mix

    out = root / name
    starts_from = root / base if base is not None and kind != "score" else None
    cfg = make_config(root / "data", out, corpora, starts_from, steps=steps)
    for key, value in (layout | (settings or {})).items():
        change(cfg, key, value)
    if lora is not None:
        cfg.peft = adapters(**lora)
    roles = {f"{root}/data/new": "adaptation", f"{root}/data/old": "replay"}
    refusal = pytest.raises(ValueError, match=refused) if refused else nullcontext()
    if kind == "score":
        with refusal:
            swap_in.reference(
                "megatron_bridge", cfg, forward_step, role=role, roles=roles, multiplier=multiplier,
                checkpoint=root / str(base), out=out,
            )  # fmt: skip
        return
    notes = [steps_writer(out, die_at)]
    if kind == "stock":
        pretrain(cfg, forward_step, callbacks=notes)
        return
    options: dict[str, Any] = {"roles": roles, "validation_every": validation_every}
    if kind == "watch":
        installed = nemo_rod.watch("megatron_bridge", cfg, **options)
    else:
        installed = nemo_rod.install(
            "megatron_bridge", cfg, references=[root / folder for folder in references],
            policy=nemo_rod.Joint() if kind == "joint" else Mix(forgetting=0.01),
            multiplier=multiplier, **options,
        )  # fmt: skip
    with installed, refusal:
        pretrain(cfg, forward_step, callbacks=notes)
    if refused:
        destroy_global_state()


def adapters(**options: Any) -> Any:
    """Megatron-Bridge's LoRA, for layers without TransformerEngine."""
    from megatron.bridge.peft import lora, module_matcher, utils

    utils.HAVE_TE = module_matcher.HAVE_TE = False
    return lora.LoRA(**options)


def steps_writer(out: Path, die_at: int | None) -> Any:
    """A callback of Megatron-Bridge's own that notes loss and gradient norm of every step."""
    from megatron.bridge.training.callbacks import Callback, CallbackContext

    class StepsWriter(Callback):
        def on_train_step_end(self, context: CallbackContext) -> None:
            row, known = None, context.loss_dict
            if dist.get_rank() == dist.get_world_size() - 1:
                row = {"loss": float(known["lm loss"]), "grad_norm": float(context.grad_norm)}
            note_step(out, row, step=context.state.train_state.step, die_at=die_at)

    return StepsWriter()


if __name__ == "__main__":  # the checkpoint writer starts processes that read this file again
    main()
