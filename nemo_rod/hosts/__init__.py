"""Other people's software: trainers that lend their training step to the selector, forms of data.

The house imports none of it: its parts are found by name.
"""
