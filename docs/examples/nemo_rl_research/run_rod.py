"""Runs a recipe of nemo_rod on NeMo-RL's workers: run_rod.py recipe=NAME [KEY=VALUE ...]."""

import sys

from nemo_rod.cli import main

if __name__ == "__main__":
    sys.argv[1:] = ["run", "launcher=nemo_rl", *sys.argv[1:]]
    main()
