"""What a step of RoD costs beside a plain one, and where the difference goes.

One job trains. Its steps take turns: on a recorded curriculum (transfer), plain, by a blend that
follows the model (mix), RoD with whole candidates, with half and with a quarter of them, and a
plain one whose forward pass is measured by itself. So whatever else the machine does meets all
kinds, and every ratio is of neighbours, the median over the rounds. The model and the batch are
those of `recipe=toy`, for `blocks_512` those of `recipe=toy_long_blocks`.

    limit            1 + m * forward / plain: scoring as fast as the forward pass of training
    outside_model    all that the step waits for but the scoring forward pass and the update:
                     reading, gathering the losses, top-k, the records, and what is left to wait
                     for of the pool and its references, which are made ready while the step before
                     trains (their own time is `ms ahead`)
    scoring_over_forward    candidates a second when scored, over blocks a second in training's
                     forward pass

Times on a CPU are the processor's, of the slowest rank, so that what else runs on the machine does
not count; the ratio of wall times stands beside them. On a GPU all are wall times. Where ranks wait
for each other in gathering the losses, the rank that waits least is counted.

    python benchmarks/step.py --json rows.json [--quick] [--only single ...]
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from _made_up import make_references
from _rows import Measurement, Row, Setting, median_ms, over, run, under
from data_plane import NUM_CANDIDATES, appends, lookups, pools, write_store

from nemo_rod.corpus import BlockStore, load_tokenizer, prepare
from nemo_rod.jobs import TrainJob, read_job, write_job
from nemo_rod.lab.composing import compose_config
from nemo_rod.run.base_model import initialise_base
from nemo_rod.run.model_jobs import ModelJobs
from nemo_rod.run.run_folder import RunFolder
from nemo_rod.selection import Joint
from nemo_rod.selection.candidates import Pool

PAPER = "german_nemotron_nano_12b_v2"
# What is measured: recipes in layouts, on made-up text, since real text is not needed here
CASES = {
    "single": ("recipe=toy", "parallel=single"),
    "dp2": ("recipe=toy", "parallel=dp2"),
    "tp2": ("recipe=toy", "parallel=tp2"),
    "blocks_512": ("recipe=toy_long_blocks", "parallel=single"),
}
GOALS = {
    "rod_over_limit": 1.03,
    "prefix_half": 1.37,
    "prefix_quarter": 1.20,
    "transfer": 1.01,
    "mix": 1.01,
    "outside_model": 2.0,
}


def steps(name: str, setting: Setting) -> Iterator[Row]:
    """One case on this machine."""
    job = make_job(setting.folder, CASES[name])
    rounds = 10 if setting.quick else 40
    seconds = measure(job, rounds=rounds)
    rod, plain, forward = seconds["rod"], seconds["plain"], seconds["forward"]
    multiplier = seconds["num_candidates"] / seconds["num_chosen"]
    ratio, limit = np.median(rod / plain), 1 + multiplier * np.median(forward / plain)
    yield Row(f"rod_over_plain {name}", ratio, "x")
    wall = np.median(seconds["rod on the wall"] / seconds["plain on the wall"])
    yield Row(f"rod_over_plain.wall {name}", wall, "x")
    yield Row(f"limit {name}", limit, "x")
    yield under(f"rod_over_limit {name}", ratio / limit, "x", GOALS["rod_over_limit"])
    outside = 100 * np.median(seconds["outside"] / rod)
    yield under(f"outside_model {name}", outside, "%", GOALS["outside_model"])
    for kind in ("prefix_half", "prefix_quarter", "transfer", "mix"):
        value = np.median(seconds[kind] / plain)
        yield under(f"{kind}_over_plain {name}", value, "x", GOALS[kind])
    speed = multiplier * np.median(forward / seconds["scoring"])
    yield over(f"scoring_over_forward {name}", speed, "x", 1.0)
    parts = ("lookup", "selection", "reading", "recording", "ahead")
    for part in ("plain", "forward", "scoring", *parts):
        yield Row(f"ms {part} {name}", 1e3 * np.median(seconds[part]), "ms")


def make_job(folder: Path, overrides: tuple[str, ...]) -> Path:
    """A store of made-up text, an untrained model, made-up references, and the job."""
    block_size = compose_config(*overrides).domain.block_size
    made_up = ("domain=synthetic", f"domain.block_size={block_size}", f"run_dir={folder}", "seed=1")
    config = compose_config(*overrides, *made_up, "launcher.stall_seconds=0", "validation.every=0")
    domain = config.domain
    prepare(
        folder / "blocks", domain.specs, tokenizer=load_tokenizer("byte"),
        block_size=block_size, holdout_fraction=domain.holdout_fraction,
        holdout_seed=domain.holdout_seed,
    )  # fmt: skip
    store = BlockStore(folder / "blocks")
    assert config.model.architecture is not None
    initialise_base(config.model.architecture, folder / "model", tokenizer="byte", seed=0)
    jobs = ModelJobs(config, RunFolder(folder, config.recipe))
    references = [str(file) for file in make_references(folder / "references", store)]
    counts = {"num_adaptation": store.num_adaptation, "num_replay": store.num_replay}
    arm, start = jobs.arm("rod", counts), str(folder / "model")
    job = jobs.job(TrainJob, "rod", folder, references=references, arm=arm, start=start)
    write_job(job, folder / "job.json")
    return folder / "job.json"


def nemo_rod(*arguments: str) -> None:
    command = [sys.executable, "-m", "nemo_rod.cli", *arguments]
    subprocess.run(command, check=True, capture_output=True, text=True)


def measure(job: Path, *, rounds: int) -> dict[str, np.ndarray]:
    """Seconds of every round, float64 `[rounds]`, by kind of step and by part of a RoD step."""
    processes = read_job(job).parallel.world_size
    out = job.parent / "seconds.json"
    launch = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1")
    worker = Path(__file__).with_name("_step_worker.py")
    command = [sys.executable, *launch, f"--nproc-per-node={processes}", str(worker)]
    subprocess.run(
        [*command, str(job), str(rounds), str(out)], check=True, capture_output=True, text=True
    )
    return {name: np.array(value) for name, value in json.loads(out.read_text()).items()}


def paper(setting: Setting) -> Iterator[Row]:
    """What lies outside the model at the paper's size, over the step that the plan predicts."""
    nemo_rod("plan", f"recipe={PAPER}", f"run_dir={setting.folder}")
    plan = json.loads((setting.folder / "plan.json").read_text())
    (rod,) = (stage for stage in plan["stages"] if stage["name"] == "rod")
    step = 1e3 * (rod["scoring_seconds"] + rod["update_seconds"])
    parts = {}
    for part, measured in {
        "lookup": lookups("3_5m", 3_500_000, 1.0, setting),
        "pool": pools("pool", 3_500_000, 2.0, setting),
        "recording": appends("recording", 5.0, setting),
    }.items():
        parts[part] = next(measured).value
    rng = np.random.default_rng(0)
    score_C = rng.random(NUM_CANDIDATES, dtype=np.float32)
    ids_C = np.arange(NUM_CANDIDATES)
    pool = Pool(step=0, block_ids=ids_C, is_replay_C=rng.random(NUM_CANDIDATES) < 0.5)
    parts["top-k"] = median_ms(lambda _: Joint().select(pool, score_C, NUM_CANDIDATES // 2), 200)
    share = NUM_CANDIDATES // plan["layout"]["data"]  # that one replica reads
    write_store(setting.folder / "store", {("adaptation", "new"): 4 * share})
    store, ids = BlockStore(setting.folder / "store"), rng.permutation(4 * share)[:share]
    parts["reading"] = median_ms(lambda _: store.tokens(ids), 20, warm_up=2)
    yield under("outside_model paper", 100 * sum(parts.values()) / step, "%", 0.1)
    yield Row("ms step paper", step, "planned")
    for part, value in parts.items():
        yield Row(f"ms {part} paper", value, "ms")


MEASUREMENTS: dict[str, Measurement] = {
    **{name: partial(steps, name) for name in CASES},
    "paper": paper,
}

if __name__ == "__main__":
    run(__doc__, MEASUREMENTS)
