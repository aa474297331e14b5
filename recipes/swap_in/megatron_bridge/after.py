"""The job of `before.py` with Replay on Demand: `torchrun after.py DATA OUT REFERENCES BASE`."""

from __future__ import annotations

import sys
from pathlib import Path

from before import make_config

import nemo_rod

# corpus -> what it is to us
ROLES = {"new": "adaptation", "old": "replay"}


def main() -> None:
    """Trains on what the model chooses."""
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    data, out, references, base = map(Path, sys.argv[1:])
    cfg = make_config(data, out, list(ROLES), base)
    nemo_rod.install(
        "megatron_bridge",
        cfg,
        roles={str(data / name): role for name, role in ROLES.items()},
        references=[references / "new", references / "old"],
        multiplier=2,
    )
    pretrain(cfg, forward_step)


if __name__ == "__main__":
    main()
