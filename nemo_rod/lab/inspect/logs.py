"""Descriptions of references, curricula and metrics."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nemo_rod.commands.text import table
from nemo_rod.files import interpreting
from nemo_rod.lab.history import finite_mean, history_of
from nemo_rod.lab.metrics import read_metrics
from nemo_rod.lab.text import facts, tenths
from nemo_rod.selection import Curriculum
from nemo_rod.selection.references.folder import Folder

_SAMPLE = 1 << 20  # number of blocks whose losses are read, evenly spaced
_METRICS = (
    *("train/loss", "rod/replay_share", "rod/threshold", "rod/rho_adaptation", "rod/rho_replay"),
    *("train/lr", "timing/train/scoring", "timing/train/total"),
)
_DIGESTS = ("tokenizer", "references", "config", "seed")


def describe_references(path: Path) -> str:
    """Returns a folder of references: the origin of the losses, and their distribution."""
    folder = Folder.open(path, unfinished=True)
    manifest, present = folder.manifest, folder.present()
    size = manifest.num_blocks
    state = f"{present.sum():,} of {size:,} blocks ({present.mean():.1%})"
    if not (path / "manifest.json").exists():
        state += "; `nemo-rod reference` resumes"
    about: list[tuple[str, object]] = [*vars(manifest).items(), ("scored", state)]
    scored = manifest.start + np.flatnonzero(present)
    if not len(scored):
        return facts(about)
    sample = folder.records(scored[:: -(-len(scored) // _SAMPLE)])["loss"].astype(np.float64)
    loss = sample[:, 0]
    about += [
        ("mean loss", f"{loss.mean():.4f} nats a token, over {len(loss):,} blocks"),
        *(
            (f"of the first {length} tokens", f"{mean:.4f}")
            for length, mean in zip(manifest.lengths[1:], sample.mean(axis=0)[1:], strict=True)
        ),
    ]
    quantiles = np.quantile(loss, (0, 0.25, 0.5, 0.75, 1))
    spread = table(
        (">least", ">25 %", ">median", ">75 %", ">most"), [[f"{q:.4f}" for q in quantiles]]
    )
    return f"{facts(about)}\n\n{spread}"


def describe_curriculum(path: Path) -> str:
    """Returns the blocks drawn and trained on, over the course of the run and by source."""
    with Curriculum.open(path, read_only=True) as curriculum:
        header, history = curriculum.header, history_of(curriculum, bins=10)
        rows: list[list[object]] = []
        num_replay_B = history.chosen_BO[:, history.is_replay_O].sum(axis=1)
        score_B, scored_B = (a.sum(axis=(1, 2)) for a in (history.score_BOW, history.scored_BOW))
        for place, part in enumerate(history.bins):
            steps = part.stop - part.start
            share = num_replay_B[place] / (steps * header.num_chosen)
            row = [f"{part.start + header.first_step:,}", steps, f"{share:.1%}"]
            if header.scored:  # excluded candidates have no score
                found = [
                    float(finite_mean(history.threshold_T[part], axis=0)),
                    history.loss_B[place],
                ]
                found.append(score_B[place] / scored_B[place] if scored_B[place] else np.nan)
                row += [f"{mean:z.4f}" if np.isfinite(mean) else None for mean in found]
            rows.append(row)
        step = f"{header.num_chosen} of {header.num_candidates} blocks"
        about = facts(
            [
                ("curriculum", path),
                ("steps", f"{len(curriculum):,}, from {header.first_step}"),
                ("a step", f"{step} of {header.block_size} tokens"),
                ("block store", header.store),
                *((name, getattr(header, name)) for name in _DIGESTS),
            ]
        )
    columns = ["from step", ">steps", ">replay"]
    columns += [">threshold", ">loss", ">score"] if header.scored else []
    totals = (of_BO.sum(axis=0).tolist() for of_BO in (history.drawn_BO, history.chosen_BO))
    sources = [
        [s.role, s.name, f"{d:,}", f"{t:,}", f"{t / d:.3f}" if d else None]
        for s, d, t in zip(header.sources, *totals, strict=True)
    ]
    by_source = table(("role", "source", ">drawn", ">trained on", ">share"), sources)
    return f"{about}\n\n{table(columns, rows)}\n\n{by_source}"


def describe_metrics(path: Path) -> str:
    """Returns the metrics of a run by tenths: means over the steps that have them."""
    with interpreting(path):
        read = read_metrics(path)
    names = [name for name in _METRICS if len(read.values(name))]
    shown = []
    for part in [*tenths(len(read)), slice(0, len(read))] if len(read) else []:
        means = []
        for row, value in map(read.finite, names):
            here = value[(row >= part.start) & (row < part.stop)]
            means.append(f"{here.mean():.4g}" if len(here) else None)
        shown.append([f"{read.step_T[part.start]:,}", f"{part.stop - part.start:,}", *means])
    if shown:
        shown[-1][0] = "all"
    header = ("from step", ">steps", *(f">{name}" for name in names))
    return f"{len(read):,} steps\n\n{table(header, shown)}"
