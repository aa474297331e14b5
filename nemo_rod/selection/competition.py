"""The metrics of a choice: which candidates competed at a step, and which won.

One sort of the scores serves every quantile, so that the cost does not grow with the sources.

Shape suffixes: C = candidates, K = chosen, F = candidates with a finite score, G = groups,
Q = quantiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_rod import parts
from nemo_rod.roles import ROLES
from nemo_rod.selection.arrays import Ids
from nemo_rod.selection.choice import Choice

QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99}
_TAKEN = {"train", "timing", "validation", "throughput", "memory"}  # of the trainer's metrics
FORWARD = 1 / 3  # cost of a forward pass in training steps: a backward pass costs two

Metrics = dict[str, float | None]


def selection_metrics(choice: Choice, source_C: Ids, names: Sequence[str]) -> Metrics:
    """Returns the logged metrics of a choice, under names `rod/...`.

    Shares are in [0, 1] and scores in nats; the mean of no values is None. The scores by
    source are left out if the pool has none.

    Args:
        choice: the choice of one step.
        source_C: index in `names` of the source of every candidate, int64 `[C]`; -1 for padding.
        names: names of the sources.
    """
    is_replay_C = choice.pool.is_replay_C
    drawn = np.bincount(source_C[source_C >= 0], minlength=len(names)).tolist()
    chosen = np.bincount(source_C[choice.chosen], minlength=len(names)).tolist()
    metrics: Metrics = {
        "rod/replay_share": float(is_replay_C[choice.chosen].mean()),
        "rod/threshold": None if choice.score is None else float(choice.threshold),
        "rod/excluded": choice.excluded,
    }
    if choice.score is None:
        metrics |= dict.fromkeys(f"rod/rho_{role}" for role in ROLES)
    else:
        is_chosen_C = np.zeros(len(choice.score), dtype=bool)
        is_chosen_C[choice.chosen] = True
        order = np.argsort(choice.score)
        # padding and excluded candidates have no finite score, and do not compete
        order_F = order[np.isfinite(choice.score[order]) & (source_C[order] >= 0)]
        score_F = choice.score[order_F].astype(np.float64)
        is_replay_F, is_chosen_F = is_replay_C[order_F], is_chosen_C[order_F]
        # one pass for roles and sources: every score counts in a group of either kind
        group_2F = np.concatenate([is_replay_F, len(ROLES) + source_C[order_F]])
        groups = _summarise(np.concatenate([score_F, score_F]), group_2F, len(ROLES) + len(names))
        among = {
            **{"adaptation": ~is_replay_F, "replay": is_replay_F},
            **{"chosen": is_chosen_F, "dropped": ~is_chosen_F},
        }
        metrics |= {
            f"rod/rho_{name}": _mean(score_F[among[name]]) for name in ("chosen", "dropped")
        }
        for loss, value_C in (("loss", choice.loss), ("reference", choice.reference)):
            if value_C is not None and not choice.is_estimated:
                value_F = value_C[order_F].astype(np.float64)
                metrics |= {f"rod/{loss}_{n}": _mean(value_F[of_F]) for n, of_F in among.items()}
        for role, group in zip(ROLES, groups, strict=False):
            metrics[f"rod/{role}_above_zero"] = group["above_zero"]
            metrics[f"rod/rho_{role}"] = group["mean"]
            metrics |= {f"rod/rho_{role}_{quantile}": group[quantile] for quantile in QUANTILES}
        for name, group in zip(names, groups[len(ROLES) :], strict=True):
            metrics |= {f"rod/rho/{name}/{measure}": value for measure, value in group.items()}
    if choice.loss is not None:
        loss_K, source_K = choice.loss[choice.chosen].astype(np.float64), source_C[choice.chosen]
        for row, name in enumerate(names):
            metrics[f"rod/loss/{name}"] = _mean(loss_K[source_K == row])
    metrics |= {f"rod/candidates/{name}": n for name, n in zip(names, drawn, strict=True)}
    metrics |= {f"rod/chosen/{name}": n for name, n in zip(names, chosen, strict=True)}
    share = {name: n / len(choice.chosen) for name, n in zip(names, chosen, strict=True)}
    metrics |= {f"rod/share/{name}": value for name, value in share.items()}
    if taken := choice.metrics.keys() & {*metrics, "rod/overhead"}:  # see `journal.step_row`
        raise ValueError(
            f"The policy's metrics include {min(taken)!r}, which every run has: correct the policy."
        )
    return metrics | choice.metrics


def registered_metrics() -> dict[str, Any]:
    """Returns the functions of all registered metrics, by name.

    Raises:
        ValueError: a package cannot provide its own, or registers them by a name of ours.
    """
    if taken := _TAKEN & {*parts.names("metrics")}:
        raise ValueError(
            f"A package registers the metrics '{min(taken)}', a name of ours: rename them there."
        )
    return {part: parts.load("metrics", part) for part in parts.names("metrics")}


def all_metrics(choice: Choice, source_C: Ids, names: Sequence[str]) -> Metrics:
    """Returns the metrics of a choice by all registered parts; see `selection_metrics`.

    Raises:
        ValueError: those of a package fail, or are no numbers with names of their part.
    """
    metrics: Metrics = {}
    for part, measure in registered_metrics().items():
        try:
            for name, value in measure(choice, source_C, names).items():
                if not name.startswith(f"{part}/"):
                    raise ValueError(f"{name!r}, expected a name that begins with {part}/")
                metrics[name] = value if type(value) is int else number(value)
        except parts.FAILURES as error:
            if part in parts.HOUSE["metrics"]:
                raise
            raise ValueError(
                f"The registered metrics '{part}' fail at step {choice.pool.step} "
                f"({type(error).__name__}: {error}): correct the package that registers them."
            ) from error
    return metrics


def number(value: Any) -> float | None:
    """Returns a float, or None (JSON has no NaN) if the value is missing or not finite."""
    return float(value) if value is not None and math.isfinite(value) else None


def model_tflops(choice: Choice, update: float, seconds: float, *, prefix: float) -> float:
    """Returns the model's TFLOP/s over a step, scoring included, of all GPUs together.

    Args:
        choice: the choice of the step.
        update: operations of training on the chosen blocks, forward and backward.
        seconds: duration of the step.
        prefix: share of every candidate that was scored, in [0, 1].
    """
    num_scored = 0 if choice.score is None or choice.is_estimated else len(choice.pool.block_ids)
    work = 1 + FORWARD * prefix * num_scored / len(choice.chosen)
    return update * work / seconds / 1e12


def _mean(values: npt.NDArray[np.generic]) -> float | None:
    return float(values.mean()) if len(values) else None


def _summarise(
    score_F: npt.NDArray[np.float64], group_F: npt.NDArray[np.generic], num_groups: int
) -> list[Metrics]:
    """Returns mean, share above zero and quantiles of every group of scores; None if empty."""
    empty: Metrics = dict.fromkeys(("mean", "above_zero", *QUANTILES))
    if not len(score_F):
        return [empty] * num_groups
    # NumPy sorts 16-bit integers by radix, which is stable and several times as fast
    group_F = group_F.astype(np.int16 if num_groups < 2**15 else np.int64)
    count_G = np.bincount(group_F, minlength=num_groups)
    grouped_F = score_F[np.argsort(group_F, kind="stable")]  # still ascending, as scores come
    mean_G, above_G = (
        np.bincount(group_F, value_F, num_groups) / np.maximum(count_G, 1)
        for value_F in (score_F, score_F > 0)
    )
    last_G = np.maximum(count_G - 1, 0)
    place_QG = np.array(list(QUANTILES.values()))[:, None] * last_G
    low_QG = place_QG.astype(np.int64)
    start_G = np.cumsum(count_G) - count_G
    # an empty group may begin behind the last score
    first_QG = np.minimum(start_G + low_QG, len(score_F) - 1)
    second_QG = np.minimum(start_G + np.minimum(low_QG + 1, last_G), len(score_F) - 1)
    below_QG = grouped_F[first_QG]
    quantile_QG = below_QG + (place_QG - low_QG) * (grouped_F[second_QG] - below_QG)
    rows = zip(mean_G.tolist(), above_G.tolist(), *quantile_QG.tolist(), strict=True)
    return [
        dict(zip(empty, row, strict=True)) if count else empty
        for row, count in zip(rows, count_G.tolist(), strict=True)
    ]
