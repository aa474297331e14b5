"""Runs: the checked recipe, its resolved arms, its stages, and their folder."""
