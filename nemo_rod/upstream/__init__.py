"""Everything in NVIDIA's code that nemo_rod relies on, in one place.

    functions.py  every function of NVIDIA's that is called by position, wrapped or replaced
    changes.py    differences between versions, by the name of each change

NVIDIA's packages are imported only when something is looked up in them.
"""
