"""Where the stages of a run execute: here, or as Slurm jobs with or without Ray."""
