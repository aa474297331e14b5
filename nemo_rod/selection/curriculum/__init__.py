"""The curriculum: what was drawn at every step, how it scored, and what was trained on.

Curriculum.append(choice)              log.py: one record a step; header.py: their provenance
record_log.py                          an append-only file that survives SIGKILL at any byte
Journal                                journal.py: the curriculum and the metrics of a run
RecordedPools, FollowedPools           recorded_pools.py: train on a recorded curriculum
"""
