"""The rehearsal of a recipe: the recipe itself, with everything but its size."""
