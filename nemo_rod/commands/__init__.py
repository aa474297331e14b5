"""What the verbs of `nemo-rod` do; `nemo_rod/cli.py` reads the command line."""
