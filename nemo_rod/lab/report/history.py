"""Summary of a curriculum for the report: counts and mean scores per step.

Shape suffixes: T = steps, C = candidates, O = sources, X = candidates of
any steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_rod.lab import curriculum_tools
from nemo_rod.selection.curriculum.log import Curriculum

_STEPS_AT_ONCE = 256  # bounds memory: a step of the paper's runs has 2048 candidates

Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
NUM_DECILES = 10


@dataclass(frozen=True)
class History:
    """Blocks drawn and chosen over a run."""

    step_T: Counts  # optimizer steps
    batch_size: int  # blocks trained on per step (K)
    source_names: tuple[str, ...]
    is_replay_O: npt.NDArray[np.bool_]
    candidates_TO: Counts
    chosen_TO: Counts  # blocks trained on
    threshold_T: Floats  # tau, in nats; NaN without scores
    rho_adaptation_T: Floats  # mean score of the adaptation candidates; NaN without any
    rho_replay_T: Floats  # of the replay candidates

    @property
    def share_T(self) -> Floats:
        """Share of replay in the trained batch at each step, float64 [T]."""
        share_T: Floats = self.chosen_TO[:, self.is_replay_O].sum(axis=1) / self.batch_size
        return share_T

    @property
    def is_scored(self) -> bool:
        """Whether any candidates were scored."""
        return bool(np.isfinite(self.threshold_T).any())

    def share_by_decile(self) -> list[float] | None:
        """Returns the mean replay share of ten consecutive parts of the run; None below ten steps.

        If the steps do not divide by ten, the first parts are one step longer.
        """
        if len(self.step_T) < NUM_DECILES:
            return None
        return [float(part.mean()) for part in np.array_split(self.share_T, NUM_DECILES)]

    def epochs_by_source(self, counts: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
        """Returns by role how often each source's `counts` of training blocks were trained on."""
        epochs: dict[str, Any] = {"adaptation": {}, "replay": {}}
        rows = zip(self.source_names, self.is_replay_O, self.chosen_TO.sum(axis=0), strict=True)
        for name, is_replay, chosen in rows:
            role = "replay" if is_replay else "adaptation"
            if count := counts.get(role, {}).get(name):
                epochs[role][name] = int(chosen) / count
        return epochs

    def sampling_ratio_by_source(self) -> dict[str, float | None] | None:
        """Returns how often each replay source was trained on, relative to its candidates.

        A source's share among the chosen replay blocks over its share among the replay candidates
        of the same curriculum (paper, figure "Replay allocation"). None for a source that was never
        offered; None altogether if no replay was ever chosen.
        """
        offered_O = self.candidates_TO[:, self.is_replay_O].sum(axis=0)
        chosen_O = self.chosen_TO[:, self.is_replay_O].sum(axis=0)
        if chosen_O.sum() == 0:
            return None
        shares = zip(chosen_O / chosen_O.sum(), offered_O / offered_O.sum(), strict=True)
        ratios = [float(chosen / offered) if offered else None for chosen, offered in shares]
        names = itertools.compress(self.source_names, self.is_replay_O)
        return dict(zip(names, ratios, strict=True))


def read_history(path: Path) -> History:
    """Reads `curriculum.rod`.

    Raises:
        ValueError: the file is not a curriculum, or is damaged or empty.
    """
    with Curriculum.open(path, read_only=True) as curriculum:
        header, arrays = curriculum.header, curriculum_tools.arrays(curriculum)
        if len(arrays.step) == 0:
            raise ValueError(f"{path} holds no step, expected one per update; train the arm again")
        is_replay_O = np.array([row.role == "replay" for row in header.sources], dtype=bool)
        num_sources, parts = len(is_replay_O), []
        for start in range(0, len(arrays.step), _STEPS_AT_ONCE):
            piece = slice(start, start + _STEPS_AT_ONCE)
            source_TC = header.source_index(arrays.block_ids[piece])
            score_TC, chosen_TC = arrays.score[piece], arrays.chosen[piece]
            # Padding has source -1, counted in an extra column that is dropped.
            is_replay_TC = np.append(is_replay_O, False)[source_TC] & (source_TC >= 0)
            is_adaptation_TC = np.append(~is_replay_O, False)[source_TC] & (source_TC >= 0)
            row_T1 = np.arange(len(source_TC))[:, None] * (num_sources + 1)
            cell_TC = row_T1 + np.where(source_TC < 0, num_sources, source_TC)
            shape = (len(source_TC), num_sources + 1)
            counts = [
                np.bincount(cell_X, minlength=math.prod(shape)).reshape(shape)[:, :-1]
                for cell_X in (cell_TC.ravel(), cell_TC[chosen_TC])
            ]
            means = [
                finite_mean(score_TC, axis=1, where=is_of_role_TC)
                for is_of_role_TC in (is_adaptation_TC, is_replay_TC)
            ]
            parts.append((*counts, *means))
        candidates_TO, chosen_TO, rho_adaptation_T, rho_replay_T = (
            np.concatenate(column) for column in zip(*parts, strict=True)
        )
        return History(
            step_T=np.array(arrays.step, dtype=np.int64),
            batch_size=header.num_chosen,
            source_names=tuple(row.name for row in header.sources),
            is_replay_O=is_replay_O,
            candidates_TO=candidates_TO,
            chosen_TO=chosen_TO,
            threshold_T=np.array(arrays.threshold, dtype=np.float64),
            rho_adaptation_T=rho_adaptation_T,
            rho_replay_T=rho_replay_T,
        )


def finite_mean(value: npt.NDArray[Any], *, axis: int, where: Any = True) -> Floats:
    """Returns the mean over the finite entries of an axis, float64; NaN where there is none."""
    is_counted = np.isfinite(value) & where
    count = is_counted.sum(axis=axis)
    total = np.where(is_counted, value, 0.0).sum(axis=axis, dtype=np.float64)
    return np.divide(total, count, out=np.full(count.shape, np.nan), where=count > 0)
