"""Stages, and where they run."""
