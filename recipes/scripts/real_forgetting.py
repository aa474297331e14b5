r"""Forgetting of real text by arms that replayed generated text, which their own run lacks.

    python recipes/scripts/real_forgetting.py runs/toy_generated runs/toy

The first run folder has the arms; the second has real text, of which the held-out blocks count, and
the base that both began from.
"""

from __future__ import annotations

import sys
from pathlib import Path

from nemo_rod.corpus import BlockStore, load_tokenizer
from nemo_rod.hosts.plain_torch.scorer import TorchScorer
from nemo_rod.lab.sample import load_quietly
from nemo_rod.selection.forgetting import forgetting_by_source, validation_forgetting
from nemo_rod.selection.held_out import source_losses

_MICRO_BATCH = 64


def real_forgetting(run: Path, real: Path) -> dict[str, dict[str, float]]:
    """Returns `F_val` (nats; key "") and forgetting by source of the real text, for every arm.

    `run` has the arms, and `real` the blocks and the base.

    Raises:
        ValueError: a folder lacks its part, or the arms have another tokenizer than the blocks.
    """
    base, arms = real / "base" / "hf", sorted(run.glob("arms/*/hf"))
    if not base.is_dir():
        raise ValueError(f"{base} is missing: expected a run whose base is trained.")
    if not arms:
        raise ValueError(f"{run} has no arm with hf/: run `nemo-rod run` of its recipe first.")
    store = BlockStore(real / "blocks", split="holdout")
    sources = [item for item in store.sources if item.role == "replay"]
    replay = [item for item in BlockStore(real / "blocks").sources if item.role == "replay"]
    prevalence = {item.name: item.count for item in replay}

    def losses(checkpoint: Path) -> dict[str, float]:
        store.check_tokenizer(load_tokenizer(str(checkpoint)))
        model = load_quietly(checkpoint, dtype="float32").eval()
        scorer = TorchScorer(model, store, micro_batch_size=_MICRO_BATCH)
        means = source_losses(scorer, sources, num_blocks=len(store))
        return dict(zip((item.name for item in sources), means.values(), strict=True))

    before, forgetting = losses(base), {}
    for arm in arms:
        after = losses(arm)
        by_source = forgetting_by_source(after, before)
        total = validation_forgetting(after, before, prevalence)
        forgetting[arm.parent.name] = {"": total, **by_source}
    return forgetting


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: real_forgetting.py RUN REAL_RUN")
    try:
        rows = real_forgetting(Path(sys.argv[1]), Path(sys.argv[2]))
    except ValueError as error:
        sys.exit(str(error))
    for name, row in rows.items():
        parts = [f"{source} {value:.3f}" for source, value in row.items() if source]
        print(f"{name:16} F_val {row['']:.3f}  {'  '.join(parts)}")
