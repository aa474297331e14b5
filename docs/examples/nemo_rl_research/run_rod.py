"""Trains an arm on NeMo-RL: run_rod.py --config RECIPE.yaml [KEY=VALUE ...]."""

import sys

from nemo_rod.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    main()
