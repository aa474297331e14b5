"""One forward-only pass over blocks, in every layout, that leaves no trace.

MegatronScorer(chunks, store, groups)     block_losses.py: sums of token losses of blocks, by id
scoring_pass(schedule, ...)            scoring_pass.py: a trainer's own schedule, forward only
forward_only(chunks)                   forward_only.py: hazards, each guarded or refused
token_losses(...)                      logits.py: without ever holding all logits
distillation.py                        the cross entropy of what a teacher kept
text_positions.py                      positions for models of images and text
"""
