"""The cost of a run before it starts: FLOPs, memory, disk and time from the model's shape.

Pure arithmetic: it needs no GPU, no network and no installed trainer.
"""
