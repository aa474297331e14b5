"""Artifacts of the authors' code, bethgelab/replay-on-demand: imported, and written for it.

blocks.py       their folder of blocks -> a block store, and the table of their hashes
references.py   their cache of losses -> references
trace.py        their selection trace <-> a curriculum
command.py      nemo-rod import blocks|references|curriculum
"""
