"""Commands that take paths, not recipes: look into files, handle curricula, check this machine."""
