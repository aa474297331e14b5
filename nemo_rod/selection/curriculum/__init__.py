"""The curriculum: the candidates of every step, their scores, and the blocks trained on.

Curriculum.append(choice)              log.py: a record a step, which survives SIGKILL at any byte;
                                       header.py: their provenance
Journal                                journal.py: the curriculum and the metrics of a run
RecordedPools, FollowedPools           recorded_pools.py: train on a recorded curriculum
"""
