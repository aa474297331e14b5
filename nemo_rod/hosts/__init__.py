"""Third-party software: trainers whose training step the selector wraps, and formats of data.

The house imports none of it; its parts are registered by name.
"""
