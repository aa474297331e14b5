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

from nemo_rod.report.chord import linear_fit, outlier, pearson

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


def _profile(arm: Mapping[str, Any], vulnerability: Values, residual: Values) -> dict[str, Any]:
    left = arm["forgetting_by_source"] or {}
    ratio = {
        source: value
        for source, value in (arm["sampling_ratio_by_source"] or {}).items()
        if value is not None
    }
    influential = outlier(vulnerability)
    fewer = {source: value for source, value in vulnerability.items() if source != influential}
    fit = linear_fit(vulnerability, left)
    fit_without = linear_fit(fewer, left) if influential else None
    residual_fewer = {source: value for source, value in residual.items() if source != influential}
    return {
        "slope": fit[0] if fit else None,
        "intercept": fit[1] if fit else None,
        "pearson_r": pearson(ratio, vulnerability),
        "pearson_r_residual": pearson(ratio, residual),
        "without": influential,
        "slope_without": fit_without[0] if fit_without else None,
        "intercept_without": fit_without[1] if fit_without else None,
        "pearson_r_without": pearson(ratio, fewer) if influential else None,
        "pearson_r_residual_without": pearson(ratio, residual_fewer) if influential else None,
    }
