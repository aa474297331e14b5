"""Reference losses for `after.py`: `torchrun reference.py DATA REFERENCES CORPUS CHECKPOINTS`."""

from __future__ import annotations

import sys
from pathlib import Path

from after import ROLES
from before import make_config

from nemo_rod.hosts import swap_in


def main() -> None:
    """Computes the reference losses of one corpus with the last checkpoint of a job."""
    from megatron.bridge.training.gpt_step import forward_step

    data, references, name, checkpoint = sys.argv[1:5]
    swap_in.reference(
        "megatron_bridge",
        make_config(Path(data), Path(checkpoint), list(ROLES)),
        forward_step,
        role=ROLES[name],
        roles={f"{data}/{source}": role for source, role in ROLES.items()},
        checkpoint=checkpoint,
        out=f"{references}/{name}",
    )


if __name__ == "__main__":
    main()
