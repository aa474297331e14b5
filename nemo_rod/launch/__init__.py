"""Where a run's stages run: here, or as jobs of Slurm with or without Ray."""
