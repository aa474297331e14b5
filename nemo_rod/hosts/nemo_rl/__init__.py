"""Replay on Demand on NeMo-RL: Ray drives Megatron policy workers that choose their blocks.

    driver (algorithm.py)  -- a step number -->  every policy worker (worker.py):
                                                 pool -> losses -> scores -> top-k -> train()
    curriculum, metrics    <-- ids, losses and scores of one rank --

The workers read blocks from the store by id: no token crosses Ray. All differences between
NeMo-RL's versions are in `compat.py`.
"""
