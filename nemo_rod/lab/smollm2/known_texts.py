r"""Which texts does a model know already? Only those can be forgotten, and so serve as replay.

    nemo-rod known recipe=german_smollm2_135m_debian domain=debian_smollm2

For every source, the model trains from where it starts on that source alone: `STEPS` plain steps of
one piece of `PIECE` tokens each. The gain is by how many nats the mean loss on `HELD_OUT` other
pieces of the source falls. A replay source is known if its gain is at most `MOST` times that of
the first adaptation source, and nothing is judged if that is below `LEAST`. The gains are added,
source by source, to ``known_texts.json`` in the run folder; a source that is there is not measured
again.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

from nemo_rod.checkpoints.published import load_quietly
from nemo_rod.config import Config
from nemo_rod.files import read_json, write_json

STEPS, PIECE, HELD_OUT, MOST = 100, 64, 32, 1 / 4
LEAST = 0.05  # gain of new text, in nats, for a verdict on the others


def gain(folder: str, pieces: Any, lr: float) -> tuple[float, float]:
    """Returns the loss before training, and by how much training lowers it, in nats a token.

    `pieces` are token ids, int64 [HELD_OUT + STEPS, PIECE]; the first are held out.
    """
    import torch

    model = load_quietly(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)

    def held_out() -> float:
        with torch.no_grad():
            return float(
                sum(model(x[None], labels=x[None]).loss for x in pieces[:HELD_OUT]) / HELD_OUT
            )

    before = held_out()
    for piece in pieces[HELD_OUT:]:
        optimizer.zero_grad()
        model(piece[None], labels=piece[None]).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return before, before - held_out()


def measure(config: Config) -> None:
    """Trains the model on every source of text not measured yet, some steps each, new text first.

    Raises:
        ValueError: the recipe trains its own base, or a source is too short to train on.
    """
    import numpy as np
    import torch

    from nemo_rod.corpus.documents import Documents
    from nemo_rod.corpus.encode import encode
    from nemo_rod.corpus.tokenizer import load_tokenizer

    if not config.model.hf:
        raise ValueError(
            f"model.hf is null: {config.recipe} trains its own base; name the model to measure."
        )
    file = Path(config.run_dir) / "known_texts.json"
    known: dict[str, Any] = read_json(file) if file.exists() else {}
    tokenizer = load_tokenizer(config.domain.tokenizer, eod=config.domain.eod)
    specs = sorted(config.domain.specs, key=lambda spec: spec.role != "adaptation")
    for spec in specs:
        if spec.name in known or spec.kind == "generated":  # the model's own text is known
            continue
        started = time.monotonic()
        # As few pieces of a document as there are documents, so that held-out pieces are seldom of
        # a page that was trained on; not its beginning, as those are alike.
        texts = itertools.islice(Documents(spec, tokenizer=tokenizer), HELD_OUT + STEPS)
        ids = [encode(tokenizer, [document.text])[0] for document in texts]
        rounds = range(PIECE, max(map(len, ids), default=0), PIECE)
        pieces = [i[start : start + PIECE] for start in rounds for i in ids]
        pieces = [piece for piece in pieces if len(piece) == PIECE][: HELD_OUT + STEPS]
        if len(pieces) <= HELD_OUT:
            raise ValueError(
                f"domain.sources.{spec.name} has {len(pieces)} pieces of {PIECE} tokens: expected "
                f"more than {HELD_OUT}, which are held out; leave it out."
            )
        tokens = torch.from_numpy(np.stack(pieces).astype(np.int64))
        before, gained = gain(str(config.model.hf), tokens, config.train.lr)
        known[spec.name] = {
            "role": spec.role, "loss": before, "gain": gained, "steps": len(pieces) - HELD_OUT,
            "seconds": time.monotonic() - started,
        }  # fmt: skip
        new = next(row["gain"] for row in known.values() if row["role"] == "adaptation")
        for row in known.values():
            is_known = row["role"] == "replay" and row["gain"] <= MOST * new
            row["known"] = is_known if new >= LEAST else None
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, known)
        row = known[spec.name]
        verdict = {True: ": known", False: ": not known", None: ": not judged"}[row["known"]]
        verdict = verdict if spec.role == "replay" else ""
        print(f"{spec.name}: loss {row['loss']:.3f}, gain {row['gain']:.3f}{verdict}", flush=True)
    if any(row["known"] is None for row in known.values()):
        print(f"Not judged, as these steps on new text gain less than {LEAST} nats themselves.")
