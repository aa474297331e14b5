"""The same choice in every parallel layout, and the one that plain arithmetic makes.

A tiny Qwen3 learns a dialect of one Markov source while seven others are replay; the store, the
references and the base are made once, by the real stages. The oracle knows nothing of Megatron: it
scores every pool with Hugging Face's own model on the weights that the step started from.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rod.config import Optimisation, Parallel
from nemo_rod.corpus import BlockStore, SourceSpec, load_tokenizer, prepare
from nemo_rod.jobs import ScoreJob, TrainJob, write_job
from nemo_rod.launch.base import initialise_base
from nemo_rod.selection import Curriculum
from nemo_rod.selection.arms import Arm, make_arm

STEPS, BATCH = 20, 8
LAYOUTS = {
    "single": Parallel(1, 1, 1),
    "dp2": Parallel(2, 1, 1),
    "tp2": Parallel(1, 2, 1),
    "pp2": Parallel(1, 1, 2),
    "tp2_pp2": Parallel(1, 2, 2),
}
ARCHITECTURE = {
    "model_type": "qwen3",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
Torchrun = Callable[..., list[str]]


def sources() -> list[SourceSpec]:
    made = [SourceSpec(name="dialect", role="adaptation", kind="synthetic",
                       files=["dialect:0:0.25"], max_bytes=30_000)]  # fmt: skip
    made += [SourceSpec(name=f"chain_{i}", role="replay", kind="synthetic",
                        files=[f"markov:{i}"], max_bytes=20_000) for i in range(3)]  # fmt: skip
    return made


class Setting:
    """A store, a base, a specialist (the base after some steps) and both references."""

    def __init__(self, root: Path, torchrun: Torchrun) -> None:
        self.root, self.torchrun = root, torchrun
        self.blocks = root / "blocks"
        prepare(self.blocks, sources(), tokenizer=load_tokenizer("byte"), block_size=64,
                holdout_fraction=0.1, holdout_seed=42)  # fmt: skip
        self.store = BlockStore(self.blocks)
        initialise_base(ARCHITECTURE, root / "init", tokenizer="byte", seed=0)
        base = self.train("base", root / "init", steps=30, lr=1e-2)
        specialist = self.train("no_replay", base / "hf", steps=30, lr=3e-3)
        self.base, self.specialist = base / "hf", specialist / "hf"
        self.references = [
            self.score("specialist", self.specialist, "adaptation"),
            self.score("base", self.base, "replay"),
        ]

    def arm(self, name: str) -> Arm:
        return make_arm(
            name, num_adaptation=self.store.num_adaptation, num_replay=self.store.num_replay,
            batch_size=BATCH, multiplier=2, balance="expected", kappa=1.0, seed=7,
        )  # fmt: skip

    def train(self, name: str, model: Path, *, steps: int, lr: float) -> Path:
        out = self.root / name
        job = self._job(name, out, Parallel(), model=model, steps=steps, lr=lr, references=[])
        self.torchrun(1, "nemo_rod.megatron", job)
        return out

    def rod(self, layout: str, *extra: object) -> list[Any]:
        """Trains RoD in a layout; returns its records."""
        out, parallel = self.root / layout, LAYOUTS[layout]
        job = self._job("rod", out, parallel, model=self.base, steps=STEPS, lr=3e-3,
                        references=self.references)  # fmt: skip
        worker = Path(__file__).parent / "layouts_worker.py"
        self.torchrun(parallel.world_size, worker, job, *extra, timeout=300)
        return list(Curriculum.open(out / "curriculum.rod", read_only=True))

    def score(self, name: str, model: Path, role: str) -> Path:
        out = self.root / "references" / name
        out.mkdir(parents=True)
        job = ScoreJob(
            name=name, blocks=str(self.blocks), out=str(out), parallel=Parallel(),
            precision="fp32", scoring_micro_batch_size=BATCH, seed=0, model=str(model), role=role,
            model_digest=name,
        )  # fmt: skip
        write_job(job, out / "job.json")
        self.torchrun(1, "nemo_rod.megatron", out / "job.json")
        return out

    def _job(self, arm: str, out: Path, parallel: Parallel, *, model: Path, steps: int, lr: float,
             references: list[Path]) -> Path:  # fmt: skip
        out.mkdir(parents=True, exist_ok=True)
        job = TrainJob(
            name=arm, blocks=str(self.blocks), out=str(out), parallel=parallel, precision="fp32",
            scoring_micro_batch_size=4, seed=7, model=str(model),
            arm=dataclasses.asdict(self.arm(arm)),
            optimisation=Optimisation(
                steps=steps, batch_size=BATCH, micro_batch_size=2, lr=lr, warmup_fraction=0.1
            ),
            references=[str(folder) for folder in references], checkpoint_every=10_000,
        )  # fmt: skip
        write_job(job, out / "job.json")
        return out / "job.json"


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory, module_torchrun: Torchrun) -> Setting:
    return Setting(tmp_path_factory.mktemp("layouts"), module_torchrun)


@pytest.fixture(scope="module")
def single(setting: Setting) -> list[Any]:
    return setting.rod("single", setting.root / "weights")


def hugging_face_losses(checkpoint: Path, tokens: np.ndarray) -> np.ndarray:
    """Mean loss over the S - 1 next-token targets of each block, nats, float64 `[C]`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = torch.from_numpy(tokens.astype(np.int64))
    with torch.no_grad():
        logits = model.eval()(ids).logits[:, :-1].double()
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    return loss.view(len(ids), -1).mean(dim=1).numpy()


def test_choice_equals_plain_arithmetic_on_exported_weights(
    setting: Setting, single: list[Any]
) -> None:
    store, pools = setting.store, setting.arm("rod").pools()
    assert [record.step for record in single] == list(range(STEPS))
    smallest_gap, replay = np.inf, 0
    for record in single:
        pool = pools.pool(record.step)
        assert (record.block_ids == pool.block_ids).all()
        tokens = store.tokens(pool.block_ids)
        now = hugging_face_losses(setting.root / "weights" / str(record.step), tokens)
        reference = np.where(
            pool.is_replay,
            hugging_face_losses(setting.base, tokens),
            hugging_face_losses(setting.specialist, tokens),
        )
        score = now - reference
        np.testing.assert_allclose(record.score, score, rtol=0, atol=1e-5)
        order = sorted(range(len(score)), key=lambda i: (-score[i], i))
        assert sorted(order[:BATCH]) == record.chosen.tolist()
        smallest_gap = min(smallest_gap, score[order[BATCH - 1]] - score[order[BATCH]])
        replay += int(pool.is_replay[record.chosen].sum())
    # no choice hung on a tie, and the test saw both roles win
    assert smallest_gap > 1e-5
    assert 0 < replay < STEPS * BATCH


def test_replay_scores_are_exactly_zero_at_the_base(setting: Setting, single: list[Any]) -> None:
    first = single[0]
    is_replay = setting.store.is_replay(first.block_ids)
    assert is_replay.any()
    assert (first.score[is_replay] == 0).all()


@pytest.mark.layouts
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "single"])
def test_same_choice_in_every_layout(setting: Setting, single: list[Any], layout: str) -> None:
    records = setting.rod(layout)
    for one, other in zip(single, records, strict=True):
        assert (one.block_ids == other.block_ids).all()
        assert (one.chosen == other.chosen).all()
        np.testing.assert_allclose(one.score, other.score, rtol=0, atol=1e-5)


@pytest.mark.layouts
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "single"])
def test_same_loss_and_gradient_norm_in_every_layout(
    setting: Setting, single: list[Any], layout: str
) -> None:
    if not (setting.root / layout / "metrics.jsonl").exists():
        setting.rod(layout)
    for name in ("train/loss", "train/grad_norm"):
        one, other = (metric(setting.root / folder, name) for folder in ("single", layout))
        np.testing.assert_allclose(one, other, rtol=1e-4)


def metric(folder: Path, name: str) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)[name] for line in lines]
