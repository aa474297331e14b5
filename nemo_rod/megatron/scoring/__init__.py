"""A forward-only pass over blocks, in every layout, without side effects on training.

MegatronScorer(chunks, store, groups)  scorer.py: sums of token losses of blocks, by id
scoring_pass(schedule, ...)            scoring_pass.py: a trainer's own schedule, forward only
forward_only(chunks)                   forward_only.py: hazards, each guarded or refused
sliced_logits(chunks)                  logits.py: token losses without ever holding all logits
text_positions.py                      positions for vision-language models

Everywhere, `model` is the list of the model's chunks on this rank, wrapped for data parallelism or
not, and `config` their shared Megatron configuration.
"""
