"""A scaled-down end-to-end run of a recipe."""
