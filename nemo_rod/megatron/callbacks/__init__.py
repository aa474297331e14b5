"""Callbacks of a training run: recording, validation and loggers."""
