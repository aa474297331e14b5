"""Makes the tables of README and docs/research from the raw numbers beside the pages.

    python benchmarks/_tables.py [--check]

A line `<!-- table NAME: made by make docs -->` stands above a table whose body is written here; its
head is the page's. `make docs` writes them all; with --check, a page that would change is named.

With --check, so is a number in prose, of two decimals or more, that nothing stands behind. It is in
a table of its page, or a comment of the page explains it, wherever it stands there:

    <!-- prose: 0.109 = 1.730 - 1.621; 0.016 = smollm2/laws_42:arms.rod.forgetting_by_source.own -->
    <!-- prose, set or said before: 0.15 0.08 -->
    <!-- prose, no raw numbers were kept: 0.994 -->

The operands are numbers in tables of the page, whole numbers, and values in files of raw numbers.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESEARCH = ROOT / "docs" / "research"
# pages that tell of research elsewhere
TELLING = (ROOT / "README.md", *(ROOT / "docs" / f"{n}.md" for n in ("should-i", "cheaper", "mix")))
MARK = re.compile(r"<!-- table (\w+): made by make docs -->\n\n((?:\|.*\n)+)")
Arms = dict[str, dict[str, Any]]
Row = Sequence[str]


def read(name: str) -> Any:
    return json.loads((RESEARCH / f"{name}.json").read_text())


def controls() -> list[Arms]:
    """131 k parameters; three seeds of everything, the base included."""
    return [read(f"controls/seed_{seed}")["arms"] for seed in (1, 2, 3)]


def spread(values: Iterable[float], form: str) -> str:
    """The mean, and the range where it shows."""
    values = list(values)
    ends = [format(value, form) for value in (min(values), max(values))]
    mean = format(sum(values) / len(values), form)
    return mean if ends[0] == ends[1] else f"{mean} ({ends[0]} to {ends[1]})"


def of(runs: list[Arms], name: str, key: str, form: str) -> str:
    return spread([run[name][key] for run in runs], form)


def better(runs: list[Arms], name: str) -> str:
    """How much better than the chord of fixed replay, nats; raw numbers have the other sign."""
    return spread([-run[name]["gap"] for run in runs], "+.3f")


def readme() -> list[Row]:
    runs, rows = controls(), list[Row]()
    rod = [run["rod"] for run in runs]
    labels = {"no_replay": "no replay", "fixed_32": "fixed replay, 32 %", "rod": "RoD"}
    costs = {"rod": "1.67, and once 1.67 for its references"}
    for name, label in labels.items():
        mean = {k: sum(run[name][k] for run in runs) / 3 for k in rod[0] if k in KEYS}
        share = f"{100 * mean['replay_share']:.0f} %" + ", chosen" * (name == "rod")
        losses = (f"{mean[key]:.3f}" for key in ("adapt_loss", "val_forgetting"))
        rows.append([label, *losses, share, costs.get(name, "1")])
    chord = sum(arm["adapt_loss"] - arm["gap"] for arm in rod) / 3
    forgotten = sum(arm["val_forgetting"] for arm in rod) / 3
    rows.append(["fixed replay at RoD's forgetting, interpolated", f"{chord:.3f}",
                 f"{forgotten:.3f}", "", "1"])  # fmt: skip
    return rows


KEYS = ("adapt_loss", "val_forgetting", "replay_share")


def over_seeds(runs: list[Arms], labels: dict[str, str], *, of_rod: bool = False) -> list[Row]:
    """Arms over the seeds that ran them; `of_rod` adds the share of RoD's gain, and all costs."""
    rows = list[Row]()
    for name, label in labels.items():
        arms = [run for run in runs if name in run]
        share = sum(run[name]["replay_share"] for run in arms) / len(arms)
        is_judged = arms[0][name]["gap"] is not None
        losses = (of(arms, name, key, ".3f") for key in ("adapt_loss", "val_forgetting"))
        gap = better(arms, name) if is_judged else ""
        row = [label, *losses, f"{share:.3f}" if share else "0", gap]
        if of_rod:
            kept = [f"{100 * run[name]['gap'] / run['rod']['gap']:.0f}" for run in arms if gap]
            shares = ", ".join(kept) + " %" * bool(kept)
            row += [shares, of(arms, name, "cost_in_all", ".2f")]
        rows.append(row)
    return rows


def controls_arms() -> list[Row]:
    names = ("no_replay", "fixed_20", "fixed_32", "fixed_50", "fixed_70", "rod", "rod_offline",
             "rod_mixture")  # fmt: skip
    return over_seeds(controls(), {name: f"`{name}`" for name in names})


MIX = {
    "fixed_20": "`fixed_20`", "fixed_32": "`fixed_32`", "fixed_43": "`fixed_43`",
    "fixed_65": "`fixed_65`", "rod": "`rod`", "rod_averages": "`rod_averages`",
    "mix_specialist": "`rod_mix`, target `specialist`", "rod_mix": "`rod_mix`",
    "mix_m30": "`rod_mix`, target 1.28", "mix_m15": "`rod_mix`, target 1.43",
    "mix_p00": "`rod_mix`, target 1.58", "mix_p15": "`rod_mix`, target 1.73",
    "mix_p30": "`rod_mix`, target 1.88", "bound_15": "`rod_mix`, forgetting 0.15",
    "bound_08": "`rod_mix`, forgetting 0.08",
    "parts_4": "sources split into 4 by the base's loss",
}  # fmt: skip


def mix() -> list[Row]:
    runs = [read(f"mix/seed_{seed}")["arms"] for seed in (42, 43, 44)]
    return over_seeds(runs, MIX, of_rod=True)


def mix_base() -> list[Row]:
    runs = [read(f"mix/base_{seed}")["arms"] for seed in (43, 44)]
    return over_seeds(runs, {name: MIX[name] for name in MIX if name in runs[1]}, of_rod=True)


def mix_french() -> list[Row]:
    arms = read("mix/french")["arms"]
    labels = {name: f"`{name}`" for name in arms if name not in MIX} | MIX
    return over_seeds([arms], {name: labels[name] for name in arms}, of_rod=True)


PRACTICE = {
    "no_replay": "no replay", "fixed_20": "fixed replay, 20 %", "fixed_32": "32 %",
    "fixed_43": "43 %", "fixed_50": "50 %", "fixed_65": "65 %", "fixed_80": "80 %",
    "rod": "RoD", "rod_mix": "`rod_mix`",
    "fixed_32_kl_base_0.3": "32 %, KL of 0.3", "fixed_20_kl_base_1": "20 %, KL of 1",
    "fixed_32_kl_base_1": "32 %, KL of 1", "fixed_20_kl_base_3": "20 %, KL of 3",
    "fixed_32_kl_base_3": "32 %, KL of 3", "fixed_20_kl_base_10": "20 %, KL of 10",
    "fixed_32_kl_base_10": "32 %, KL of 10", "fixed_20_kl_base_30": "20 %, KL of 30",
    "mix_kl": "`rod_mix`, KL of 1", "rod_kl": "RoD, KL of 1", "rod_kl_base_3": "RoD, KL of 3",
    "fixed_20_l2_base_0.01": "20 %, L2-SP of 0.01", "fixed_20_sfa_80": "20 %, SFA every 80 steps",
    "fixed_20_adapters": "20 %, LoRA of rank 8, ten times the rate",
    "lower_lr_3": "no replay, a third of the rate",
    "fixed_20_lower_lr_3": "20 %, a third of the rate",
    "fixed_32_lower_lr_0.5": "32 %, twice the rate",
    "fixed_43_lower_lr_0.5": "43 %, twice the rate",
    "fixed_50_lower_lr_0.5": "50 %, twice the rate", "rod_fast": "RoD, twice the rate",
    "kl_fast": "32 %, KL of 1, twice the rate", "kl_3_fast": "32 %, KL of 3, twice the rate",
    "rod_kl_fast": "RoD, KL of 1, twice the rate",
    "fixed_43_total": "43 % for RoD's cost in all",
    "fixed_65_total": "65 % for RoD's cost in all",
}  # fmt: skip


def practice() -> list[Row]:
    runs = [read(f"practice/seed_{seed}")["arms"] for seed in (44, 45, 46)]
    rows = list[Row]()
    for name, label in PRACTICE.items():
        arms = [run for run in runs if name in run]
        losses = [of(arms, name, key, ".3f") for key in KEYS]
        gap = better(arms, name) if arms[0][name]["gap"] is not None else ""
        costs = [of(arms, name, key, ".2f") for key in ("cost", "cost_in_all")]
        rows.append([label, *losses, gap, *costs, f"{len(arms)}"])
    return rows


def sizes() -> list[Row]:
    rows = list[Row]()
    sets: tuple[tuple[str, list[Arms]], ...] = (
        ("40 k", [run["arms"] for run in read("sizes/40k_seeds")]),
        ("131 k", controls()),
        ("500 k", [read("sizes/500k")["arms"]]),
        ("1.7 M", [read("sizes/2m")["arms"]]),
    )
    for label, runs in sets:

        def mean(name: str, key: str, runs: list[Arms] = runs) -> str:
            return f"{sum(run[name][key] for run in runs) / len(runs):.3f}"

        pairs = [
            ", ".join(mean(name, key) for key in ("adapt_loss", "val_forgetting"))
            for name in ("no_replay", "fixed_32", "rod")
        ]
        gaps = [
            better(runs, name) if all(name in run for run in runs) else ""
            for name in ("rod", "rod_quarter", "rod_averages")
        ]
        rows.append([label, *pairs, mean("rod", "replay_share"), *gaps])
    return rows


def generated() -> list[Row]:
    runs = [read(f"generated/seed_{seed}") for seed in (42, 7, 8)]
    rows = list[Row]()
    for name in ("no_replay", "fixed_20", "fixed_32", "fixed_50", "rod", "rod_averages"):
        cells = []
        for half in ("real", "generated"):
            arms = [run[half] for run in runs]
            mean = sum(arm[name]["adapt_loss"] for arm in arms) / 3
            cells += [f"{mean:.3f}", of(arms, name, "val_forgetting", ".3f")]
        rows.append([f"`{name}`", *cells])
    return rows


def budgets() -> list[Row]:
    names = ("rod", "rod_averages", "rod_every_8_compute_matched", "rod_quarter_compute_matched",
             "rod_compute_matched")  # fmt: skip
    return [
        [f"{steps:,}", *(better([read(f"budgets/{steps}")["arms"]], n) for n in names)]
        for steps in (160, 320, 640, 1280)
    ]


def ideas() -> list[Row]:
    labels = {
        "rod": ("`rod`", "1.67"), "adaptation_exact": ("new text scored, replay estimated", "1.33"),
        "replay_exact": ("replay scored, new text estimated", "1.33"),
        "rod_averages": ("`rod_averages`", "1.00"),
        "clusters": ("averages by content instead of source", "1.00"),
    }  # fmt: skip
    runs, rows = controls(), list[Row]()
    for name, (label, work) in labels.items():
        kept = [f"{100 * run[name]['gap'] / run['rod']['gap']:.0f}" for run in runs]
        share = f"{kept[0] if name == 'rod' else ', '.join(kept)} %"
        rows.append([label, *(f"{-run[name]['gap']:.4f}" for run in runs), share, work])
    return rows


def transfers(table: str) -> list[Row]:
    file, labels = _TRANSFERS[table]
    found, rows = read(file), list[Row]()
    runs = [run["arms"] for run in (found if isinstance(found, list) else [found])]
    for name, label in labels.items():
        arms, own = [run[name] for run in runs], [run["rod"] for run in runs]
        mean = {key: sum(arm[key] for arm in arms) / len(arms) for key in KEYS}
        cells = [f"{mean['adapt_loss']:.3f}, {mean['val_forgetting']:.3f}"]
        cells.append(f"{mean['replay_share']:.3f}")
        kept = [100 * arm["gap"] / rod["gap"] for arm, rod in zip(arms, own, strict=True)]
        ends = dict.fromkeys(f"{value:.0f}" for value in (min(kept), max(kept)))
        if arms[0]["extrapolated"]:
            cells += ["beyond the chord", "not judged"]
        else:
            cells += [better(runs, name), "" if name == "rod" else f"{' to '.join(ends)} %"]
        rows.append([label, *cells])
    return rows


# file of raw numbers, and the arms' labels
_TRANSFERS = {
    "transfers_131k": ("sizes/transfers", {
        "rod": "`rod`, its own", "curriculum_40k": "on the curriculum of 40 k",
        "reference_40k": "with the specialist of 40 k as reference",
        "rod_averages": "`rod_averages`, which costs as little",
    }),
    "transfers_500k": ("sizes/500k", {
        "rod": "`rod`, its own", "curriculum_131k": "on the curriculum of 131 k (1 to 3.8)",
        "curriculum_40k": "on the curriculum of 40 k (1 to 12.5)",
        "reference_131k": "with the specialist of 131 k as reference",
        "reference_40k": "with the specialist of 40 k as reference",
        "rod_averages": "`rod_averages`",
    }),
    "transfers_2m": ("sizes/2m", {
        "rod": "`rod`, its own", "curriculum_500k": "on the curriculum of 500 k (1 to 3.4)",
        "curriculum_131k": "on the curriculum of 131 k (1 to 13)",
        "reference_500k": "with the specialist of 500 k as reference",
        "reference_131k": "with the specialist of 131 k as reference",
        "rod_averages": "`rod_averages`",
    }),
}  # fmt: skip


def scarce() -> list[Row]:
    run, rows = read("scarce/sixteenth"), list[Row]()
    for name, arm in run["arms"].items():
        if name == "base":
            continue
        losses = [f"{arm[key]:.3f}" for key in ("adapt_loss", "val_forgetting")]
        share, passes = f"{100 * arm['replay_share']:.0f} %", f"{arm['replay_passes']:.1f}"
        cost = f"{arm['compute_in_all'] / run['arms']['no_replay']['compute']:.2f}"
        rows.append([f"`{name}`", *losses, share, passes, f"{arm['new_passes']:.0f}", cost])
    return rows


def known_texts() -> list[Row]:
    texts = read("smollm2/known_texts")
    labels = {
        "man_de": "German manual pages", "help_de": "German help of LibreOffice",
        "man_en": "English manual pages", "licences": "licences", "gcide": "English dictionary",
        "help_en": "English help of LibreOffice", "git": "documentation of git",
        "perl": "documentation of Perl", "c": "C headers", "sayings": "sayings",
        "python": "sources of Python",
    }  # fmt: skip
    rows = list[Row]()
    for name, label in labels.items():
        text = texts[name]
        label += f" ({text['steps']} steps)" if text["steps"] < 100 else ""
        serves = "new domain" if text["role"] == "adaptation" else "yes" if text["known"] else "no"
        rows.append([label, f"{text['loss']:.3f}", f"{text['gain']:.3f}", serves])
    return rows


def real_english() -> list[Row]:
    losses = read("smollm2/real_english")
    labels = {
        "gcide": "English dictionary", "python": "sources of Python", "sayings": "sayings",
        "c": "C headers", "perl": "documentation of Perl", "licences": "licences",
        "git": "documentation of git", "man_en": "English manual pages",
        "help_en": "English help of LibreOffice",
    }  # fmt: skip
    arms = ("no_replay", "fixed_20", "fixed_50", "rod")
    rise = {arm: {n: losses[arm][n] - losses["base"][n] for n in labels} for arm in arms}
    rows = [[label, *(f"{rise[arm][n]:.3f}" for arm in arms)] for n, label in labels.items()]
    means = (sum(rise[arm].values()) / len(labels) for arm in arms)
    return [*rows, ["mean", *(f"{mean:.3f}" for mean in means)]]


def smollm2() -> list[Row]:
    runs = [read(f"smollm2/seed_{seed}")["arms"] for seed in (42, 43, 44)]
    rows = list[Row]()
    for name in ("base", "no_replay", "fixed_20", "fixed_50", "merge_0.4", "merge_0.8", "rod",
                 "rod_compute_matched", "rod_averages"):  # fmt: skip
        arms = [run[name] for run in runs if name in run]

        def each(values: Iterable[float | None], bold: bool = name == "rod") -> str:
            cells = [f"{v:z.3f}" for v in values if v is not None]
            return f"**{', '.join(cells)}**" if bold else ", ".join(cells)

        loss = each(arm["adapt_loss"] for arm in arms)
        own = each(arm["forgetting_by_source"]["own"] for arm in arms)
        share = each((arm["replay_share"] for arm in arms), bold=False)
        compute = f"{arms[0]['compute']:.0f}"
        if name == "base":
            loss, own, compute = f"{arms[0]['adapt_loss']:.3f}", "0", ""
        rows.append([
            f"**`{name}`**" if name == "rod" else f"`{name}`", loss, own,
            "0" if name == "no_replay" else share, compute,
        ])  # fmt: skip
    return rows


TABLES: dict[str, Callable[[], list[Row]]] = {
    "readme": readme, "controls": controls_arms, "sizes": sizes, "generated": generated,
    "budgets": budgets, "ideas": ideas, "known_texts": known_texts,
    **{name: partial(transfers, name) for name in _TRANSFERS},
    "real_english": real_english, "scarce": scarce, "smollm2": smollm2, "mix": mix,
    "mix_base": mix_base,
    "mix_french": mix_french,
    "practice": practice,
}  # fmt: skip


def made(text: str) -> str:
    """A page with its tables made again."""

    def table(match: re.Match[str]) -> str:
        head = match[2].splitlines()[:2]
        rows = [f"| {' | '.join(row)} |".replace("|  |", "| |") for row in TABLES[match[1]]()]
        lines = "\n".join([*head, *rows]).replace("|  |", "| |")
        return f"{match[0].partition(chr(10))[0]}\n\n{lines}\n"

    return MARK.sub(table, text)


NUMBER = re.compile(r"(?<![\w.])\d*\.\d\d+(?!\w|\.\d)")  # no version, and no power of ten
SAID = re.compile(r"<!-- prose(.*?):\s+(.*?)-->", re.DOTALL)
ROW = re.compile(r"^\|.*$", re.MULTILINE)
NO_PROSE = re.compile(r"```.*?```|<!--.*?-->|`[^`]*`|\]\([^)]*\)", re.DOTALL)


def wrong_in_prose(text: str, told: str) -> list[str]:
    """Returns the numbers of a page's prose that are in no table of `told` and not explained."""
    tables = {*NUMBER.findall("\n".join(ROW.findall(told)))}
    in_prose, known, wrong = NUMBER.findall(NO_PROSE.sub("", text)), set(tables), list[str]()
    for cell in tables:  # a number may have fewer decimals than its cell
        known |= {f"{float(cell):.{digits}f}" for digits in range(2, len(cell.partition(".")[2]))}
    for kind, said in SAID.findall(text):
        for part in said.split(";") if not kind else said.split():
            number, _, made = (word.strip() for word in part.partition("="))
            if made and not is_made_of(float(number), len(number.partition(".")[2]), made, tables):
                wrong.append(f"{number} = {made}")
            if number not in in_prose:
                wrong.append(f"{number}, explained and not there")
            known.add(number)
    return wrong + [n for n in in_prose if n not in known and f"0{n}" not in known]


def is_made_of(number: float, digits: int, made: str, tables: set[str]) -> bool:
    """Returns whether a formula gives a number but for its sign, to a unit of its last digit."""

    def value(match: re.Match[str]) -> str:
        found = read(match[1])
        for key in match[2].split("."):
            found = found[int(key) if isinstance(found, list) else key]
        return repr(float(found))

    formula = re.sub(r"([\w/]+):([\w.]+)", value, made)
    typed = NUMBER.findall(re.sub(r"([\w/]+):([\w.]+)", "", made))
    assert re.fullmatch(r"[\d.e+*/() -]+", formula), f"{made} is no formula"
    unit = 10.0**-digits * (1 if typed else 0.5)
    return tables.issuperset(typed) and abs(abs(eval(formula)) - number) < unit * 1.001


def main() -> None:
    """Writes the pages, or names those that would change, and their numbers that are typed."""
    changed, everywhere = [], "".join(page.read_text() for page in RESEARCH.glob("*.md"))
    for page in (*TELLING, *sorted(RESEARCH.glob("*.md"))):
        text = page.read_text()
        if (new := made(text)) != text:
            changed.append(page.relative_to(ROOT).as_posix())
            if "--check" not in sys.argv:
                page.write_text(new)
        told = everywhere if page in TELLING else text
        prose = text if page in TELLING[1:] else ROW.sub("", text)  # their rows are typed, too
        for number in wrong_in_prose(prose, told) if "--check" in sys.argv else ():
            changed.append(f"{page.relative_to(ROOT).as_posix()} ({number})")
    print("changed:" if changed else "every table is that of its raw numbers", *changed)
    if changed and "--check" in sys.argv:
        sys.exit(1)


if __name__ == "__main__":
    main()
