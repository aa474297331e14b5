"""Stages of a run on Ray clusters of their own: `launcher=ray`."""
