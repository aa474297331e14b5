"""Forgetting and sampling of an arm's sources against vulnerability (paper, "forgetting profiles").

    slope, intercept      least squares of an arm's forgetting per source on no-replay forgetting
    pearson_r             of its sampling ratios with no-replay forgetting
    pearson_r_residual    of its sampling ratios with residual forgetting under fixed replay

A single source with far more forgetting than the others can determine all of them. Therefore each
also exists `_without` the source whose no-replay forgetting is farthest from the mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_rod.lab.report.chord import linear_fit, outlier, pearson

Values = Mapping[str, float]


def profiles_of(arms: Mapping[str, Mapping[str, Any]], reference: str | None) -> dict[str, Any]:
    """Returns the profile of every arm except the base and no replay, by name.

    Args:
        arms: Arms of a results dictionary.
        reference: The fixed-replay arm that defines residual forgetting.
    """
    vulnerability = arms.get("no_replay", {}).get("forgetting_by_source") or {}
    residual = arms[reference]["forgetting_by_source"] or {} if reference else {}
    return {
        name: _profile(arm, vulnerability, residual)
        for name, arm in arms.items()
        if name not in ("base", "no_replay")
    }


def known(values: Mapping[str, float | None] | None) -> dict[str, float]:
    """Returns the values that there are."""
    return {name: value for name, value in (values or {}).items() if value is not None}


def _profile(arm: Mapping[str, Any], vulnerability: Values, residual: Values) -> dict[str, Any]:
    influential = outlier(vulnerability)
    left, ratio = arm["forgetting_by_source"] or {}, known(arm["sampling_ratio_by_source"])

    def measures(suffix: str, over: Values, residual: Values) -> dict[str, float | None]:
        slope, intercept = linear_fit(over, left) or (None, None)
        return {
            f"slope{suffix}": slope,
            f"intercept{suffix}": intercept,
            f"pearson_r{suffix}": pearson(ratio, over),
            f"pearson_r_residual{suffix}": pearson(ratio, residual),
        }

    # where no source is influential, there is nothing to fit without one
    fewer, fewer_residual = (
        {source: value for source, value in values.items() if influential not in (None, source)}
        for values in (vulnerability, residual)
    )
    return {
        **measures("", vulnerability, residual),
        "without": influential,
        **measures("_without", fewer, fewer_residual),
    }
