"""The commands of `nemo-rod`; `nemo_rod/cli.py` reads the command line."""
