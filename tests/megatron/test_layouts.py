"""The same choice in every parallel layout, and the one that plain arithmetic makes.

The oracle knows nothing of Megatron: it scores every pool with Hugging Face's own model on the
weights that the step started from.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from places import WORKERS
from tiny import (
    BATCH,
    LAYOUTS,
    MOE_LAYOUTS,
    STEPS,
    Setting,
    Torchrun,
    metric,
)

from nemo_rod.corpus import BlockStore
from nemo_rod.selection import Curriculum, Pool, References
from nemo_rod.selection.estimates import SourceAverages


@pytest.fixture(scope="module")
def single(tiny: Setting) -> list[Any]:
    return tiny.rod("single", LAYOUTS["single"], tiny.root / "weights")


@pytest.fixture(scope="module")
def single_prefix(tiny: Setting) -> list[Any]:
    return tiny.rod("single", LAYOUTS["single"], tiny.root / "prefix_weights", eighths=2)


def hugging_face_losses(checkpoint: Path, tokens: np.ndarray) -> np.ndarray:
    """Mean loss over the next-token targets within each row of tokens, nats, float64 `[C]`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = torch.from_numpy(tokens.astype(np.int64))
    with torch.no_grad():
        logits = model.eval()(ids).logits[:, :-1].double()
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    return loss.view(len(ids), -1).mean(dim=1).numpy()


def assert_choice_is_plain_arithmetic(
    tiny: Setting, records: list[Any], weights: str = "weights", length: int | None = None
) -> None:
    """The oracle reads the first `length` tokens of every candidate, or all of them."""
    store, pools = tiny.store, tiny.arm("rod").pools()
    assert [record.step for record in records] == list(range(STEPS))
    smallest_gap, replay = np.inf, 0
    for record in records:
        pool = pools.pool(record.step)
        assert (record.block_ids == pool.block_ids).all()
        tokens = store.tokens(pool.block_ids)[:, :length]
        now = hugging_face_losses(tiny.root / weights / str(record.step), tokens)
        reference = np.where(
            pool.is_replay,
            hugging_face_losses(tiny.base, tokens),
            hugging_face_losses(tiny.specialist, tokens),
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


def assert_same_run(one: Path, other: Path) -> None:
    """Two runs chose the same blocks by the same scores, and trained alike on them."""
    records = [
        list(Curriculum.open(run / "curriculum.rod", read_only=True)) for run in (one, other)
    ]
    for a, b in zip(*records, strict=True):
        assert (a.block_ids == b.block_ids).all()
        assert (a.chosen == b.chosen).all()
        np.testing.assert_allclose(a.score, b.score, rtol=0, atol=1e-5)
    for name in ("train/loss", "train/grad_norm"):
        np.testing.assert_allclose(metric(one, name), metric(other, name), rtol=1e-4)


def test_choice_equals_plain_arithmetic_on_exported_weights(
    tiny: Setting, single: list[Any]
) -> None:
    assert_choice_is_plain_arithmetic(tiny, single)


def test_a_prefix_is_scored_against_the_reference_of_the_same_prefix(
    tiny: Setting, single: list[Any], single_prefix: list[Any]
) -> None:
    # a quarter of 64 tokens are 16 positions; the target of the last is token 17
    assert_choice_is_plain_arithmetic(tiny, single_prefix, "prefix_weights", length=17)
    # both choose from the same pools, and not the same
    assert all(
        (a.block_ids == b.block_ids).all() for a, b in zip(single, single_prefix, strict=True)
    )
    assert any((a.chosen != b.chosen).any() for a, b in zip(single, single_prefix, strict=True))


def test_replay_scores_are_exactly_zero_at_the_base(tiny: Setting, single: list[Any]) -> None:
    first = single[0]
    is_replay = tiny.store.is_replay(first.block_ids)
    assert is_replay.any()
    assert (first.score[is_replay] == 0).all()


def test_validation_is_the_loss_on_held_out_blocks(tiny: Setting, single: list[Any]) -> None:
    store = BlockStore(tiny.blocks, split="holdout")
    rows = [json.loads(line) for line in (tiny.root / "single" / "metrics.jsonl").open()]
    looked = [row["step"] for row in rows if any(key.startswith("validation/") for key in row)]
    assert looked == [9, 19]
    for source in store.sources:
        ids = source.start + np.arange(min(source.count, 8))
        # the weights after step 9 are those that step 10 started from
        expected = hugging_face_losses(tiny.root / "weights" / "10", store.tokens(ids)).mean()
        found = rows[9][f"validation/{source.role}/{source.name}/loss"]
        assert found == pytest.approx(expected, abs=1e-5)


def test_all_arms_look_at_the_same_blocks_before_their_first_step(
    tiny: Setting, single: list[Any]
) -> None:
    looks = [
        json.loads((tiny.root / arm / "validation_start.json").read_text())
        for arm in ("no_replay", "single")
    ]
    assert looks[0] == looks[1]
    store = BlockStore(tiny.blocks, split="holdout")
    assert looks[0].keys() == {f"validation/{s.role}/{s.name}/loss" for s in store.sources}
    for source in store.sources:
        ids = source.start + np.arange(min(source.count, 8))
        expected = hugging_face_losses(tiny.base, store.tokens(ids)).mean()
        found = looks[0][f"validation/{source.role}/{source.name}/loss"]
        assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.layouts
def test_validation_is_of_whole_weights_from_the_first_step_on(tiny: Setting) -> None:
    """The trainer gathers the weights of other replicas only from its second step on."""
    looks = {}
    for layout in ("single", "dp2_distopt"):
        folder = tiny.root / f"{layout}_first_look"
        job = tiny.rod_job(folder, LAYOUTS[layout], steps=3, validation_every=1)
        tiny.torchrun(LAYOUTS[layout].world_size, "nemo_rod.megatron", job, timeout=300)
        names = [f"validation/{source.role}/{source.name}/loss" for source in tiny.store.sources]
        looks[layout] = [metric(folder, name) for name in names]
    np.testing.assert_allclose(looks["dp2_distopt"], looks["single"], rtol=0, atol=1e-5)


@pytest.mark.layouts
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "single"])
def test_same_choice_and_training_in_every_layout(
    tiny: Setting, single: list[Any], layout: str
) -> None:
    tiny.rod(layout, LAYOUTS[layout])
    assert_same_run(tiny.root / "single", tiny.root / layout)


@pytest.mark.layouts
@pytest.mark.parametrize("layout", ["dp2", "tp2_sp", "pp2_vpp2"])
def test_same_choice_by_prefix_in_other_layouts(
    tiny: Setting, single_prefix: list[Any], layout: str
) -> None:
    tiny.rod(layout, LAYOUTS[layout], eighths=2)
    assert_same_run(tiny.root / "single_eighths_2", tiny.root / f"{layout}_eighths_2")


@pytest.fixture(scope="module")
def single_guessed(tiny: Setting) -> list[Any]:
    weights = tiny.root / "guessed_weights"
    return tiny.rod("single", LAYOUTS["single"], weights, scored_every=5)


def test_between_scoring_passes_the_losses_of_training_are_learned_from(
    tiny: Setting, single_guessed: list[Any]
) -> None:
    references = References.open(tiny.references, tiny.store)
    sources, seed = len(tiny.store.sources), tiny.arm("rod").seed
    averages = SourceAverages(tiny.store.source_index, sources, every=5, seed=seed)
    for record in single_guessed:
        weights = tiny.root / "guessed_weights" / str(record.step)
        loss = hugging_face_losses(weights, tiny.store.tokens(record.block_ids))
        if record.step % 5:  # an estimate: only what it trained on has a loss
            estimate = averages.estimate(Pool(record.step, record.block_ids, np.array([])))
            np.testing.assert_allclose(record.score, estimate, rtol=0, atol=1e-4)
            others = np.delete(np.arange(len(loss)), record.chosen)
            assert np.isnan(record.loss[others]).all()
            loss[others] = np.nan
        np.testing.assert_allclose(record.loss, loss, rtol=0, atol=1e-5)
        rho = loss.astype(np.float32) - references[record.block_ids]
        averages.observe(record.step, record.block_ids, rho)


@pytest.mark.layouts
@pytest.mark.parametrize("layout", ["dp2", "tp2_dp2_distopt", "pp2_vpp2"])
def test_same_guesses_in_other_layouts(
    tiny: Setting, single_guessed: list[Any], layout: str
) -> None:
    tiny.rod(layout, LAYOUTS[layout], scored_every=5)
    assert_same_run(tiny.root / "single_scored_every_5", tiny.root / f"{layout}_scored_every_5")


@pytest.fixture(scope="module")
def single_moe(moe: Setting) -> list[Any]:
    return moe.rod("single", MOE_LAYOUTS["single"], moe.root / "weights")


@pytest.mark.layouts
def test_mixture_of_experts_chooses_by_plain_arithmetic(
    moe: Setting, single_moe: list[Any]
) -> None:
    assert_choice_is_plain_arithmetic(moe, single_moe)


@pytest.mark.layouts
@pytest.mark.parametrize("layout", [name for name in MOE_LAYOUTS if name != "single"])
def test_mixture_of_experts_in_every_layout(
    moe: Setting, single_moe: list[Any], layout: str
) -> None:
    moe.rod(layout, MOE_LAYOUTS[layout])
    assert_same_run(moe.root / "single", moe.root / layout)


@pytest.mark.parametrize(
    ("replicas", "tensor", "pipeline", "sequence"),
    [
        (1, 1, 1, 0),
        pytest.param(2, 1, 1, 0, marks=pytest.mark.layouts),
        pytest.param(1, 2, 1, 1, marks=pytest.mark.layouts),
        pytest.param(1, 1, 2, 0, marks=pytest.mark.layouts),
    ],
)
def test_the_model_reads_a_prefix_alone_and_gives_its_part_of_the_sums(
    torchrun: Torchrun, replicas: int, tensor: int, pipeline: int, sequence: int
) -> None:
    worker = WORKERS / "prefix_worker.py"
    for said in torchrun(replicas * tensor * pipeline, worker, tensor, pipeline, sequence):
        rows = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        assert [row["eighths"] for row in rows] == [8, 4, 2, 1]
        assert [row["slice"] >= 64 for row in rows] == [False, True, True, True]
        for row in rows:
            assert row["shape"] == [7, row["eighths"]]
            # two whole blocks go together; of prefixes as many as have their tokens, evenly
            count = -(-7 // replicas)
            passes = -(-count // (2 if pipeline > 1 else 2 * 8 // row["eighths"]))
            size = 2 if pipeline > 1 or row["eighths"] == 8 else -(-count // passes)
            assert row["read"] == [[size, 8 * row["eighths"]]] * passes
            assert row["difference"] < 1e-5 * row["largest"]


@pytest.mark.parametrize(
    ("context", "replicas"),
    [
        (1, 2),  # whole blocks: nothing is to be shared out
        pytest.param(2, 1, marks=pytest.mark.layouts),
        pytest.param(2, 2, marks=pytest.mark.layouts),
        pytest.param(4, 1, marks=pytest.mark.layouts),
    ],
)
def test_context_parallel_ranks_add_up(torchrun: Torchrun, context: int, replicas: int) -> None:
    worker = WORKERS / "context_worker.py"
    for said in torchrun(context * replicas, worker, context):
        (line,) = [line for line in said.splitlines() if line.startswith("{")]
        assert json.loads(line)["largest difference"] < 1e-4
