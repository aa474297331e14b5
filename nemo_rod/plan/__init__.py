"""What a run will cost, before it starts: FLOPs, memory, disk and time from the model's shape.

    shapes.py   Hugging Face config -> blocks of parameters
    flops.py    forward FLOPs of a token
    memory.py   bytes per GPU of a layout, and layouts that are refused
    speed.py    FLOPs -> seconds, from stated assumptions
    costs.py    the work of each stage, added up
    table.py    the same as text

Pure arithmetic: it needs no GPU, no network and no installed trainer.
"""
