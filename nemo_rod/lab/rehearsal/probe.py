"""`nemo-rod probe`: the recipe's own stages for a few steps, and what they say about a whole run.

Three short arms, on the recipe's own model and layout: plain steps on the new text, which show the
forgetting of every source; plain steps on the old text, which show what the base knows of it; and
RoD against the first of them, which shows the share of replay that RoD begins with.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from nemo_rod.commands.run_stages import run, shows_dry_run
from nemo_rod.commands.text import say, table
from nemo_rod.config import Config, section
from nemo_rod.files import read_json, read_lines, write_json
from nemo_rod.lab.history import NUM_DECILES
from nemo_rod.lab.metrics import read_metrics
from nemo_rod.lab.plan.command import make_plan
from nemo_rod.lab.plan.plan_text import wall
from nemo_rod.lab.plan.work import corpus_blocks
from nemo_rod.lab.rehearsal.derive import cap_sources, cut_short
from nemo_rod.lab.rehearsal.preflight import with_sizes
from nemo_rod.lab.rehearsal.section import Probe
from nemo_rod.lab.report.run_files import Run, read_run
from nemo_rod.lab.tasks.section import Tasks
from nemo_rod.run.launch import launcher_of
from nemo_rod.run.stages import Stages
from nemo_rod.selection.competition import FORWARD
from nemo_rod.selection.policies import reference_roles

FILE = "probe.json"
OLD_TEXT = "replay_alone"  # the arm that trains on replay alone
ARMS = ["base", "no_replay", OLD_TEXT, "rod"]
# A source is known if training on it gains at most this share of what as many blocks of new text
# gain, and nothing is judged where that is less than `LEAST` nats per token.
MOST, LEAST = 1 / 4, 0.05
_VALIDATIONS = 10  # validations of an arm
_WARM_UP = 3  # steps that are not timed: compilation, and the first use of memory


@shows_dry_run
def probe(config: Config) -> None:
    """Runs or resumes a probe, prints its findings and writes them to `probe.json`.

    Raises:
        ValueError: its folder is that of the run, or the recipe cannot run.
    """
    small = probe_config(config)
    run(small)
    if config.dry_run:
        return
    if launcher_of(small).submits:
        say(f"Once its jobs have ended, the same command without a launcher writes {FILE}.")
        return
    results = findings(config, small)
    write_json(Path(small.run_dir) / FILE, results)
    print(text(results))


def probe_config(config: Config) -> Config:
    """Returns the configuration of the probe: few steps, and as much text as they can use."""
    options = section(config, Probe)
    folder = Path(options.run_dir or f"{config.run_dir.rstrip('/')}_probe")
    if folder.resolve() == Path(config.run_dir).resolve():
        raise ValueError(f"probe.run_dir={folder} is the folder of the run: choose another.")
    small = cut_short(config, folder, scale=min(1.0, options.steps / config.train.steps))
    small.run_dir = str(folder)
    small.arms, small.pretrain = [*ARMS], config.pretrain  # a base must know something to forget it
    small.variants[OLD_TEXT] = {"of": "rod", "share": 1.0, "selection": {"balance": "exact"}}
    small.checkpoint.every = small.train.steps
    small.validation.every = max(1, small.train.steps // _VALIDATIONS)
    tasks = section(small, Tasks)
    tasks.capabilities, tasks.held_out = {}, 0
    cap_sources(small)
    return small


def findings(config: Config, small: Config) -> dict[str, Any]:
    """Returns the results of a finished probe, and the expected cost of the whole run.

    Raises:
        ValueError: an arm has diverged.
    """
    folder, train = Path(small.run_dir), config.train
    read = read_json(folder / "report" / "results.json", "arms", "disagreements")
    arms = read["arms"]
    if not {*ARMS} <= {*arms}:
        raise ValueError(f"The probe has no findings: {' '.join(read['disagreements'])}")
    loss = {name: arms[name]["adapt_loss"] for name in ARMS}
    forgotten = {name: arms[name]["forgetting_by_source"] for name in ARMS[1:]}
    plan = make_plan(with_sizes(config))
    speed = {name: _speed(config, folder, name, plan) for name in ("no_replay", "rod")}
    plain, rod = (speed[name]["seconds_per_step"] for name in ("no_replay", "rod"))
    hours = (train.steps * (plain + rod) + _reference_steps(config) * plain) / 3600
    processes, price = config.parallel.world_size, section(config, Probe).price
    run = read_run(folder)
    history = run.arms["rod"].history
    assert history is not None
    shares = np.array_split(history.share_T, min(NUM_DECILES, len(history.share_T)))
    return {
        "recipe": config.recipe,
        "steps": small.train.steps,
        "adapt_loss": loss,
        "forgetting_by_source": forgotten,
        "val_forgetting": {name: arms[name]["val_forgetting"] for name in ARMS[1:]},
        "known": knowledge(run, loss["base"] - loss["no_replay"], forgotten[OLD_TEXT]),
        "replay_share": {"first": float(shares[0].mean()), "last": float(shares[-1].mean())},
        "speed": speed,
        "processor": plan.assumptions["name"],
        "peak_tflops": plan.assumptions["peak_tflops"],
        "planned_gib": plan.memory.total / 2**30,
        "whole_run": {
            "steps": train.steps,
            "hours": hours,
            "process_hours": hours * processes,
            "cost": None if price is None else price * hours * processes,
        },
    }


def _reference_steps(config: Config) -> float:
    """Returns the cost of RoD's references in plain steps: of every block that it draws, once."""
    stages = Stages(config)
    try:
        blocks = corpus_blocks(stages)
    except ValueError:  # how large the text is, is not known
        blocks = corpus_blocks(Stages(with_sizes(config)))
    arm, train = stages.jobs.arm("rod", blocks), stages.jobs.settings("rod").train
    drawn = arm.candidates.drawn(train.steps, reference_roles(arm.needs))
    return float(FORWARD * drawn.sum() / train.batch_size)


def knowledge(probe: Run, gained: float, forgotten: dict[str, float]) -> dict[str, dict[str, Any]]:
    """Judges by source whether the base knows a text; only what it knows can be forgotten.

    Args:
        probe: the files of the probe.
        gained: by how much plain steps on the new text lower the loss there, nats per token.
        forgotten: change of loss by source from plain steps on the old text, nats per token.

    Returns:
        By source: `gain`, `limit`, and `known`: null if as many blocks of new text, which `steps`
        plain steps take, gain less than `LEAST`.
    """
    history = probe.arms[OLD_TEXT].history
    assert history is not None
    counts = dict(zip(history.source_names, history.chosen_BO.sum(0).tolist(), strict=True))
    rows = read_lines(probe.folder / "arms" / "no_replay" / "metrics.jsonl", "step")
    curve: dict[int, float] = {}
    for row in rows:
        values = [v for k, v in row.items() if k.startswith("validation/adaptation/") and v]
        curve |= {row["step"] + 1: fmean(values)} if values else {}
    last = curve.get(max(curve, default=0), 0.0)
    # gains on the blocks of all validations, shifted to the gain on all held-out ones
    gains = {0: 0.0} | {step: gained - (loss - last) for step, loss in curve.items()}
    gains[probe.arms["no_replay"].facts["steps"]] = gained
    verdicts: dict[str, dict[str, Any]] = {}
    for source, change in forgotten.items():
        steps = counts[source] / history.batch_size
        new = float(np.interp(steps, [*gains], [*gains.values()]))
        judged = -change <= MOST * new if new >= LEAST else None
        verdicts[source] = {"gain": -change, "limit": MOST * new, "steps": steps, "known": judged}
    return verdicts


def _speed(config: Config, folder: Path, name: str, plan: Any) -> dict[str, Any]:
    """Returns medians over the steps of an arm, beside the figures of the plan."""
    metrics = read_metrics(folder / "arms" / name / "metrics.jsonl")
    names = ("timing/train/total", "throughput/model_tflops_per_gpu")
    since = min(_WARM_UP, len(metrics) - 1)
    seconds, tflops = (float(np.median(metrics.values(key, since))) for key in names)
    peaks = metrics.values("memory/peak_gib", since).tolist()
    planned = next((stage for stage in plan.stages if stage.name == name), None)
    return {
        "seconds_per_step": seconds,
        "planned_seconds_per_step": planned and planned.update_seconds + planned.scoring_seconds,
        "tokens_per_second": config.train.batch_size * config.domain.block_size / seconds,
        "tflops_per_process": tflops,
        "mfu": tflops / plan.assumptions["peak_tflops"],
        "peak_gib": max(peaks, default=None),
    }


def text(results: dict[str, Any]) -> str:
    """Returns the findings for a terminal."""
    loss, forgotten = results["adapt_loss"], results["forgetting_by_source"]
    share, whole, judged = results["replay_share"], results["whole_run"], results["known"]
    words = {True: "known", False: "not known", None: "not judged"}
    rows = [
        (name, f"{value:+z.4f}", f"{forgotten['rod'][name]:+z.4f}", f"{judged[name]['gain']:.4f}",
         f"{judged[name]['limit']:.4f}", words[judged[name]["known"]])
        for name, value in sorted(forgotten["no_replay"].items(), key=lambda item: -item[1])
    ]  # fmt: skip
    header = ("replay source", ">no replay", ">RoD", ">gain alone", ">limit", "the base")
    silent = [name for name, row in judged.items() if row["known"] is None]
    advice = ""
    if silent:
        advice = (
            f"\nNot judged: {', '.join(silent)}. As many blocks of new text gain less than {LEAST} "
            "nats themselves; raise probe.steps.\n"
        )
    speeds = [
        (
            name,
            *(f"{arm['seconds_per_step']:.3g}", f"{arm['planned_seconds_per_step'] or 0:.3g}"),
            *(f"{arm['tokens_per_second']:,.0f}", f"{arm['tflops_per_process']:.3g}"),
            *(f"{arm['mfu']:.0%}", arm["peak_gib"] and f"{arm['peak_gib']:.1f}"),
        )
        for name, arm in results["speed"].items()
    ]
    timed = ("arm", ">s a step", ">planned", ">tokens/s", ">TFLOP/s", ">MFU", ">peak GiB")
    part = "tenth of the steps" if results["steps"] >= NUM_DECILES else "step"
    cost = "" if whole["cost"] is None else f", which cost {whole['cost']:,.0f}"
    return f"""
{results["recipe"]}, {results["steps"]} steps of {whole["steps"]}. Held-out loss on the new \
domain: base {loss["base"]:.3f}, no replay {loss["no_replay"]:.3f}, RoD {loss["rod"]:.3f}.

Loss on the replay sources after that, against the base, and what training on replay alone gains \
(nats per token). The base knows a source that gains no more than a quarter of what as many blocks \
of new text gain: only that can be forgotten, and is worth replaying.
{table(header, rows)}
{advice}
Share of replay that RoD chose: {share["first"]:.0%} in the first {part}, {share["last"]:.0%} in \
the last.

On {results["processor"]} with a peak of {results["peak_tflops"]:,g} TFLOP/s; planned memory: \
{results["planned_gib"]:.1f} GiB a process.
{table(timed, speeds)}

A whole run of no_replay and rod, with both references, at this speed: \
{wall(whole["hours"])}, {whole["process_hours"]:.1f} hours of one process{cost}.

Not known from this: how far forgetting goes in {whole["steps"]} steps, and the share by then; \
both change with training, and the specialist here is as short as the probe. Sources are cut to \
what the probe can use, so their sizes, which decide the mixture, are not those of the run. The \
time leaves out preparing, start-up, queues, checkpoints, evaluation and tasks."""
