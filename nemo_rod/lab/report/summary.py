"""One plain paragraph on the claims that hold in a run and those that do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_rod.lab.report.arm_names import parse_arm
from nemo_rod.lab.report.verdicts import check_rows

Results = Mapping[str, Any]


def summarise(results: Results) -> str:
    """Returns plain sentences on the outcome, on failed claims and on those not judged."""
    sentences = [_outcome(results), _against_fixed(results), _curriculum(results)]
    sentences += [_compute(results), _verdicts(results)]
    return " ".join(sentence for sentence in sentences if sentence)


def _outcome(results: Results) -> str:
    rod = results["arms"].get("rod")
    if rod is None:
        return "RoD was not run, so there is nothing to compare the baselines with yet."
    if rod["val_forgetting"] is None:
        return "The base model was not evaluated, so what the arms forgot is unknown."
    return (
        f"RoD reaches an adaptation loss of {rod['adapt_loss']:.3f} nats per token and forgets "
        f"{rod['val_forgetting']:.3f} nats of what the base model knew."
    )


def _against_fixed(results: Results) -> str:
    checks = {check["id"]: check for check in results["checks"]}
    reference = results["reference_arm"]
    parts = []
    ratio = checks["forgetting_ratio"]["measured"]
    if ratio is not None:
        less = f"{abs(1 - ratio):.0%} {'less' if ratio < 1 else 'more'}".replace("%", " %")
        parts.append(f"at equal trained tokens it forgets {less} than {parse_arm(reference).label}")
    gap = checks["chord_gap"]["measured"]
    if gap is not None:
        side = "below" if gap < 0 else "above"
        text = f"its adaptation loss is {abs(gap):.3f} nats {side} fixed replay of equal forgetting"
        if results["comparisons"]["rod"]["extrapolated"]:
            text += " (extrapolated beyond the fixed arms)"
        parts.append(text)
    sentence = ", and ".join(parts)
    return sentence[:1].upper() + sentence[1:] + "." if parts else ""


def _curriculum(results: Results) -> str:
    rod = results["arms"].get("rod")
    if rod is None or rod["replay_share"] is None:
        return ""
    text = f"Nobody set its replay share: it averages {100 * rod['replay_share']:.0f} %"
    deciles = rod["share_by_decile"]
    if deciles:
        text += f", from {100 * deciles[0]:.0f} % in the first tenth of the run to "
        text += f"{100 * deciles[-1]:.0f} % in the last"
    return text + "."


def _compute(results: Results) -> str:
    checks = {check["id"]: check for check in results["checks"]}
    check, gap = checks["compute_matched_gap"], checks["averages_gap"]["measured"]
    ratio = results["comparisons"].get("rod", {}).get("compute_ratio")
    price = (
        f"RoD's scoring makes each of its runs cost {ratio:.2f} times as much. " if ratio else ""
    )
    if check["measured"] is None:
        if "rod" not in results["arms"]:
            return price
        return f"{price}How RoD fares at equal compute was not judged ({check['note']})."
    if check["verdict"] != "fails":
        nats = abs(check["measured"])
        return f"{price}At equal compute it is still {nats:.3f} nats below fixed replay."
    text = (
        f"{price}At equal compute it loses to fixed replay: scoring leaves it fewer updates, and "
        f"its adaptation loss ends {check['measured']:.3f} nats above fixed replay's."
    )
    if gap is not None:
        text += (
            " With scores estimated from averages by source, which need no scoring pass, it ends "
            f"{abs(gap):.3f} nats {'below' if gap < 0 else 'above'} it."
        )
    return text


def _verdicts(results: Results) -> str:
    claims = [row for row in check_rows(results) if row["kind"] == "claim"]
    held, failed, open_ = (
        [row["claim"] for row in claims if row["verdict"] == verdict]
        for verdict in ("holds", "fails", "not judged")
    )
    judged, num_runs = len(held) + len(failed), 1 + len(results["replicates"])
    seeds = f" in each of {num_runs} runs" if num_runs > 1 else ""
    if not judged:
        return "No claim could be judged."
    sentences = [f"Of the {judged} claims that could be judged, {len(held)} hold{seeds}."]
    if not failed:
        sentences = [f"All {judged} claims that could be judged hold{seeds}."]
    if failed:
        sentences.append("What does not hold: " + "; ".join(failed) + ".")
    if open_:
        sentences.append("Not judged: " + "; ".join(open_) + ".")
    return " ".join(sentences)
