"""`prepare` beyond one node: tasks tokenise files of the sources, and `prepare` joins their tokens.

Each task has files of its own, and keeps the tokens of one in a folder, moved into place whole.
`prepare` then does what it always does, but takes the tokens of a file from its folder where there
is one. What a task has not done, `prepare` reads itself: the blocks are the same for any number of
tasks, and however many of them were killed.
"""
