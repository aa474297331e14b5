"""Continued pretraining with Replay on Demand: a training loop of plain PyTorch and Accelerate.

accelerate launch loop.py MODEL BLOCKS ADAPTATION_REFERENCES REPLAY_REFERENCES OUT [--steps N]

The same command resumes after an interruption. BLOCKS is a store of `nemo-rod prepare`; the
references are those of `nemo-rod reference`, or of references.py beside this file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

from nemo_rod import BlockStore, Candidates, References, RoDBatches


def train(
    model_folder: str, blocks: str, references: list[str], out: Path, *, steps: int,
    batch_size: int, micro_batch_size: int, lr: float, save_every: int,
) -> None:  # fmt: skip
    accelerator = Accelerator()
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))
    model, optimizer = accelerator.prepare(model, optimizer)
    store = BlockStore(blocks)
    batches = RoDBatches(  # not through accelerator.prepare, which would read a batch ahead
        model,
        store,
        References.open(references, store),
        steps=steps,
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        pools=Candidates(
            num_adaptation=store.num_adaptation,
            num_replay=store.num_replay,
            batch_size=batch_size,
            multiplier=2,
        ),
        out=out / "rod",
    )
    accelerator.gradient_accumulation_steps = len(batches) // steps
    accelerator.register_for_checkpointing(batches)
    checkpoint = out / "checkpoint"
    if checkpoint.exists():
        accelerator.load_state(str(checkpoint))
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            batches.end_step({"train/loss": loss.item()})
            if batches.next_step % save_every == 0:
                accelerator.save_state(str(checkpoint))
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        out / "hf", is_main_process=accelerator.is_main_process
    )
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("model", "blocks", "adaptation", "replay", "out"):
        parser.add_argument(name)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--save-every", type=int, default=50)
    given = parser.parse_args()
    train(
        given.model, given.blocks, [given.adaptation, given.replay], Path(given.out),
        steps=given.steps, batch_size=given.batch_size, micro_batch_size=given.micro_batch_size,
        lr=given.lr, save_every=given.save_every,
    )  # fmt: skip
