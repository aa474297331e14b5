"""Everything in NVIDIA's code that nemo_rod relies on, in one place.

    functions.txt  every function of NVIDIA's that is called by position, wrapped or replaced
    functions.py   checks that the installed functions match the list
    changes.py     differences between versions, by the name of each change

NVIDIA's packages are imported only when something is looked up in them.
"""
