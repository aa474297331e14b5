"""Callbacks of a training run: recording, validation, and what depends on it."""
