"""Replay on Demand in a training loop of plain PyTorch, without Megatron.

    batches = RoDBatches(model, store, references, steps=100, batch_size=32)
    for batch in batches:
        model(**batch).loss.backward()
        ...                                         # optimizer, schedule: the loop's own

scorer.py: losses of blocks under a Hugging Face causal model, in one process, DDP or FSDP2
batches.py: the chosen blocks of every step, and their record
updates.py: whether the loop updates the weights between the steps
write_references.py: reference losses by the same scorer

Loops of other libraries (Trainer, Accelerate, NeMo Automodel) are in docs/examples/plain_torch.
"""

from nemo_rod.hosts.plain_torch.batches import RoDBatches as RoDBatches
from nemo_rod.hosts.plain_torch.scorer import TorchScorer as TorchScorer
from nemo_rod.hosts.plain_torch.write_references import write_references as write_references

# as a host: what a loop calls itself, by the names that all of them have
install, reference = RoDBatches, write_references
