"""The one summary of a curriculum: by step and role, and by source over bins of steps.

The file is read a piece at a time, so that memory does not grow with its candidates.

Shape suffixes: T = steps, C = candidates, O = sources, B = bins of consecutive steps, R = roles
(adaptation, replay), W = what was dropped and what was chosen.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_rod.lab import curriculum_tools
from nemo_rod.roles import ROLES
from nemo_rod.selection.curriculum.header import CurriculumHeader
from nemo_rod.selection.curriculum.log import Curriculum

_AT_ONCE = 1 << 19  # candidates in memory
BINS = 120  # most bins of a run; a figure may join some of them

Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
NUM_DECILES = 10


@dataclass(frozen=True)
class History:
    """Candidates drawn and chosen over a run."""

    header: CurriculumHeader
    step_T: Counts  # optimizer steps
    drawn_TR: npt.NDArray[np.int32]  # candidates
    chosen_TR: npt.NDArray[np.int32]  # blocks trained on
    threshold_T: Floats  # tau, in nats; NaN without scores
    rho_TR: npt.NDArray[np.float32]  # mean score of the candidates; NaN without any
    first_B: Counts  # row of a bin's first step
    drawn_BO: Counts
    chosen_BO: Counts
    scored_BOW: Counts  # candidates with a finite score
    score_BOW: Floats  # sum of their scores
    loss_B: Floats  # mean loss of the candidates, in nats; NaN if unknown

    @property
    def batch_size(self) -> int:
        """Blocks trained on per step (K)."""
        return self.header.num_chosen

    @property
    def source_names(self) -> list[str]:
        """Names of the sources, in the order of their blocks."""
        return [row.name for row in self.header.sources]

    @property
    def is_replay_O(self) -> npt.NDArray[np.bool_]:
        """Whether a source is replay."""
        return np.array([row.role == "replay" for row in self.header.sources], dtype=bool)

    @property
    def share_T(self) -> Floats:
        """Share of replay in the trained batch at each step, float64 [T]."""
        share_T: Floats = self.chosen_TR[:, 1] / self.batch_size
        return share_T

    @property
    def is_scored(self) -> bool:
        """Whether any candidates were scored."""
        return bool(np.isfinite(self.threshold_T).any())

    @property
    def bins(self) -> list[slice]:
        """The rows of every bin."""
        return [slice(*ends) for ends in itertools.pairwise([*self.first_B, len(self.step_T)])]

    def share_by_decile(self) -> list[float] | None:
        """Returns the mean replay share of ten consecutive parts of the run; None below ten steps.

        If the steps do not divide by ten, the first parts are one step longer.
        """
        if len(self.step_T) < NUM_DECILES:
            return None
        return [float(part.mean()) for part in np.array_split(self.share_T, NUM_DECILES)]

    def epochs_by_source(self, counts: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
        """Returns by role how often each source's `counts` of training blocks were trained on."""
        epochs: dict[str, Any] = {role: {} for role in ROLES}
        for row, chosen in zip(self.header.sources, self.chosen_BO.sum(axis=0), strict=True):
            if count := counts.get(row.role, {}).get(row.name):
                epochs[row.role][row.name] = int(chosen) / count
        return epochs

    def sampling_ratio_by_source(self) -> dict[str, float | None] | None:
        """Returns how often each replay source was trained on, relative to its candidates.

        A source's share among the chosen replay blocks over its share among the replay candidates
        of the same curriculum (paper, figure "Replay allocation"). None for a source that was never
        offered; None altogether if no replay was ever chosen.
        """
        offered_O = self.drawn_BO[:, self.is_replay_O].sum(axis=0)
        chosen_O = self.chosen_BO[:, self.is_replay_O].sum(axis=0)
        if chosen_O.sum() == 0:
            return None
        shares = zip(chosen_O / chosen_O.sum(), offered_O / offered_O.sum(), strict=True)
        ratios = [float(chosen / offered) if offered else None for chosen, offered in shares]
        names = itertools.compress(self.source_names, self.is_replay_O)
        return dict(zip(names, ratios, strict=True))


def read_history(path: Path, *, bins: int = BINS) -> History:
    """Reads `curriculum.rod`, with at most so many bins of about equal length.

    Raises:
        ValueError: the file is not a curriculum, or is damaged or empty.
    """
    with Curriculum.open(path, read_only=True) as curriculum:
        if len(curriculum) == 0:
            raise ValueError(f"{path} holds no step, expected one per update; train the arm again")
        return history_of(curriculum, bins=bins)


def history_of(curriculum: Curriculum, *, bins: int = BINS) -> History:
    """Returns the history of an open curriculum, also of an empty one."""
    header, num_steps = curriculum.header, len(curriculum)
    num_bins, num_sources = min(bins, num_steps), len(header.sources)
    first_B = np.array([num_steps * i // num_bins for i in range(num_bins)], dtype=np.int64)
    drawn_BO, chosen_BO = np.zeros((2, num_bins, num_sources), np.int64)
    scored_BOW = np.zeros((num_bins, num_sources, 2), np.int64)
    score_BOW, loss_B2 = np.zeros(scored_BOW.shape), np.zeros((num_bins, 2))
    step_T, threshold_T = np.zeros(num_steps, np.int64), np.zeros(num_steps)
    drawn_TR, chosen_TR = np.zeros((2, num_steps, 2), np.int32)
    rho_TR = np.full((num_steps, 2), np.nan, np.float32)
    is_replay_O = np.array([row.role == "replay" for row in header.sources], dtype=bool)
    at_once = max(1, _AT_ONCE // header.num_candidates)
    ends = sorted({*range(0, num_steps, at_once), *first_B.tolist(), num_steps})
    for begin, end in itertools.pairwise(ends):  # within one bin
        rows, place = slice(begin, end), int(np.searchsorted(first_B, begin, side="right")) - 1
        piece = curriculum_tools.arrays(curriculum, rows)
        step_T[rows], threshold_T[rows] = piece.step, piece.threshold
        source_TC = header.source_index(piece.block_ids)
        is_real_TC = source_TC >= 0  # no padding
        is_scored_TC = np.isfinite(piece.score) & is_real_TC
        score_TC = np.where(is_scored_TC, piece.score, 0.0)
        is_of_role_TC = np.append(is_replay_O, False)[source_TC]
        for role, is_mine_TC in enumerate((is_real_TC & ~is_of_role_TC, is_of_role_TC)):
            drawn_TR[rows, role] = is_mine_TC.sum(axis=1)
            chosen_TR[rows, role] = (is_mine_TC & piece.chosen).sum(axis=1)
            count_T = (is_mine_TC & is_scored_TC).sum(axis=1)
            total_T = np.where(is_mine_TC, score_TC, 0.0).sum(axis=1)
            with np.errstate(invalid="ignore", divide="ignore"):
                rho_TR[rows, role] = np.where(count_T > 0, total_T / count_T, np.nan)

        def count(where_TC: Any, weight_TC: Any = None, of_TC: Any = source_TC) -> Any:
            """Returns the number of candidates by source, or the sum of their weights."""
            weight = None if weight_TC is None else weight_TC[where_TC]
            return np.bincount(of_TC[where_TC], weight, num_sources)

        drawn_BO[place] += count(is_real_TC)
        chosen_BO[place] += count(piece.chosen & is_real_TC)
        for won, is_won_TC in enumerate((~piece.chosen, piece.chosen)):
            scored_BOW[place, :, won] += count(is_scored_TC & is_won_TC)
            score_BOW[place, :, won] += count(is_scored_TC & is_won_TC, score_TC)
        loss = piece.loss[np.isfinite(piece.loss) & is_real_TC]
        loss_B2[place] += (loss.sum(dtype=np.float64), len(loss))
    with np.errstate(invalid="ignore", divide="ignore"):
        loss_B = loss_B2[:, 0] / loss_B2[:, 1]
    return History(
        header, step_T, drawn_TR, chosen_TR, threshold_T, rho_TR, first_B,
        drawn_BO, chosen_BO, scored_BOW, score_BOW, loss_B,
    )  # fmt: skip


def finite_mean(value: npt.NDArray[Any], *, axis: int) -> Floats:
    """Returns the mean over the finite entries of an axis, float64; NaN where there is none."""
    is_counted = np.isfinite(value)
    count = is_counted.sum(axis=axis)
    total = np.where(is_counted, value, 0.0).sum(axis=axis, dtype=np.float64)
    return np.divide(total, count, out=np.full(count.shape, np.nan), where=count > 0)
