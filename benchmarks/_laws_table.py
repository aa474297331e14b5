"""The tables of docs/research/laws.md, from docs/research/smollm2/laws.json and laws.npz.

Differences have one sign: + nats is better. Intervals hold 90 % of 2,000 paired bootstraps over the
held-out blocks of every source, the same draws for all arms and seeds.

    python benchmarks/_laws_table.py
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

RAW = Path(__file__).parent.parent / "docs" / "research" / "smollm2"
DRAWS, SEED = 2000, 0
SEEDS = (42, 43, 44)
FRONTIER = ("no_replay", "fixed_5", "fixed_8", "fixed_12", "fixed_20")
ENGLISH = {
    "c": "C headers", "gcide": "dictionary", "git": "documentation of git",
    "help_en": "help of LibreOffice", "licences": "licences", "man_en": "manual pages",
    "perl": "documentation of Perl", "sayings": "sayings",
}  # fmt: skip
ARMS = (*FRONTIER, "fixed_like_rod", "schedule_like_rod", "source_like_rod", "rod_averages", "rod")


class Runs:
    """Held-out losses of all arms, and their means over drawn blocks; the first draw is all."""

    def __init__(self) -> None:
        self.results = json.loads((RAW / "laws.json").read_text())
        self.rows = {(row["arm"], row["seed"]): row for row in self.results["arms"]}
        with np.load(RAW / "laws.npz") as file:
            self.losses = {name: file[name].astype(np.float64) for name in file.files}
        self.weights = {row[0]: row[3] for row in self.results["store"][1:]}
        rng = np.random.default_rng(SEED)
        self.draws = {}
        for key, suffix in (("held_out", ""), ("english", "/english")):
            for name, role, start, count in self.results[key][1:]:
                drawn = rng.multinomial(count, np.full(count, 1 / count), DRAWS) / count
                rows = np.concatenate([np.full((1, count), 1 / count), drawn])
                self.draws[name + suffix] = (role, slice(start, start + count), rows)

    def source(self, arm: str, seed: int, name: str) -> np.ndarray:
        """Mean loss of a source, nats, for every draw."""
        _, place, rows = self.draws[name]
        suffix = "/english" if name.endswith("/english") else ""
        seed = 0 if arm == "base" else seed
        return rows @ self.losses[f"{arm}/{seed}{suffix}"][place]

    def adaptation(self, arm: str, seed: int) -> np.ndarray:
        parts = {n: self.weights[n] for n, (role, *_) in self.draws.items() if role == "adaptation"}
        total = sum(parts.values())
        return sum(w / total * self.source(arm, seed, n) for n, w in parts.items())

    def forgetting(self, arm: str, seed: int, name: str = "own") -> np.ndarray:
        """Signed: the loss of a source over the base's."""
        return self.source(arm, seed, name) - self.source("base", seed, name)

    def f_val(self, arm: str, seed: int) -> np.ndarray:
        parts = {name: self.weights[name] for name in ("own", "python")}
        total = sum(parts.values())
        return sum(
            w / total * np.maximum(0, self.forgetting(arm, seed, n)) for n, w in parts.items()
        )

    def gap(self, arm: str, seed: int, *, clipped: bool = False) -> np.ndarray:
        """How much better than the polyline of fixed shares at equal forgetting; NaN beyond it."""
        measure = self.f_val if clipped else self.forgetting
        others = [name for name in FRONTIER if name != arm]
        x = np.stack([measure(name, seed) for name in others])
        y = np.stack([self.adaptation(name, seed) for name in others])
        at, values = measure(arm, seed), np.full(DRAWS + 1, np.nan)
        for draw in range(DRAWS + 1):
            order = np.argsort(x[:, draw])
            if x[order[0], draw] <= at[draw] <= x[order[-1], draw]:
                values[draw] = np.interp(at[draw], x[order, draw], y[order, draw])
        return values - self.adaptation(arm, seed)


def shown(values: np.ndarray) -> str:
    if np.isnan(values[0]):
        return "beyond"
    low, high = np.nanpercentile(values[1:], (5, 95))
    return f"{values[0]:+.4f} ({low:+.4f} to {high:+.4f})"


def row(name: str, *cells: str) -> None:
    print(f"| {name} | " + " | ".join(cells) + " |")


def main() -> None:
    runs = Runs()
    seeds = {arm: [s for s in SEEDS if (arm, s) in runs.rows] for arm in ARMS} | {"base": [0]}

    def python(arm: str, seed: int) -> np.ndarray:
        return runs.forgetting(arm, seed, "python")

    for arm in ("base", *ARMS):
        share = ", ".join(f"{100 * (runs.rows[arm, s].get('share') or 0):.1f}" for s in seeds[arm])
        measures = ((runs.adaptation, 4), (runs.forgetting, 4), (python, 3), (runs.f_val, 4))
        cells = [", ".join(f"{f(arm, s)[0]:.{n}f}" for s in seeds[arm]) for f, n in measures]
        row(f"`{arm}`", share, *cells)
    print("\nRoD against another arm, mean over its seeds")
    for arm in ("fixed_like_rod", "schedule_like_rod", "source_like_rod", "rod_averages",
                "fixed_8", "fixed_12", "fixed_20"):  # fmt: skip
        cells = []
        for f in (runs.adaptation, runs.forgetting, python):
            values = [f(arm, s) - f("rod", s) for s in seeds[arm]]
            cells.append(shown(np.mean(values, axis=0)))
        row(f"`{arm}`", str(len(seeds[arm])), *cells)
    print("\nagainst the polyline of the fixed shares")
    for arm in ("rod", "rod_averages", "source_like_rod", "schedule_like_rod", "fixed_like_rod",
                "fixed_5", "fixed_8", "fixed_12"):  # fmt: skip
        values = [runs.gap(arm, s) for s in seeds[arm]]
        each = ", ".join(f"{value[0]:+.4f}" for value in values)
        row(f"`{arm}`", each, shown(np.mean(values, axis=0)))
    print("\nreal English, better than the base, mean over the seeds")
    columns = ("no_replay", "rod", "source_like_rod", "fixed_like_rod", "fixed_12", "fixed_20")
    means: dict[str, list[float]] = {arm: [] for arm in columns}
    for name in [name for name in runs.draws if name.endswith("/english")]:
        for arm in columns:
            values = [runs.forgetting(arm, s, name)[0] for s in seeds[arm]]
            means[arm].append(-float(np.mean(values)))
        row(ENGLISH[name.split("/")[0]], *(f"{means[arm][-1]:+.3f}" for arm in columns))
    row("mean", *(f"{np.mean(means[arm]):+.3f}" for arm in columns))
    print("\nRoD's share by tenth of the run, and the model's own text in its replay")
    places = [line[0] for line in runs.results["store"][1:]]
    for seed in SEEDS:
        counts = np.array(runs.rows["rod", seed]["counts"])
        replay = counts[:, [places.index("own"), places.index("python")]]
        tenths = [part.sum() / 64 / len(part) for part in np.array_split(replay, 10)]
        own = replay[:, 0].sum() / replay.sum()
        print(seed, *(f"{share:.3f}" for share in tenths), f"own {own:.3f}")
    print("\nno_replay, stopped early: German, forgetting of its own text")
    for step in (41, 82):
        arm = f"no_replay_at_{step}"
        print(
            step,
            *(f"{f(arm, s)[0]:.4f}" for s in SEEDS for f in (runs.adaptation, runs.forgetting)),
        )


if __name__ == "__main__":
    main()
