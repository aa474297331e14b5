"""The cost of a run before it starts: FLOPs, memory, disk and time from the model's shape.

    shapes.py   Hugging Face config -> blocks of parameters
    flops.py    forward FLOPs of a token
    memory.py   bytes per GPU of a layout, and layouts to refuse
    speed.py    FLOPs -> seconds, from stated assumptions
    costs.py    the total cost of each stage
    table.py    the plan as text

Pure arithmetic: it needs no GPU, no network and no installed trainer.
"""
