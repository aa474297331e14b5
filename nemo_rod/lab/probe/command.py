"""`nemo-rod probe`: the recipe's own stages for a few steps, and an estimate of the whole run.

It trains without replay, which shows the forgetting of every source, and then with RoD against that
short specialist, which shows the share of replay that RoD begins with.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from nemo_rod.commands.run_stages import run, shows_dry_run
from nemo_rod.commands.text import say, table
from nemo_rod.config import Config, section
from nemo_rod.files import read_json, write_json
from nemo_rod.lab.plan.plan_text import wall
from nemo_rod.lab.probe.section import Probe
from nemo_rod.lab.report.run_files import read_run
from nemo_rod.lab.tasks.section import Tasks
from nemo_rod.run.launch import launcher_of
from nemo_rod.run.variants import arm_settings
from nemo_rod.selection.competition import FORWARD

FILE = "probe.json"
ARMS = ["base", "no_replay", "rod"]


@shows_dry_run
def probe(config: Config) -> None:
    """Runs or resumes a probe, prints its findings and writes them to `probe.json`.

    Raises:
        ValueError: its folder is that of the run, or the recipe cannot run.
    """
    run_and_report(config, probed(config), FILE, findings, text)


def run_and_report(
    config: Config,
    small: Config,
    file: str,
    findings: Callable[[Config, Config], dict[str, Any]],
    text: Callable[[dict[str, Any]], str],
) -> None:
    """Runs or resumes the small form of a recipe, then writes and prints its results."""
    run(small)
    if config.dry_run:
        return
    if launcher_of(small).submits:
        say(
            f"Once its jobs have ended, run the same command again, without a launcher, for {file}."
        )
        return
    results = findings(config, small)
    write_json(Path(small.run_dir) / file, results)
    print(text(results))


def probed(config: Config) -> Config:
    """Returns the configuration of the probe: two arms, few steps, as much text as they can use."""
    options, small = section(config, Probe), copy.deepcopy(config)
    folder = options.run_dir or f"{config.run_dir.rstrip('/')}_probe"
    if Path(folder).resolve() == Path(config.run_dir).resolve():
        raise ValueError(f"probe.run_dir={folder} is the folder of the run: choose another.")
    small.run_dir, small.arms, small.arm = folder, [*ARMS], None
    small.train = dataclasses.replace(config.train, steps=min(options.steps, config.train.steps))
    small.checkpoint.every, small.validation.every = small.train.steps, 0
    tasks = section(small, Tasks)
    tasks.capabilities, tasks.held_out = {}, 0
    most = text_needed(small)
    sources = {name: dict(values) for name, values in config.domain.sources.items()}
    for spec in config.domain.specs:
        cap = min(spec.max_tokens or most, most)
        with suppress(ValueError):  # a blend of files with weights takes no cap
            dataclasses.replace(spec, max_tokens=cap)
            sources[spec.name]["max_tokens"] = cap
    small.domain = dataclasses.replace(small.domain, sources=sources)  # parsed anew
    return small


def text_needed(small: Config) -> int:
    """Returns the number of tokens in the pools of both arms, and a tenth more for the holdout."""
    drawn = max(arm_settings(small, name).planned.num_candidates for name in ARMS[1:])
    blocks = max(2 * small.train.batch_size, drawn) * small.train.steps
    return int(1.1 * blocks * small.domain.block_size)


def findings(config: Config, small: Config) -> dict[str, Any]:
    """Returns the results of a finished probe, and the expected cost of the whole run."""
    folder, train = Path(small.run_dir), config.train
    arms = read_json(folder / "report" / "results.json", "arms")["arms"]
    facts = {name: arm.facts for name, arm in read_run(folder).arms.items()}
    plain, rod = (facts[name]["seconds_per_step"] for name in ARMS[1:])
    rod_arm = arm_settings(config, "rod").planned
    references = FORWARD * train.steps * rod_arm.num_candidates / train.batch_size  # plain steps
    hours = (train.steps * (plain + rod) + references * plain) / 3600
    processes, price = config.parallel.world_size, section(config, Probe).price
    deciles = arms["rod"]["share_by_decile"]
    return {
        "recipe": config.recipe,
        "steps": small.train.steps,
        "adapt_loss": {name: arms[name]["adapt_loss"] for name in ARMS},
        "forgetting_by_source": {name: arms[name]["forgetting_by_source"] for name in ARMS[1:]},
        "val_forgetting": {name: arms[name]["val_forgetting"] for name in ARMS[1:]},
        "replay_share": {"first": deciles[0], "last": deciles[-1]},
        "seconds_per_step": {"no_replay": plain, "rod": rod},
        "whole_run": {
            "steps": train.steps,
            "hours": hours,
            "process_hours": hours * processes,
            "cost": None if price is None else price * hours * processes,
        },
    }


def text(results: dict[str, Any]) -> str:
    """Returns the findings for a terminal."""
    loss, forgotten = results["adapt_loss"], results["forgetting_by_source"]
    share, whole = results["replay_share"], results["whole_run"]
    rows = [
        (name, f"{value:+z.4f}", f"{forgotten['rod'][name]:+z.4f}")
        for name, value in sorted(forgotten["no_replay"].items(), key=lambda item: -item[1])
    ]
    cost = "" if whole["cost"] is None else f", which cost {whole['cost']:,.0f}"
    return f"""
{results["recipe"]}, {results["steps"]} steps of {whole["steps"]}. Held-out loss on the new \
domain: base {loss["base"]:.3f}, no replay {loss["no_replay"]:.3f}, RoD {loss["rod"]:.3f}.

Loss on the replay sources, against the base (nats per token):
{table(("replay source", ">no replay", ">RoD"), rows)}

Share of replay that RoD chose: {share["first"]:.0%} in the first tenth of the steps, \
{share["last"]:.0%} in the last.

A whole run of no_replay and rod, with both references, at the speed measured here: \
{wall(whole["hours"])}, {whole["process_hours"]:.1f} hours of one process{cost}.

Not known from this: how far forgetting goes in {whole["steps"]} steps, and the share by then; \
both change with training, and the specialist here is as short as the probe. Sources are cut to \
what the probe can use, so their sizes, which decide the mixture, are not those of the run. The \
time leaves out preparing, start-up, queues, checkpoints, evaluation and tasks."""
