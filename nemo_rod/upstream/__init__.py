"""What nemo_rod relies on in NVIDIA's code, in one place.

    functions.py  every function of theirs that is called by position, wrapped or replaced
    changes.py    what differs between their versions, by the name of each change

NVIDIA's packages are imported only when something is looked up in them.
"""
