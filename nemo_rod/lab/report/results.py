"""Files of a run -> `results.json`: one plain dictionary with unrounded numbers.

Definitions (paper, appendix "Evaluation"; weights are training-block counts):

    adapt_loss                 weighted mean of the held-out losses of the adaptation sources
    forgetting_by_source       l(o) - l_base(o) per replay source, uncapped
    val_forgetting             F_val = sum_o w_o max(0, l(o) - l_base(o)), w normalised
    signed_forgetting          the same without the maximum: below zero if replay sources improved
    mean_*                     the same with equal weights (paper, "breadth-oriented" averages)
    capability_change          accuracy less the base model's, per capability
    task_forgetting            mean over capabilities of max(0, base accuracy - accuracy)
    replay_share               mean over steps of chosen replay blocks / K
    sampling_ratio_by_source   share among chosen replay / share among replay candidates
    epochs_by_source           blocks trained on / training blocks, of both roles
    replay_passes              replay blocks trained on / those in use: an arm fixed_<percent> goes
                               through a part of the replay as often as through the new text
    profile                    fits over sources, see `profiles_of`
    intervals                  90 % of the results with other held-out blocks, see `intervals.py`
    early_stops                results on the first held-out blocks after parts of the steps
    compute_in_all             compute with that of the specialist, of the passes over references,
                               and of the arms whose share or curriculum an arm has

Comparisons with fixed replay use the chord (`chord.py`) through the fixed arms and the no-replay
arm, which is a fixed share of zero, at equal trained tokens and at equal compute.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nemo_rod.lab.report.chord import Chord, chord_at, chord_through, linear_fit, outlier, pearson
from nemo_rod.lab.report.intervals import draws_of, intervals_of
from nemo_rod.lab.report.run_files import POOLS, Arm, Run, facts_of
from nemo_rod.roles import ROLES
from nemo_rod.run.variants import SPECIALIST
from nemo_rod.selection.candidates import Candidates
from nemo_rod.selection.competition import FORWARD
from nemo_rod.selection.forgetting import forgetting_by_source

Results = Mapping[str, Any]  # content of `results.json`
RunResults = tuple[Run, Results]

SCHEMA = 1
REFERENCE_PERCENT = 32.0  # the paper's fixed share in its figures
CHORD_KINDS = ("no_replay", "fixed")  # kinds of arms that the chord may go through
COSTS = ("trained_tokens", "scored_tokens", "compute", "wall_seconds")  # keys of `arm.json`
BUDGET_TOLERANCE = 0.01  # relative difference up to which budgets count as equal


def results_of(run: Run) -> dict[str, Any]:
    """Returns all measurements of one run.

    Raises:
        ValueError: the weights of the evaluated sources cannot be normalised.
    """
    arms = {name: _arm_results(run, arm) for name, arm in run.arms.items()}
    against = min(  # the fixed arm that RoD is compared with
        (arm for arm in run.arms.values() if arm.name.kind == "fixed"),
        key=lambda arm: (abs(arm.name.value - REFERENCE_PERCENT), arm.name.value),
        default=None,
    )
    reference = against.name.name if against else None
    expected = against.facts.get("trained_tokens") if against else None
    chord_arms, notes = [], []
    for name, arm in run.arms.items() if against else ():
        tokens = arm.facts.get("trained_tokens")
        if arm is against or (arm.name.kind in CHORD_KINDS and same_budget(tokens, expected)):
            chord_arms.append(name)
        elif arm.name.kind in CHORD_KINDS:
            notes.append(
                f"Arm {name} is not part of the fixed-replay chord: it trained on {tokens} tokens, "
                f"{reference} on {expected}."
            )
    notes += [f"Arm {name} has not been evaluated and is left out." for name in run.left_out]
    if "base" not in run.arms:
        notes.append("The base model has not been evaluated, so forgetting is unknown.")
    first = next(iter(run.arms.values()))
    for role in ROLES:
        if unseen := sorted(set(run.block_counts[role]) - set(first.loss[role])):
            notes.append(f"Held-out losses are missing for the {role} sources {', '.join(unseen)}.")
    file = run.folder / "arms" / SPECIALIST / "arm.json"  # it may be trained and not evaluated
    specialist = facts_of(file).get("compute") if file.is_file() else None
    for name in arms:
        arms[name]["compute_in_all"] = _in_all(name, run, specialist)
    chord = chord_of(arms, chord_arms)
    return {
        "schema": SCHEMA,
        "recipe": run.recipe,
        "seed": run.seed,
        "arms": arms,
        "profile": profiles_of(arms, reference),
        "reference_arm": reference,
        "chord": chord_arms if chord else [],
        "comparisons": {
            name: {"on_chord": name in chord_arms}
            | _comparison(arm, arms[name], against, [] if name in chord_arms else chord)
            for name, arm in run.arms.items()
        },
        "intervals": intervals_of(draws_of(run)),
        "sources": run.block_counts,
        "weights": run.weights,
        "base_loss_by_source": run.arms["base"].loss["replay"] if "base" in run.arms else None,
        "disagreements": run.disagreements,
        "early_stops": {
            name: arm.early_stops
            for name, arm in run.arms.items()
            if arm.early_stops and arm.name.kind in (*CHORD_KINDS, "rod")
        },
        "notes": notes,
    }


def profiles_of(arms: Mapping[str, Results], reference: str | None) -> dict[str, Any]:
    """Returns the profile of every arm except the base and no replay, by name.

    Forgetting and sampling by source against vulnerability (paper, "forgetting profiles"):

        slope, intercept      least squares of an arm's forgetting on no-replay forgetting
        pearson_r             of its sampling ratios with no-replay forgetting
        pearson_r_residual    of its sampling ratios with residual forgetting under fixed replay

    A single source with far more forgetting than the others can determine all of them. Each is
    therefore repeated `_without` the source whose no-replay forgetting is farthest from the mean.
    `reference` is the fixed-replay arm that defines residual forgetting.
    """
    vulnerability = arms.get("no_replay", {}).get("forgetting_by_source") or {}
    residual = arms[reference]["forgetting_by_source"] or {} if reference else {}
    influential = outlier(vulnerability)
    profiles = {}
    for name, arm in arms.items():
        if name in ("base", "no_replay"):
            continue
        profile: dict[str, Any] = {}
        left, ratio = arm["forgetting_by_source"] or {}, drop_none(arm["sampling_ratio_by_source"])
        # without an influential source, the second fit has no points
        for suffix, is_used in (
            ("", lambda source: True),
            ("_without", lambda source: influential not in (None, source)),
        ):
            over, over_residual = (
                {source: value for source, value in values.items() if is_used(source)}
                for values in (vulnerability, residual)
            )
            slope, intercept = linear_fit(over, left) or (None, None)
            profile |= {"without": influential} if suffix else {}
            profile |= {f"slope{suffix}": slope, f"intercept{suffix}": intercept}
            profile[f"pearson_r{suffix}"] = pearson(ratio, over)
            profile[f"pearson_r_residual{suffix}"] = pearson(ratio, over_residual)
        profiles[name] = profile
    return profiles


def drop_none(values: Mapping[str, float | None] | None) -> dict[str, float]:
    """Returns the values that are not None."""
    return {name: value for name, value in (values or {}).items() if value is not None}


def chord_of(arms: Mapping[str, Results], names: list[str]) -> Chord:
    """Returns the chord through arms of a results dictionary; empty if they do not span one."""
    points = [(arms[name]["val_forgetting"], arms[name]["adapt_loss"]) for name in names]
    return chord_through(point for point in points if None not in point)


def same_budget(first: float | None, second: float | None, slack: float = 0.0) -> bool | None:
    """Returns whether two budgets count as equal; None if either is unknown."""
    if not first or not second:
        return None
    return abs(first - second) <= max(BUDGET_TOLERANCE * second, slack)


def _arm_results(run: Run, arm: Arm) -> dict[str, Any]:
    base = run.arms.get("base")
    forgetting = forgetting_by_source(arm.loss["replay"], base.loss["replay"]) if base else None
    capped = {name: max(0.0, value) for name, value in (forgetting or {}).items()}
    change = None
    if base is not None and base.accuracy and arm.accuracy:
        change = {name: value - base.accuracy[name] for name, value in arm.accuracy.items()}
    lost = [max(0.0, -value) for value in (change or {}).values()]
    history, share = arm.history, float(arm.history.share_T.mean()) if arm.history else None
    in_use = (arm.facts.get("retention") or 1.0) * sum(run.block_counts["replay"].values())
    trained = (arm.facts.get("steps") or 0) * (arm.facts.get("batch_size") or 0)
    return {
        "adapt_loss": _weighted_mean(arm.loss["adaptation"], run.weights["adaptation"]),
        "val_forgetting": _weighted_mean(capped, run.weights["replay"]),
        "signed_forgetting": _weighted_mean(forgetting or {}, run.weights["replay"]),
        "mean_adapt_loss": _weighted_mean(arm.loss["adaptation"], None),
        "mean_forgetting": _weighted_mean(capped, None),
        "task_forgetting": math.fsum(lost) / len(lost) if lost else None,
        "capability_change": change,
        "forgetting_by_source": forgetting,
        "replay_share": share,
        "replay_passes": share * trained / in_use if share is not None and in_use else None,
        "share_by_decile": history.share_by_decile() if history else None,
        "epochs_by_source": history.epochs_by_source(run.block_counts) if history else None,
        "sampling_ratio_by_source": history.sampling_ratio_by_source() if history else None,
        **{key: arm.facts.get(key) for key in COSTS},
        "seed": arm.seed,
        "design": arm.design,
    }


def _in_all(name: str, run: Run, specialist: float | None) -> float | None:
    """Returns the cost of an arm with all that it needs, in plain steps; None if unknown.

    Another run's specialist counts as much as this run's. References are of the blocks that the arm
    draws, each once, as the plan and the stage of the references count them.
    """
    facts = run.arms[name].facts
    total = facts.get("compute")
    if total is None or name == "base":
        return None
    if references := facts.get("references"):
        roles = ("replay",) if references == ["base"] else ROLES
        pools = Candidates(**{key: facts[key] for key in POOLS})
        total += FORWARD * pools.drawn(facts["steps"], roles).sum() / pools.batch_size
        total += (math.nan if specialist is None else specialist) if roles == ROLES else 0.0
    for other in (facts.get("share_of"), facts.get("follow")):
        if other in run.arms and (needed := _in_all(str(other), run, specialist)) is not None:
            total += needed
    return None if math.isnan(total) else float(total)


def _weighted_mean(values: Mapping[str, float], counts: Mapping[str, int] | None) -> float | None:
    if not values:
        return None
    counts = dict.fromkeys(values, 1) if counts is None else counts
    total = sum(counts[name] for name in values)
    if total <= 0:
        raise ValueError(
            f"sources {sorted(values)} have no training blocks, so their losses have no weights; "
            "prepare the blocks again"
        )
    return math.fsum(counts[name] * value for name, value in values.items()) / total


def _comparison(arm: Arm, values: Results, against: Arm | None, chord: Chord) -> dict[str, Any]:
    """Returns an arm's comparison with the reference arm's budgets and the fixed-replay chord."""
    ours, theirs = arm.facts, against.facts if against else {}
    # a merge costs no more than the no-replay arm that it contains
    same_tokens = same_compute = True if arm.name.kind == "merge" else None
    if against and arm.name.kind not in ("merge", "base"):
        same_tokens = same_budget(ours.get("trained_tokens"), theirs.get("trained_tokens"))
        # Steps are whole, so compute budgets are only equal to within one of them.
        compute, steps = ours.get("compute"), ours.get("steps")
        one_step = compute / steps if compute and steps else 0.0
        same_compute = same_budget(compute, theirs.get("compute"), one_step)
    forgetting, adapt_loss = values["val_forgetting"], values["adapt_loss"]
    is_measured = forgetting is not None and adapt_loss is not None
    value = chord_at(chord, forgetting) if is_measured else None
    own, other = (facts.get("seconds_per_step") for facts in (ours, theirs))
    return {
        "gain": value[0] - adapt_loss if value else None,
        "extrapolated": value[1] if value else None,
        "time_ratio": own / other if own is not None and other else None,
        "same_tokens": same_tokens,
        "same_compute": same_compute,
    }
