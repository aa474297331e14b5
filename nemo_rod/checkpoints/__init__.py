"""Checkpoints of Hugging Face: how they are written, and what their own classes compute."""
