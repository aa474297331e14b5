"""A forward-only pass over blocks, in every layout, without side effects on training.

    scorer.py         sums of token losses of blocks, by id
    scoring_pass.py   the trainer's own schedule, forward only
    forward_only.py   hazards, each guarded or refused
    logits.py         token losses without ever holding all logits
    low_precision.py  a pass in FP8

Everywhere, `model` is the list of the model's chunks on this rank, wrapped for data parallelism or
not, and `config` their shared Megatron configuration.
"""
