"""Time, shares and passes by hand."""

from dataclasses import replace

import pytest
from command_line import composed

from nemo_rod.config import Domain, Parallel
from nemo_rod.corpus import BlockStore, load_tokenizer
from nemo_rod.corpus.prepare import prepare
from nemo_rod.lab.plan.built_shapes import read_shape
from nemo_rod.lab.plan.costs import Setup, Work, cost
from nemo_rod.lab.plan.plan_text import count, hours, size, wall
from nemo_rod.lab.plan.shapes import forward_flops, recomputed_share
from nemo_rod.lab.plan.speed import Processor
from nemo_rod.lab.plan.work import corpus_blocks, stage_works
from nemo_rod.roles import ROLES
from nemo_rod.run.stages import Stages

SHAPE = read_shape(
    {
        "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 2,
    }
)  # fmt: skip
FLOPS = forward_flops(SHAPE, 1000)  # of a token
# half of a TFLOP/s
PROCESSOR = Processor("made up", 1.0, "bf16", 0.5, 2.0, 1.0, "nowhere", startup_seconds=0.0)
SETUP = Setup(
    shape=SHAPE, processor=PROCESSOR, parallel=Parallel(data=4), block_size=1000,
    micro_batch_size=1, scoring_micro_batch_size=4,
)  # fmt: skip
ROD = Work(name="rod", steps=10, batch_size=32, pool_size=64)


def setup(**changes: float) -> Setup:
    """One on another processor."""
    return replace(SETUP, processor=replace(PROCESSOR, **changes))


def test_a_selecting_step_by_hand():
    # 32 blocks of 1000 tokens, on 4 processes
    update = 32 * 1000 * 3 * FLOPS / 2e12
    stage = cost(ROD, SETUP)
    assert stage.update_seconds == pytest.approx(update)
    assert stage.scoring_seconds == pytest.approx(64 * 1000 * FLOPS / 2e12)
    assert stage.gpu_hours == pytest.approx(10 * update * 5 / 3 * 4 / 3600)
    assert stage.hours == pytest.approx(stage.gpu_hours / 4)
    assert stage.trained_tokens == 10 * 32 * 1000
    assert stage.scored_tokens == 10 * 64 * 1000
    assert stage.flops == pytest.approx(10 * (3 * 32 + 64) * 1000 * FLOPS)


def test_scoring_is_faster_than_training_forward_and_checkpoints_take_time():
    slow, fast = (cost(ROD, setup(scoring=share)) for share in (1.0, 0.75))
    assert fast.scoring_seconds == pytest.approx(0.75 * slow.scoring_seconds)
    assert fast.update_seconds == slow.update_seconds
    saving = cost(replace(ROD, saved=25e9), SETUP)
    assert saving.hours == pytest.approx(slow.hours + 5 / 3600)


@pytest.mark.parametrize(
    ("name", "keys", "blocks"),
    [
        ("a.jsonl", {}, 100), ("a.jsonl", {"max_tokens": 6400}, 50), ("a.jsonl.gz", {}, None),
        ("a.jsonl", {"max_tokens": 10**9, "subsample": 0.5}, 50), ("a.jsonl", {"max_tokens": 5}, 1),
    ],
)  # fmt: skip
def test_files_of_plain_text_bound_their_source(tmp_path, name, keys, blocks):
    (tmp_path / name).write_bytes(b"x" * 12_800)
    source = {"kind": "jsonl", "files": [str(tmp_path / name)], **keys}
    sources = {role: {"role": role, **source} for role in ROLES}
    domain = Domain(tokenizer="byte", block_size=128, sources=sources)
    config = replace(composed("recipe=toy"), domain=domain, run_dir=str(tmp_path / "run"))
    if blocks is None:
        with pytest.raises(ValueError, match="how large source adaptation is"):
            corpus_blocks(Stages(config))
        return
    counts = corpus_blocks(Stages(config))
    assert counts["num_adaptation"] + counts["held_adaptation"] == blocks


@pytest.mark.parametrize(
    ("keys", "held"),
    [
        ({}, [1, 1, 10]), ({"holdout_floor": 20}, [8, 1, 20]), ({"holdout_fraction": 0.0}, [0] * 3),
        ({"holdout_fraction": 0.5}, [20, 3, 500]),
    ],
)  # fmt: skip
def test_a_source_holds_out_as_many_blocks_as_it_will(tmp_path, keys, held):
    """Where the floor decides, `prepare` holds out exactly these."""
    sources = {}
    for name, blocks in zip("abc", (40, 6, 1000), strict=True):
        role = "adaptation" if name == "a" else "replay"
        file = tmp_path / f"{name}.txt"
        lines = [f"{name} {number:0125d}" for number in range(blocks)]
        file.write_text("\n".join(line[-127:] for line in lines) + "\n")
        sources[name] = {"role": role, "kind": "text", "files": [str(file)]}
    domain = Domain(tokenizer="byte", block_size=128, sources=sources, **keys)
    config = replace(composed("recipe=toy"), domain=domain, run_dir=str(tmp_path / "run"))
    planned = corpus_blocks(Stages(config))
    assert [planned["held_adaptation"], planned["held_replay"]] == [held[0], held[1] + held[2]]
    if floor := keys.get("holdout_floor"):
        tokenizer = load_tokenizer("byte")
        prepare(
            root := tmp_path / "blocks", domain.specs, tokenizer=tokenizer, block_size=128,
            holdout_floor=floor, holdout_fraction=0.01,
        )  # fmt: skip
        store = BlockStore(root, split="holdout")
        assert [source.count for source in store.sources] == held


def test_stages_of_a_pipeline_wait():
    # 8 micro-batches pass 4 stages in 8 + 3 slots, and a third of them with three chunks a stage
    plain, scored = SETUP.training_seconds(1e6, 8), SETUP.scoring_seconds(32)
    for chunks, wait in ((1, 11 / 8), (3, 1 + 3 / 24)):
        layout = Parallel(pipeline=4, virtual_pipeline=chunks)
        pipelined = replace(SETUP, parallel=layout)
        assert pipelined.training_seconds(1e6, 8) == pytest.approx(plain * wait)
        assert pipelined.scoring_seconds(32) == pytest.approx(scored * wait)


def test_a_quick_backward_pass_makes_forward_passes_dearer():
    training = SETUP.training_seconds(1e6, 1)
    assert SETUP.forward_seconds(1e6, 1) == pytest.approx(training / 3)
    quick = setup(backward=1.5)
    assert quick.forward_seconds(1e6, 1) == pytest.approx(training / 2.5)


def test_recomputing_takes_time_of_the_update_alone():
    plain, full = (cost(ROD, replace(SETUP, recompute=kind)) for kind in ("none", "full"))
    assert full.update_seconds == pytest.approx(plain.update_seconds * 4 / 3)
    assert full.scoring_seconds == plain.scoring_seconds
    assert full.scoring_share == pytest.approx(2 / 6)  # m / (m + 4)
    assert full.flops == pytest.approx(10 * (4 * 32 + 64) * 1000 * FLOPS)
    slow = cost(ROD, replace(SETUP, host_seconds=0.5))
    assert slow.update_seconds == pytest.approx(plain.update_seconds + 0.5)
    assert slow.flops == plain.flops


def test_recomputing_costs_a_share_of_a_forward_pass():
    assert recomputed_share(SHAPE, 1000, "none") == 0
    assert recomputed_share(SHAPE, 1000, "full") == 1
    # two layers with 4 FLOPs per channel of 16 and attended position, 500.5 on average
    attending = 2 * 4 * 16 * 500.5
    share = attending / forward_flops(SHAPE, 1000)
    assert recomputed_share(SHAPE, 1000, "selective") == pytest.approx(share)


def test_reading_a_corpus_needs_the_gpus_and_preparing_it_does_not():
    read = cost(Work(name="references_base", read=1600), SETUP)
    assert read.gpu_hours == pytest.approx(1600 * 1000 * FLOPS / 0.5e12 / 3600)
    prepare = cost(Work(name="prepare", cpu_seconds=7200, disk=5.0), SETUP)
    assert (prepare.hours, prepare.gpu_hours, prepare.flops, prepare.disk) == (2, 0, 0, 5)


def test_a_start_takes_its_time_on_every_process():
    slow = setup(startup_seconds=90.0)
    for work, seconds in ((ROD, 90), (Work(name="prepare", cpu_seconds=7200), 0)):
        plain, late = cost(work, SETUP), cost(work, slow)
        assert late.hours == pytest.approx(plain.hours + seconds / 3600)
        assert late.gpu_hours == pytest.approx(plain.gpu_hours + 4 * seconds / 3600)


def test_tokens_that_stay_in_place_take_no_disk():
    blocks = {"num_adaptation": 90, "held_adaptation": 10, "num_replay": 60, "held_replay": 0}
    config = composed("recipe=toy_synthetic")
    there = {"kind": "megatron", "files": ["x"], "options": {"copy": False}}
    new, old = ({**there, "role": role, "options": {}} for role in ROLES)
    sources = {"new": new, "old": old, "there": {**there, "role": "replay"}}
    config.domain = Domain(tokenizer="byte", block_size=128, sources=sources)
    works = stage_works(Stages(config), SHAPE, blocks)
    prepare = next(work for work in works if work.name == "prepare")
    # 36 bytes of hash and index a block, and 512 of tokens of all but half of the replay blocks
    assert prepare.disk == 160 * 36 + (100 + 30) * 512


def test_scoring_a_prefix_saves_its_share_and_the_attention_to_what_follows():
    half = forward_flops(SHAPE, 500)
    plain, short = (cost(replace(ROD, prefix=share), SETUP) for share in (1.0, 0.5))
    saved = 10 * 64 * (1000 * FLOPS - 500 * half) / 2e12
    assert plain.gpu_hours - short.gpu_hours == pytest.approx(saved * 4 / 3600)
    assert short.scored_tokens == plain.scored_tokens / 2 == 10 * 64 * 500
    assert short.flops == pytest.approx(10 * (3 * 32 * 1000 * FLOPS + 64 * 500 * half))


def test_numbers_for_people():
    counts = {0: "", 12.41e9: "12.4 G", 885e18: "885 E", 7e21: "7 Z", 512: "512 ", 999_999: "1 M"}
    assert {v: count(v) for v in counts} == counts
    assert size(369e9) == "369 GB"
    walls = {153.9: "6 d 10 h", 32.5: "32.5 h", 0.5: "30 min", 0.01: "36 s", 71.9: "3 d 0 h"}
    assert {v: wall(v) for v in walls} == walls
    assert [hours(v) for v in (2469.8, 1, 0.0123)] == ["2,469.8", "1.0", "0.012"]


@pytest.mark.parametrize(
    ("layout", "size", "part", "blocks", "expected"),
    [
        ({"data": 4}, 4, 1, 64, (64.0, 4)),
        ({"data": 4}, 4, 1, 65, (80.0, 5)),
        ({"data": 4}, 4, 1, 0, (0.0, 0)),
        ({"data": 4}, 32, 1, 64, (64.0, 1)),
        ({"data": 1000}, 4, 1, 2048, (3000.0, 1)),  # not 4 on each of them
        # 20 blocks on 3 replicas in fours: 7 each, 2 passes, 24 in all
        ({"data": 3}, 4, 1, 20, (24.0, 2)),
        # quarters of them: up to 16 in a pass, so 7 in one
        ({"data": 3}, 4, 1 / 4, 20, (21.0, 1)),
        # but a pipeline keeps its micro-batches, and an interleaved one needs pairs of them
        ({"pipeline": 2}, 4, 1 / 4, 20, (20.0, 5)),
        ({"pipeline": 2, "virtual_pipeline": 2}, 4, 1, 20, (24.0, 6)),
    ],
)
def test_the_plan_counts_the_passes_that_run(layout, size, part, blocks, expected):
    counted = replace(
        SETUP, parallel=Parallel(**layout), scoring_micro_batch_size=size, prefix=part
    )
    assert counted.padded_blocks(blocks) == expected
