"""Whether RoD helped, against what the user would have done instead.

    (a) against fixed replay at RoD's own share, blocks at random: both losses
    (b) against fixed replay at RoD's own forgetting, between near shares alone
    (c) against fixed replay that cost as much as RoD in all, specialist and passes included
    (d) against what else one would do: other learning rates, terms of a loss, merges with the base,
        and no replay, or the smallest fixed share, stopped where it had forgotten as much

Every difference is in nats per token, and above zero where RoD is better. Its interval, of 90 %, is
over the held-out blocks, or over seeds where several runs have the difference. Forgetting has its
sign: a replay source that improves counts as such.

Shape suffixes: B = draws of held-out blocks, A = arms.
"""

from __future__ import annotations

import copy
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from nemo_rod.commands.text import table
from nemo_rod.lab.report.early_stops import at_forgetting
from nemo_rod.lab.report.intervals import PERCENTILES, Draws, draws_of
from nemo_rod.lab.report.results import Results, same_budget
from nemo_rod.lab.report.run_files import Losses, Run
from nemo_rod.lab.report.table import arms_table
from nemo_rod.selection.arm_names import parse_arm

NEAR = 0.25  # difference of two shares that are near, as a part of RoD's
NEAREST = 0.02  # difference that always is: a block or two of a batch
FORGOTTEN = 0.01  # nats; with less, replay has nothing to prevent
LOGARITHMIC = 0.01  # least forgetting that is interpolated in its logarithm
REPEATED = 2.0  # passes of a fixed arm through its replay, for one of RoD's, that are too many
_TOLD = {
    "better": "better in both",
    "worse": "worse in both",
    "trade": "a trade",
    "not_judged": "no difference that these blocks can show",
}
# of Student's t, two-sided 90 %, by degrees of freedom; `_t90` has more
_T90 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)


class FixedArm(NamedTuple):
    """An arm of fixed replay: blocks at random, in a share that does not depend on the model."""

    name: str
    share: float  # replay among its blocks
    forgetting: float  # signed
    is_as_long: bool  # whether it was trained on as many tokens as RoD


def verdict_of(run: Run, results: Results) -> dict[str, Any] | None:
    """Returns the verdict of one run as plain values; None without RoD or without forgetting."""
    rod = results["arms"].get("rod")
    if rod is None or None in (rod["adapt_loss"], rod["signed_forgetting"], rod["replay_share"]):
        return None
    drawn, fixed = draws_of(run), fixed_arms(results["arms"])
    arms, share = results["arms"], rod["replay_share"]
    near = [arm for arm in fixed if arm.is_as_long and abs(arm.share - share) <= _near(share)]
    best = min(near, key=lambda arm: abs(arm.share - share), default=None)
    difference = _differences(arms, drawn, best.name) if best else None
    frontier, cost = _on_frontier(arms, drawn), _at_total_cost(arms, drawn, fixed)
    passes = {name: arm.get("replay_passes") or 0.0 for name, arm in arms.items()}
    often = REPEATED * max(1.0, passes["rod"])
    compared = sorted({*frontier["between"], cost["against"]} - {None})
    stops, early = results["early_stops"], dict[str, Any]()  # of no replay and the smallest share
    for name in [arm.name for arm in fixed if arm.name in stops][:2] if stops.get("rod") else ():
        ours, last = stops["rod"][-1], stops[name][-1]
        if (stop := at_forgetting(stops[name], ours["signed_forgetting"])) is not None:
            value = stop["adapt_loss"] - ours["adapt_loss"]
            steps = {"step": stop["step"], "steps": last["step"]}
            early[name] = {"value": value, "low": None, "high": None, **steps}
    return {
        "against": best.name if best else None,
        "difference": difference,
        "distance": best.share - share if best else None,
        "says": _says(difference) if difference else "not_judged",
        "missing": "" if best else _missing(fixed, share),
        "frontier": frontier,
        "total_cost": cost,
        "alternatives": {name: _differences(arms, drawn, name) for name in _alternatives(arms)},
        "early_stops": early,
        "repeated": {name: passes[name] for name in compared if passes[name] > often},
        "forgotten": (arms.get("no_replay") or {}).get("val_forgetting"),
    }


def across_seeds(verdicts: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Returns the first run's verdict, with means over the runs that have the same comparison.

    Its intervals are then over seeds, and its advice is of all of them.
    """
    first = verdicts[0]
    if first is None:
        return None
    others = [v for v in verdicts[1:] if v is not None and v["against"] == first["against"]]
    merged, alone = copy.deepcopy(first), list[tuple[str, str]]()
    for place, own in _compared(merged).items() if others else ():
        known = [compared[place] for v in others if place in (compared := _compared(v))]
        if len(known) < len(others):
            alone.append(place)
            continue
        for key, difference in _over_seeds([own, *known]).items():
            own[key].update(difference)
    if merged["difference"]:
        merged["says"] = _says(merged["difference"])
    merged["first_alone"] = [list(place) for place in alone]  # kind and arms
    merged["shown"] = {
        key: None if d["low"] is None else (d["high"] - d["low"]) / 2
        for key, d in (merged["difference"] or {}).items()
    }
    return merged | {"advice": advice(merged), "seeds": 1 + len(others)}


def _compared(verdict: Results) -> dict[tuple[str, str], dict[str, Any]]:
    """Returns the known differences of a verdict, by kind and by the arms that they are with."""
    frontier, cost = verdict["frontier"], verdict["total_cost"]
    compared = {
        ("difference", str(verdict["against"])): verdict["difference"],
        ("frontier", " ".join(frontier["between"])): frontier["difference"]
        and {"": frontier["difference"]},
        ("total_cost", str(cost["against"])): cost["difference"],
        **{("alternatives", name): value for name, value in verdict["alternatives"].items()},
        **{("early_stops", name): {"": stop} for name, stop in verdict["early_stops"].items()},
    }
    return {place: value for place, value in compared.items() if value}


def advice(verdict: Results) -> str:
    """Returns one sentence: what to do."""
    forgotten, says = verdict["forgotten"], verdict["says"]
    if forgotten is not None and forgotten < FORGOTTEN:
        return (
            f"Nothing was forgotten even without replay ({forgotten:.3f} nats): train longer, or "
            "replay what the base knows better; here replay is not needed."
        )
    if (missing := verdict["missing"]) and missing != "fixed_like_rod":
        return (
            f"Train {missing}: in batches this small, whole blocks of replay bring fixed_like_rod "
            "no nearer to RoD's own share."
        )
    if missing:
        return (
            "Train fixed_like_rod, fixed replay at RoD's own share: until then nobody knows "
            "whether RoD is better than that."
        )
    label = parse_arm(verdict["against"]).label
    if says == "better":
        return f"Take RoD: it is better than {label}."
    if says == "worse":
        return f"Take {label}: RoD is not better here."
    shown = [half for half in verdict["shown"].values() if half is not None]
    if says == "trade":
        learns = verdict["difference"]["adaptation"]["value"] > 0
        more, less = ("learns more", "forgets more") if learns else ("forgets less", "learns less")
        return f"A trade: RoD {more} and {less} than {label}; take it if that is what you want."
    if not shown:
        return "The losses of the held-out blocks were not kept: evaluate again to have intervals."
    return (
        f"RoD and {label} cannot be told apart: differences below {max(shown):.3f} nats are "
        "chance. Hold out more blocks, or train other seeds, to tell smaller ones."
    )


def sentences(verdict: Results) -> list[str]:
    """Returns the verdict in words, in its order."""
    text, alone = [], {tuple(place) for place in verdict["first_alone"]}

    def mark(kind: str, *names: str) -> str:
        return " (of the first seed alone)" if (kind, " ".join(names)) in alone else ""

    if (difference := verdict["difference"]) is not None:
        label, distance = parse_arm(verdict["against"]).label, verdict["distance"]
        says = _TOLD[verdict["says"]]
        one = [key for key, value in difference.items() if not _sign(value)]
        if verdict["says"] in ("better", "worse") and one:
            says = f"{verdict['says']}, and alike in {one[0]}"
        text.append(
            f"Against {label} ({100 * distance:+.1f} points of replay): {says}. {_both(difference)}"
        )
    frontier = verdict["frontier"]
    if frontier["difference"] is not None:
        names = " and ".join(parse_arm(name).label for name in frontier["between"])
        names += mark("frontier", *frontier["between"])
        text.append(
            f"At RoD's own forgetting, between {names}: it learned "
            f"{_nats(frontier['difference'], 'more', 'less')} than fixed replay."
        )
    else:
        text.append(f"At RoD's own forgetting: not judged, {frontier['why']}.")
    cost = verdict["total_cost"]
    if cost["difference"] is None:
        text.append(f"At equal cost in all: not judged, {cost['why']}.")
    else:
        times = f"{cost['ratio']:.2f} times the" if abs(cost["ratio"] - 1) > 0.05 else "equal"
        text.append(
            f"At {times} cost in all, against {parse_arm(cost['against']).label}"
            f"{mark('total_cost', cost['against'])}: {_both(cost['difference'])}"
        )
    if repeated := verdict["repeated"]:
        labels = " and ".join(parse_arm(name).label for name in repeated)
        text.append(
            f"There, {labels} went {max(repeated.values()):.0f} times through few blocks of "
            "replay, and RoD through many: a part of the difference is that repetition. A variant "
            "such as {of: rod, share: 0.35} draws fixed replay from all blocks."
        )
    for name, difference in verdict["alternatives"].items():
        text.append(
            f"Against {parse_arm(name).label}{mark('alternatives', name)}: "
            f"{_TOLD[_says(difference)]}. {_both(difference)}"
        )
    for name, stop in verdict["early_stops"].items():
        text.append(
            f"Against {parse_arm(name).label} stopped early, where it had forgotten as much (step "
            f"{stop['step']:.0f} of {stop['steps']:.0f}, its rate not yet lowered)"
            f"{mark('early_stops', name)}: RoD learned "
            f"{_nats(stop, 'more', 'less')}, on the first held-out blocks."
        )
    if None not in (shown := [*verdict["shown"].values()]) and shown:
        over = "seeds" if verdict["seeds"] > 1 else "held-out blocks"
        text.append(
            f"The smallest difference that these {over} show is {shown[0]:.4f} nats in what was "
            f"learned and {shown[1]:.4f} in what was forgotten."
        )
    return text


def text_of(results: Results) -> str:
    """Returns what a terminal shows: the arms with their costs, and the verdict in words."""
    head = {
        "arm": "arm", "replay_share": ">replay", "adapt_loss": ">loss", "val_forgetting": ">F_val",
        "runs": ">plain runs", "runs_in_all": ">in all",
    }  # fmt: skip
    arms = arms_table(results)
    shown = [column for column in arms.columns if column.key in head]
    rows = [[column.cell(row) for column in shown] for row in arms.rows]
    lines = [table([head[column.key] for column in shown], rows), ""]
    if verdict := results["verdict"]:
        lines += [*sentences(verdict), verdict["advice"]]
    return "\n".join(lines)


def fixed_arms(arms: Mapping[str, Results]) -> list[FixedArm]:
    """Returns the arms of fixed replay by ascending share, no replay included.

    One that is trained otherwise than RoD, such as at a lower rate, is none of them.
    """
    found, alternatives = [], _alternatives(arms)
    for name, arm in arms.items():
        design = arm["design"] or {}
        is_random = design.get("adaptation") == design.get("replay") == "random"
        is_fixed = _varies_fixed(name, arm) or (design.get("share") is not None and is_random)
        share, forgetting = arm["replay_share"], arm["signed_forgetting"]
        is_measured = None not in (share, arm["adapt_loss"], forgetting)
        if is_fixed and is_measured and name not in alternatives:
            is_as_long = same_budget(arm["trained_tokens"], arms["rod"]["trained_tokens"])
            found.append(FixedArm(name, share, forgetting, bool(is_as_long)))
    return sorted(found, key=lambda arm: arm.share)


def _missing(fixed: Sequence[FixedArm], share: float) -> str:
    """Returns the arm of fixed replay to train for RoD's share: one that is not there."""
    if any(arm.name == "fixed_like_rod" and arm.is_as_long for arm in fixed):
        return f"fixed_{max(1, round(100 * share))}"
    return "fixed_like_rod"


def _alternatives(arms: Mapping[str, Results]) -> list[str]:
    """Returns the arms without RoD's choice that are trained otherwise, or merged with the base."""
    like_rod = (arms["rod"]["design"] or {}).get("train")
    return [
        name
        for name, arm in arms.items()
        if None not in (arm["adapt_loss"], arm["signed_forgetting"])
        and (
            (_varies_fixed(name, arm) and (arm["design"] or {}).get("train") != like_rod)
            or parse_arm(name).kind == "merge"
        )
    ]


def _varies_fixed(name: str, arm: Results) -> bool:
    of = (arm["design"] or {}).get("of") or name
    return parse_arm(of).kind in ("no_replay", "fixed")


class ShareSearch(NamedTuple):
    """Where RoD's forgetting lies among fixed shares, and which share would tell more."""

    between: tuple[FixedArm, FixedArm] | None  # near neighbours that enclose it
    share: int | None  # the share to train next, in percent
    why: str  # a clause


def search(arms: Mapping[str, Results]) -> ShareSearch:
    """Looks for two near fixed shares, of RoD's steps, that enclose its forgetting."""
    if (rod := arms.get("rod")) is None:
        return ShareSearch(None, None, "RoD has no losses that can be compared")
    level, share = rod["signed_forgetting"], rod["replay_share"]
    fixed = [arm for arm in fixed_arms(arms) if arm.is_as_long]
    if level is None or share is None or not fixed:
        return ShareSearch(None, None, "no fixed share was run")
    pairs = itertools.pairwise(fixed)
    pair = next((p for p in pairs if p[0].forgetting >= level >= p[1].forgetting), None)
    forgotten = (arms.get("no_replay") or {}).get("val_forgetting")
    if pair is not None:
        low, high = pair
        if high.share - low.share <= _near(max(share, (low.share + high.share) / 2)):
            names = " and ".join(parse_arm(arm.name).label for arm in pair)
            return ShareSearch(pair, None, f"RoD's forgetting lies between {names}, which are near")
        part = (low.forgetting - level) / max(low.forgetting - high.forgetting, 1e-12)
        next_share = low.share + (high.share - low.share) * min(max(part, 0.25), 0.75)
        why = f"the nearest fixed shares are {100 * (high.share - low.share):.0f} points apart"
    elif fixed[-1].forgetting > level:
        next_share, why = 1.25 * fixed[-1].share + 0.01, "every fixed share forgot more than RoD"
    else:
        next_share, why = fixed[0].share / 2, "every fixed share forgot less than RoD"
    if forgotten is not None and forgotten < FORGOTTEN:
        return ShareSearch(
            None, None, f"nothing was forgotten without replay ({forgotten:.3f} nats)"
        )
    percent = min(round(100 * next_share), 99)
    if percent < 1:
        return ShareSearch(None, None, why)
    if any(f"fixed_{percent}" == arm.name for arm in fixed):
        return ShareSearch(None, None, f"{why}, and no percentage lies between")
    return ShareSearch(None, percent, why)


def _on_frontier(arms: Mapping[str, Results], drawn: Draws) -> dict[str, Any]:
    """Returns the difference in adaptation at RoD's forgetting, between two near shares."""
    result: dict[str, Any] = {"difference": None, "between": [], "why": ""}
    found = search(arms)
    if found.between is None:
        cure = f": run fixed_{found.share}" if found.share else ""
        return result | {"why": f"{found.why}{cure}"}
    low, high = found.between
    level = arms["rod"]["signed_forgetting"]

    def gain(value: Callable[[str, str], Any]) -> Any:
        """Returns fixed replay's adaptation loss at RoD's forgetting, less RoD's."""
        f, g, at = (value(name, "signed_forgetting") for name in (low.name, high.name, "rod"))
        if min(low.forgetting, high.forgetting, level) >= LOGARITHMIC:
            f, g, at = (np.log(np.maximum(x, 1e-9)) for x in (f, g, at))
        with np.errstate(all="ignore"):
            part = np.clip(np.nan_to_num((f - at) / (f - g), nan=0.5), -1, 2)
        first, second = (value(name, "adapt_loss") for name in (low.name, high.name))
        return first + part * (second - first) - value("rod", "adapt_loss")

    value = float(gain(lambda name, key: float(arms[name][key])))
    difference = {"value": value, **_interval(drawn, gain)}
    return result | {"difference": difference, "between": [low.name, high.name]}


def _at_total_cost(
    arms: Mapping[str, Results], drawn: Draws, fixed: list[FixedArm]
) -> dict[str, Any]:
    """Returns the differences from the fixed arm that cost as much as RoD in all."""
    cost, plain = arms["rod"]["compute_in_all"], (arms.get("no_replay") or {}).get("compute")
    result: dict[str, Any] = {"against": None, "difference": None, "why": ""}
    if cost is None:
        return result | {"why": "RoD's cost is unknown"}
    in_all = {arm.name: arms[arm.name]["compute_in_all"] for arm in fixed}
    alike = [arm for arm in fixed if same_budget(in_all[arm.name], cost, 0.05 * cost)]
    # that of a text drawn several times costs less than it was planned to
    dearer = [arm for arm in fixed if arm.name.endswith("_total") and in_all[arm.name]]
    if not (alike := alike or dearer):
        times = f", {cost / plain:.2f} plain runs" if plain else ""
        return result | {"why": f"no fixed share was trained for as long as RoD costs{times}"}
    level = arms["rod"]["signed_forgetting"]
    best = min(alike, key=lambda arm: abs(arm.forgetting - level))
    return result | {
        "against": best.name,
        "ratio": in_all[best.name] / cost,
        "difference": _differences(arms, drawn, best.name),
    }


def _differences(arms: Mapping[str, Results], drawn: Draws, other: str) -> dict[str, Any]:
    """Returns how much more RoD learned, and how much less it forgot, than another arm."""
    rod, them, differences = arms["rod"], arms[other], {}
    for name, key in (("adaptation", "adapt_loss"), ("forgetting", "signed_forgetting")):

        def less(value: Callable[[str, str], Losses], key: str = key) -> Losses:
            return value(other, key) - value("rod", key)

        differences[name] = {"value": them[key] - rod[key], **_interval(drawn, less)}
    return differences


def _interval(drawn: Draws, measure: Callable[[Callable[[str, str], Losses]], Any]) -> Results:
    """Returns the interval of a measure over draws of the held-out blocks; None if unknown."""

    def value(name: str, key: str) -> Losses:
        return drawn.values[key][:, drawn.names.index(name)]

    try:
        low, high = np.percentile(measure(value), PERCENTILES)
    except (KeyError, ValueError):  # losses by block were not kept, or are of one role
        return {"low": None, "high": None}
    return {"low": float(low), "high": float(high)}


def _over_seeds(differences: Sequence[Results]) -> dict[str, Any]:
    """Returns the mean of every difference over two or more seeds, with its interval."""
    n, merged = len(differences), {}
    for key, first in differences[0].items():
        means = {
            part: statistics.fmean(difference[key][part] for difference in differences)
            for part in first.keys() - {"low", "high"}  # an early stop has a step, too
        }
        spread = statistics.stdev(difference[key]["value"] for difference in differences)
        half = _t90(n - 1) * spread / math.sqrt(n)
        merged[key] = means | {"low": means["value"] - half, "high": means["value"] + half}
    return merged


def _t90(freedom: int) -> float:
    """Returns Student's t, two-sided 90 %; beyond the table by its expansion, to 0.0001."""
    if freedom <= len(_T90):
        return _T90[freedom - 1]
    return 1.64485 + 1.52378 / freedom + 1.42024 / freedom**2 + 0.983 / freedom**3


def _says(difference: Results) -> str:
    """Returns "better", "trade" or "worse"; "not_judged" where no interval excludes zero."""
    signs = {_sign(value) for value in difference.values()} - {0}
    if not signs:
        return "not_judged"
    return "trade" if len(signs) == 2 else "better" if signs == {1} else "worse"


def _sign(value: Results) -> int:
    if value["low"] is None:
        return 0
    return int(value["low"] > 0) - int(value["high"] < 0)


def _both(difference: Results) -> str:
    learned = _nats(difference["adaptation"], "more", "less")
    return f"RoD learned {learned} and forgot {_nats(difference['forgetting'], 'less', 'more')}."


def _nats(difference: Results, more: str, less: str) -> str:
    value, word = difference["value"], more if difference["value"] >= 0 else less
    interval = ""
    if difference["low"] is not None:
        sign = 1 if value >= 0 else -1
        low, high = sorted(sign * difference[end] for end in ("low", "high"))
        interval = f" ({low:z.4f} to {high:z.4f})"
    return f"{abs(value):.4f} nats{interval} {word}"


def _near(share: float) -> float:
    return max(NEAR * share, NEAREST)
