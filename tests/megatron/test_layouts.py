"""The same choice in every parallel layout, and the one that plain arithmetic makes.

The oracle knows nothing of Megatron: it scores every pool with Hugging Face's own model on the
weights that the step started from. Ranks agree, and a saved step is exported from any layout.
"""

import functools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import NEMOTRON, tensors, token_losses
from places import WORKERS
from tiny import BATCH, LAYOUTS, MOE_LAYOUTS, STEPS, Setting, Torchrun, metric, printed

from nemo_rod.alternatives.odm import ODM
from nemo_rod.checkpoints.losses import load
from nemo_rod.config import Parallel
from nemo_rod.corpus import BlockStore
from nemo_rod.jobs import ExportJob
from nemo_rod.selection import Choice, References
from nemo_rod.selection.mix import Mix

# without attention, which Megatron splits over positions only with TransformerEngine and a GPU
MAMBA_LAYOUTS = {"cp2": Parallel(context=2)}
MAMBA = {**NEMOTRON, "model_type": "nemotron_h", "hybrid_override_pattern": "M-M-"}
PREFIX, BANDIT, BLEND = {"prefix": "1/4"}, {"policy_name": "odm"}, {"policy_name": "mix"}


# a step's weights, and the two references of all steps
hugging_face_model = functools.lru_cache(maxsize=4)(load)


def hugging_face_losses(checkpoint: Path, tokens: np.ndarray) -> np.ndarray:
    """Mean loss over the next-token targets within each row of tokens, nats, float64 `[C]`."""
    return token_losses(hugging_face_model(checkpoint), tokens).mean(1)


def assert_choice_is_plain_arithmetic(
    setting: Setting, records: list[Any], weights: Path, length: int | None = None
) -> None:
    """The oracle reads the first `length` tokens of every candidate, or all of them."""
    store, pools = setting.store, setting.arm("rod").pools()
    assert [record.step for record in records] == list(range(STEPS))
    smallest_gap, replay = np.inf, 0
    for record in records:
        pool = pools.pool(record.step)
        assert (record.block_ids == pool.block_ids).all()
        tokens = store.tokens(pool.block_ids)[:, :length]
        now = hugging_face_losses(weights / str(record.step), tokens)
        reference = np.where(
            pool.is_replay_C,
            hugging_face_losses(setting.base, tokens),
            hugging_face_losses(setting.specialist, tokens),
        )
        score = now - reference
        np.testing.assert_allclose(record.score, score, rtol=0, atol=1e-5)
        order = sorted(range(len(score)), key=lambda i: (-score[i], i))
        assert sorted(order[:BATCH]) == record.chosen.tolist()
        smallest_gap = min(smallest_gap, score[order[BATCH - 1]] - score[order[BATCH]])
        replay += int(pool.is_replay_C[record.chosen].sum())
    # no choice hung on a tie, and the test saw both roles win
    assert smallest_gap > 1e-5
    assert 0 < replay < STEPS * BATCH


def assert_validated(setting: Setting, losses: dict[str, float], checkpoint: Path) -> None:
    """The validation losses among some metrics are those of a checkpoint."""
    store = BlockStore(setting.blocks, split="holdout")
    names = {f"validation/{s.role}/{s.name}/loss": s for s in store.sources}
    assert {name for name in losses if re.fullmatch("validation/.*/loss", name)} == names.keys()
    for name, source in names.items():
        ids = source.start + np.arange(min(source.count, 8))
        expected = hugging_face_losses(checkpoint, store.tokens(ids)).mean()
        assert losses[name] == pytest.approx(expected, abs=1e-5)


def test_choice_equals_plain_arithmetic_on_exported_weights(tiny):
    records = tiny.single()
    assert_choice_is_plain_arithmetic(tiny, records, tiny.weights())
    first, is_replay = records[0], tiny.store.is_replay(records[0].block_ids)
    assert is_replay.any()
    assert (first.score[is_replay] == 0).all()  # exactly, at the base


@pytest.mark.layouts
def test_a_prefix_is_scored_against_the_reference_of_the_same_prefix(tiny):
    records = tiny.single(**PREFIX)
    # a quarter of 64 tokens are 16 positions; the target of the last is token 17
    assert_choice_is_plain_arithmetic(tiny, records, tiny.weights(**PREFIX), length=17)
    # both choose from the same pools, and not the same
    pairs = list(zip(tiny.single(), records, strict=True))
    assert all((a.block_ids == b.block_ids).all() for a, b in pairs)
    assert any((a.chosen != b.chosen).any() for a, b in pairs)


def test_validation_is_the_loss_on_held_out_blocks(tiny):
    tiny.single()
    rows = [json.loads(line) for line in (tiny.root / "single" / "metrics.jsonl").open()]
    validated = [row["step"] for row in rows if any(key.startswith("validation/") for key in row)]
    assert validated == [9, 19]
    # the weights after step 9 are those that step 10 started from
    assert_validated(tiny, rows[9], tiny.weights() / "10")
    for arm in ("no_replay", "single"):  # all arms on the same blocks before their first step
        start = json.loads((tiny.root / arm / "validation_start.json").read_text())
        assert_validated(tiny, start, tiny.base)


@pytest.mark.layouts
def test_validation_is_of_whole_weights_from_the_first_step_on(tiny):
    """The trainer gathers the weights of other replicas only from its second step on."""
    losses = {}
    for layout in ("single", "dp2_distopt"):
        folder = tiny.root / f"{layout}_first_validation"
        tiny.rod_run(folder, LAYOUTS[layout], steps=3, validation__every=1)
        names = [f"validation/{source.role}/{source.name}/loss" for source in tiny.store.sources]
        losses[layout] = [metric(folder, name) for name in names]
    np.testing.assert_allclose(losses["dp2_distopt"], losses["single"], rtol=0, atol=1e-5)


@pytest.mark.layouts
@pytest.mark.parametrize("layout", ["single", "dp2"])
def test_every_micro_batch_of_a_validation_beats(tiny, layout):
    """The watch over ranks must not take a long validation for a stalled rank."""
    num_blocks, micro_batch, every, steps = 8, 4, 3, 6  # the first two as the job has them
    parallel = LAYOUTS[layout]
    job = tiny.rod_job(
        tiny.root / f"beats_{layout}", parallel, steps=steps, validation__every=every
    )
    outputs = tiny.torchrun(parallel.world_size, WORKERS / "jobs_worker.py", "--count", job)
    held = BlockStore(tiny.blocks, split="holdout")
    blocks = sum(min(source.count, num_blocks) for source in held.sources)
    per_replica = -(-blocks // parallel.data)
    beats = [-(-per_replica // micro_batch)] * (1 + steps // every)  # before the first step, too
    assert min(beats) > 1
    for output in outputs:
        assert [row["beats"] for row in printed(output)] == [beats]


@pytest.fixture(scope="module")
def mamba(tmp_path_factory, torchrun):
    return Setting(tmp_path_factory.mktemp("mamba"), torchrun, MAMBA)


@pytest.mark.layouts
@pytest.mark.parametrize(
    ("model", "layout", "scoring"),
    [
        *(("tiny", name, {}) for name in LAYOUTS if name != "single"),
        *(("tiny", name, PREFIX) for name in ("dp2", "tp2_sp", "pp2_vpp2")),
        *(("tiny", name, BANDIT) for name in ("dp2", "tp2_dp2_distopt", "pp2_vpp2")),
        *(("tiny", name, BLEND) for name in ("dp2", "tp2_dp2_distopt", "pp2_vpp2")),
        *(("moe", name, {}) for name in MOE_LAYOUTS if name != "single"),
        *(("mamba", name, {}) for name in MAMBA_LAYOUTS),
    ],
)
def test_same_choice_and_training_in_every_layout(model, layout, scoring, request):
    setting = request.getfixturevalue(model)
    layouts = {"tiny": LAYOUTS, "moe": MOE_LAYOUTS, "mamba": MAMBA_LAYOUTS}
    parallel = layouts[model][layout]
    for a, b in zip(
        setting.single(**scoring), setting.rod(layout, parallel, **scoring), strict=True
    ):
        assert (a.block_ids == b.block_ids).all()
        assert (a.chosen == b.chosen).all()
        np.testing.assert_allclose(a.score, b.score, rtol=0, atol=1e-5)
    suffix = "".join(f"_{key}_{value}" for key, value in scoring.items())
    for name in ("train/loss", "train/grad_norm"):
        one, other = (metric(setting.root / f"{x}{suffix}", name) for x in ("single", layout))
        np.testing.assert_allclose(one, other, rtol=1e-4)


@pytest.mark.layouts
@pytest.mark.parametrize(("options", "policy"), [(BANDIT, ODM()), (BLEND, Mix())])
def test_a_policy_without_a_scoring_pass_learns_from_the_losses_of_training(tiny, options, policy):
    references, arm = References.open(tiny.references, tiny.store), tiny.arm("rod")
    for record in tiny.single(**options):
        pool = arm.pools().pool(record.step).of(tiny.store, arm.seed, STEPS)
        score = policy.estimate(pool) if options == BLEND else None
        np.testing.assert_allclose(record.score, np.nan if score is None else score, atol=1e-6)
        assert np.isnan(record.threshold) == (score is None)
        loss = np.full(len(record.loss), np.nan)  # only what it trained on has a loss
        trained_on = tiny.store.tokens(record.trained_on)
        checkpoint = tiny.weights(**options) / str(record.step)
        loss[record.chosen] = hugging_face_losses(checkpoint, trained_on)
        np.testing.assert_allclose(record.loss, loss, rtol=0, atol=1e-5)
        assert policy.select(pool, score, BATCH).tolist() == record.chosen.tolist()
        choice = Choice(pool, None, None, record.chosen, reference=references[record.block_ids])
        policy.observe(choice, record.loss[record.chosen])


@pytest.mark.layouts
def test_mixture_of_experts_chooses_by_plain_arithmetic(moe):
    assert_choice_is_plain_arithmetic(moe, moe.single(), moe.weights())


def scores(torchrun: Torchrun, processes: int, *arguments: object) -> list[list[dict[str, Any]]]:
    """The lines that each rank of scoring_worker.py prints."""
    outputs = torchrun(processes, WORKERS / "scoring_worker.py", *arguments)
    return [printed(output) for output in outputs]


@pytest.mark.parametrize(
    ("replicas", "tensor", "pipeline", "sequence"),
    [
        (1, 1, 1, 0),
        pytest.param(2, 1, 1, 0, marks=pytest.mark.layouts),
        pytest.param(1, 2, 1, 1, marks=pytest.mark.layouts),
        pytest.param(1, 1, 2, 0, marks=pytest.mark.layouts),
    ],
)
def test_the_model_reads_a_prefix_alone_and_gives_the_loss_of_that_part(
    torchrun, replicas, tensor, pipeline, sequence
):
    layout = (tensor, pipeline, sequence)
    for rows in scores(torchrun, replicas * tensor * pipeline, "prefix", *layout):
        assert [row["tokens"] for row in rows] == [64, 32, 16, 8]
        assert [row["slice"] >= 64 for row in rows] == [False, True, True, True]
        for row in rows:
            assert row["shape"] == [7]
            # two whole blocks go together; of prefixes as many as have their tokens, evenly
            count = -(-7 // replicas)
            passes = -(-count // (2 if pipeline > 1 else 2 * 64 // row["tokens"]))
            size = 2 if pipeline > 1 or row["tokens"] == 64 else -(-count // passes)
            assert row["read"] == [[size, row["tokens"]]] * passes
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
def test_context_parallel_ranks_add_up(torchrun, context, replicas):
    for (row,) in scores(torchrun, context * replicas, "context", context):
        assert row["largest_difference"] < 1e-4


def test_scoring_does_not_run_heads_for_later_tokens(torchrun):
    ((row,),) = scores(torchrun, 1, "heads")
    assert row["same"]
    assert row["scoring"] == {"output layer": 2, "head": 0}  # two micro-batches
    assert row["training"] == {"output layer": 2, "head": 1}  # one, with both heads
    assert row["refused"] == (
        "The model would also be trained by multi-token prediction in the model, which is not part "
        "of the loss that selection and its references use: set mtp_num_layers=null."
    )


@pytest.mark.layouts
@pytest.mark.parametrize("layout", ["dp2", "pp2", "tp2"])
def test_references_are_the_same_in_every_layout(tiny, layout):
    folders = tiny.root / f"references_{layout}", tiny.references[1]
    values = json.loads((folders[1] / "job.json").read_text()) | {"out": str(folders[0])}
    values["config"]["parallel"] = vars(LAYOUTS[layout])
    job = tiny.root / f"references_{layout}.json"
    job.write_text(json.dumps(values))
    tiny.torchrun(LAYOUTS[layout].world_size, "nemo_rod.megatron", job)
    if layout != "tp2":  # the order in which a matrix's parts are added up shows in the last bits
        one, other = (
            {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "job.json"}
            for folder in folders
        )
        assert one == other
        return
    (ids,) = np.nonzero(tiny.store.is_replay(np.arange(len(tiny.store))))
    one, other = (
        References.open([tiny.references[0], folder], tiny.store)[ids] for folder in folders
    )
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Parallel(), Parallel(tensor=2)])
def test_a_saved_step_is_what_was_validated_then(tiny, layout):
    """Validated after step 10 of 20; the last step equals the export at the end, bit for bit."""
    out = tiny.root / f"exported_tp{layout.tensor}"
    tiny.rod_run(out, layout, checkpoint__every=10)
    exported = {step: export(tiny, out, step) for step in (10, 20)}
    at_end, last = tensors(out / "hf"), tensors(exported[20])
    assert at_end.keys() == last.keys() and len(last) > 10
    assert all(torch.equal(at_end[name], last[name]) for name in last)
    row = json.loads((out / "metrics.jsonl").read_text().splitlines()[9])
    assert_validated(tiny, row, exported[10])


def export(tiny: Setting, trained: Path, step: int) -> Path:
    """Exports a step with one process; returns the folder of the Hugging Face checkpoint."""
    out = trained / f"export_{step}"
    checkpoint = str(trained / "checkpoints" / f"iter_{step:07d}")
    job = tiny.write(ExportJob, out.name, out, start=str(tiny.base), saved=checkpoint)
    tiny.torchrun(1, "nemo_rod.megatron", job)
    return out / "hf"


@pytest.fixture(scope="module")
def ranks(torchrun):
    """The line of each of two tensor-parallel ranks."""
    outputs = torchrun(2, WORKERS / "ranks_worker.py", timeout=120)
    return [row for output in outputs for row in printed(output)]


def test_ranks_agree_without_room_for_the_answers_of_all(ranks):
    for number, rank in enumerate(ranks):
        agreed = rank["agreed"]
        assert agreed["result"] == {"rank": 1}  # the recorder's
        assert agreed["any"] == ["rank 1 lacks it"]
        assert agreed["all"] == [True, False, False]
        assert agreed["none fails"] == number
        for case in ("one fails", "the recorder fails"):
            assert "No space left on device: 'curriculum.rod'" in agreed[case]
        assert agreed["worked"] == [0][number:]  # the first rank of a node alone


def test_ranks_that_choose_differently_end_and_others_choose_the_same(ranks):
    for rank in ranks:
        assert rank["one ulp"] == [0, 1]  # by losses that differ in a bit
        assert rank["refused"].keys() == {"own_job", "nemo_rl_worker"}
        for refusal in rank["refused"].values():
            assert refusal.startswith("step 3: ranks chose different blocks")
