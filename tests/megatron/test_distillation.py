"""The self-distillation score: on logits against the definition, then in real runs."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from places import WORKERS
from test_layouts import assert_same_run
from test_reference_resume import files
from tiny import LAYOUTS, Setting, Torchrun

import nemo_rod.megatron  # noqa: F401  makes Megatron importable without CUDA
from nemo_rod.megatron.scoring.distillation import outcome_logprobs, soft_loss, top_ids
from nemo_rod.selection import Curriculum
from nemo_rod.selection.references.teacher import open_teacher

POSITIONS, BLOCKS, VOCABULARY = 6, 3, 40
WORKER = WORKERS / "distillation_worker.py"


def logits(seed: int, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(POSITIONS, BLOCKS, VOCABULARY, generator=generator)


def coarse(some: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Probabilities of some tokens and of all others, by summing the others up."""
    p = some.double().softmax(-1)
    chosen = torch.zeros_like(p, dtype=torch.bool).scatter(-1, ids, True)
    rest = p.masked_fill(chosen, 0).sum(-1, keepdim=True)
    return torch.cat([p.gather(-1, ids), rest], -1)


def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return torch.where(p > 0, p * (p / q).log(), 0.0).sum(-1)


def score(base: torch.Tensor, now: torch.Tensor, top_k: int, *, half: bool) -> torch.Tensor:
    ids = top_ids(base, top_k, VOCABULARY)
    kept = outcome_logprobs(base, ids)
    kept = kept.half() if half else kept
    return soft_loss(outcome_logprobs(now, ids), kept) - soft_loss(
        outcome_logprobs(base, ids), kept
    )


@pytest.mark.parametrize("top_k", [1, 5, VOCABULARY - 1, VOCABULARY])
def test_it_is_the_divergence_of_the_kept_outcomes(top_k: int) -> None:
    base, now = logits(0), logits(1)
    ids = base.argsort(-1, descending=True)[..., :top_k]
    expected = divergence(coarse(base, ids), coarse(now, ids))
    torch.testing.assert_close(
        score(base, now, top_k, half=False).double(), expected, rtol=0, atol=3e-6
    )
    # what half precision adds, on scores of some nats
    torch.testing.assert_close(
        score(base, now, top_k, half=True).double(), expected, rtol=2e-3, atol=2e-4
    )


def test_the_whole_vocabulary_gives_the_full_divergence_and_fewer_tokens_never_more() -> None:
    base, now = logits(0), logits(1)
    full = divergence(base.double().softmax(-1), now.double().softmax(-1))
    found = [score(base, now, k, half=False).double() for k in (1, 4, 16, VOCABULARY)]
    torch.testing.assert_close(found[-1], full, rtol=0, atol=3e-6)
    for fewer, more in pairwise(found):
        assert (fewer <= more + 3e-6).all()


@pytest.mark.parametrize("top_k", [1, 5, VOCABULARY])
def test_it_is_exactly_zero_at_the_base(top_k: int) -> None:
    assert (score(logits(0), logits(0), top_k, half=True) == 0).all()


def test_a_small_rest_is_not_lost_to_rounding() -> None:
    base, ids = logits(0, scale=0.1), torch.zeros(POSITIONS, BLOCKS, 1, dtype=torch.int64)
    base[..., 0] = 25.0  # leaves 5e-10 to the rest, which 1 - p in single precision cannot tell
    found = outcome_logprobs(base, ids).double()
    torch.testing.assert_close(found, coarse(base, ids).log(), rtol=1e-6, atol=1e-7)


def test_of_equally_likely_tokens_the_lower_ids_are_kept() -> None:
    some = torch.zeros(1, 1, 9)
    some[..., 7], some[..., 2] = 2.0, -1.0
    assert top_ids(some, 4, 9).flatten().tolist() == [7, 0, 1, 3]
    assert top_ids(some.bfloat16(), 9, 9).flatten().tolist() == [7, 0, 1, 3, 4, 5, 6, 8, 2]


def test_padding_of_the_vocabulary_is_of_the_rest() -> None:
    some = logits(0)
    some[..., -8:] += 20.0  # far likelier than any token
    ids = top_ids(some, VOCABULARY - 8, VOCABULARY - 8)
    assert ids.max() == VOCABULARY - 9
    found = outcome_logprobs(some, ids).double().exp()
    torch.testing.assert_close(found, coarse(some, ids), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_as_before(dtype: torch.dtype) -> None:
    some = logits(0).to(dtype)
    some[0, 0, :3] = torch.tensor([-0.0, 0.0, -torch.inf])
    before, ids = some.clone(), torch.tensor([0, 1, 2, 30]).expand(POSITIONS, BLOCKS, 4)
    outcome_logprobs(some, ids)
    assert (some.view(torch.uint8) == before.view(torch.uint8)).all()


def test_an_outcome_that_the_base_rules_out_costs_nothing() -> None:
    kept = torch.tensor([0.0, -torch.inf]).half()
    assert soft_loss(torch.tensor([-0.5, -torch.inf]), kept).item() == 0.5


@pytest.mark.layouts
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_split_vocabulary_gives_the_same(torchrun: Torchrun, ranks: int) -> None:
    for said in torchrun(ranks, WORKER, "logits"):
        (line,) = [line for line in said.splitlines() if line.startswith("{")]
        found = json.loads(line)
        assert found["same ids"] and found["same logits"]
        assert found["largest difference"] < 1e-6


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.layouts)])
def test_blocks_whose_positions_are_shared_out(torchrun: Torchrun, ranks: int) -> None:
    for said in torchrun(ranks, WORKER, "context"):
        (line,) = [line for line in said.splitlines() if line.startswith("{")]
        found = json.loads(line)
        assert found["same kept"] and found["new blocks as ever"] and found["zero at the base"]
        assert found["largest difference"] < 1e-6


@pytest.fixture(scope="module")
def references(tiny: Setting) -> list[Path]:
    """The specialist's, and those of the base with four tokens of every prediction."""
    return [tiny.references[0], tiny.reference("base_distillation", tiny.base, "replay", top_k=4)]


@pytest.fixture(scope="module")
def single(tiny: Setting, references: list[Path]) -> list:
    weights = tiny.root / "distillation_weights"
    where = ("single", LAYOUTS["single"], weights)
    return tiny.rod(*where, references=references, out="distillation_single")


def hugging_face_logits(checkpoint: Path, tokens: np.ndarray) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        return model.eval()(torch.from_numpy(tokens.astype(np.int64))).logits


@pytest.mark.slow
def test_what_is_kept_are_the_likeliest_tokens_of_the_base(
    tiny: Setting, references: list[Path]
) -> None:
    teacher = open_teacher(references, tiny.store)
    assert teacher is not None
    some = tiny.store.num_adaptation + np.array([3, 0, 5])
    base = hugging_face_logits(tiny.base, tiny.store.tokens(some))
    ids, logprobs = teacher[some]
    best = coarse(base, torch.from_numpy(ids).long())
    torch.testing.assert_close(torch.from_numpy(logprobs).exp().double(), best, rtol=0, atol=1e-3)
    likeliest = base.softmax(-1).topk(4).values.sum(-1).double()
    torch.testing.assert_close(best[..., :4].sum(-1), likeliest, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_replay_is_scored_by_the_divergence_from_the_base(
    tiny: Setting, references: list[Path], single: list
) -> None:
    teacher = open_teacher(references, tiny.store)
    assert teacher is not None
    trained = []
    for record in single[::4]:
        ids = record.block_ids[tiny.store.is_replay(record.block_ids)]
        tokens, (top, logprobs) = tiny.store.tokens(ids), teacher[ids]
        kept = torch.from_numpy(logprobs).double().softmax(-1)
        cross = [
            -(kept * coarse(hugging_face_logits(model, tokens), torch.from_numpy(top).long()).log())
            for model in (tiny.root / "distillation_weights" / str(record.step), tiny.base)
        ]
        expected = (cross[0] - cross[1]).sum(-1)[:, :-1].mean(-1)
        found = record.score[tiny.store.is_replay(record.block_ids)]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
        if record.step == 0:
            assert len(found) and (found == 0).all()
        else:
            trained.append(found.min())
    assert len(trained) == 4 and min(trained) > 0


@pytest.mark.slow
def test_new_blocks_are_scored_as_ever(tiny: Setting, references: list[Path], single: list) -> None:
    job = tiny.rod_job(tiny.root / "ordinary", LAYOUTS["single"], steps=1)
    tiny.torchrun(1, "nemo_rod.megatron", job)
    (one,) = Curriculum.open(tiny.root / "ordinary" / "curriculum.rod", read_only=True)
    is_new = ~tiny.store.is_replay(one.block_ids)
    assert (one.block_ids == single[0].block_ids).all() and is_new.any()
    assert (one.score[is_new] == single[0].score[is_new]).all()


@pytest.mark.layouts
@pytest.mark.parametrize("layout", ["dp2", "tp2_sp", "pp2_vpp2"])
def test_the_same_run_in_other_layouts(
    tiny: Setting, references: list[Path], single: list, layout: str
) -> None:
    out = f"distillation_{layout}"
    tiny.rod(layout, LAYOUTS[layout], references=references, out=out)
    assert_same_run(tiny.root / "distillation_single", tiny.root / out)


@pytest.mark.layouts
@pytest.mark.parametrize("layout", ["dp2", "pp2"])
def test_the_same_is_kept_in_other_layouts(
    tiny: Setting, references: list[Path], layout: str
) -> None:
    out = tiny.root / f"base_distillation_{layout}"
    out.mkdir()
    values = json.loads((references[1] / "job.json").read_text())
    values |= {"out": str(out), "parallel": vars(LAYOUTS[layout])}
    (out / "job.json").write_text(json.dumps(values))
    tiny.torchrun(LAYOUTS[layout].world_size, "nemo_rod.megatron", out / "job.json")
    assert files(out) == files(references[1])
