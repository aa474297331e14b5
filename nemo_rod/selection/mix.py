"""A blend that follows the model: shares by source at the price of plain training.

    Mix()                                  targets forecast from the run's own losses
    Mix(target=1.6, prefer="keeping")      one number for all new text; replay counts twice
    Mix(target={"laws": 1.4, "news": "auto"}, forgetting=0.05)

No candidate is ever scored. A candidate's score is drawn by its source:

    score ~ Normal(mean, variance over the last blocks of its source)

If real scores are distributed like that, a joint top-k of such draws has the same replay share and
the same share of each source as one of real scores; chance decides which blocks of a source are
taken. They are therefore an unbiased sample of it, and what is averaged are their losses, which
training computes anyway:

    replay       loss - loss of the base on the same block, 0 at the first step: what was forgotten
    new text     loss - target of its source, or for "specialist" its loss on the same block: what
                 is left to be learned. A source that was never seen comes first.

"auto" is the loss that new text alone would come to in all steps of the run, by a fit of

    loss(x) = c + a (x + 3)^-b,        x: steps' worth of the source's blocks that were trained on

In the first tenth of its blocks a source has no forecast, and target 0: new text comes first.

A bound on F_val moves kappa when held-out losses are measured, once every target is known: its log
by a gain times that of F_val over a little less than the bound, with F_val as it will be if it goes
on as since the last measurement. It rests near that value, and the gain falls whenever the
direction changes, so that it neither hunts noise nor swings with a delay.

Shape suffixes: C = candidates, K = chosen, N = blocks observed, M = sources, B = bins,
E = exponents.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_rod.selection.arrays import Floats, Ids, Mask, Nats
from nemo_rod.selection.candidates import Pool
from nemo_rod.selection.choice import Choice
from nemo_rod.selection.permutation import derive_key
from nemo_rod.selection.policies import HELD_OUT, OF_REPLAY, REFERENCES, Joint, Policy

Target = float | str  # nats per token, "auto" or "specialist"

KAPPA = {"learning": 0.5, "balance": 1.0, "keeping": 2.0}
# A mean over fewer blocks is too noisy; one over many more lags behind the learning model.
MEMORY_BLOCKS = 8
# Losses differ from block to block more than scores do. Where one number is subtracted from all,
# the mean is therefore of more blocks, and their spread is that of scores: about a third of their
# mean, in either role (toy).
LONG_MEMORY_BLOCKS, SPREAD = 128, 1 / 3
# Nats. At the base, all replay scores are equal up to rounding errors, which must not matter.
_MIN_DEVIATION = 1e-3
_OLD_STEPS = 3.0  # memory of the loss curve
_BINS_B = 160  # bins of the loss curve, four per doubling of a source's blocks
_EXPONENTS_E = np.array([0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 1.0, 1.25, 1.5])
_GOAL, _REST = 0.93, 0.07  # fraction of the bound aimed at; |log ratio| below which kappa stays
# Changes of log kappa for one of log F_val, which answers 0.4 times as much to kappa (toy)
_GAIN, _LEAST_GAIN, _TURNED = 2.0, 0.1, 0.7  # first, least, and what a turn leaves of it
_MOST, _LIMIT = 0.5, math.log(1000)  # share of the excess in one change; bound of |log kappa|


@dataclass(eq=False)
class Mix(Policy):
    """Chooses by kappa from scores that are estimated from the losses of training alone.

    Raises:
        ValueError: an option is out of range.
    """

    target: Target | Mapping[str, Target] = "auto"  # one for all new text, or by source
    # kappa: nats of learning that one gives up for a nat that is not forgotten; or a name for it
    prefer: float | str = "balance"
    forgetting: float | None = None  # F_val that is not to be exceeded, in nats

    def __post_init__(self) -> None:
        targets = self.target if isinstance(self.target, Mapping) else {"": self.target}
        for name, value in targets.items():
            if not (value in ("auto", "specialist") or _is_positive(value)):
                raise ValueError(
                    f"The target{f' of {name}' if name else ''} is {value!r}, expected a loss in "
                    "nats per token, 'auto' or 'specialist'."
                )
        kappa = KAPPA.get(self.prefer, 0.0) if isinstance(self.prefer, str) else self.prefer
        if not _is_positive(kappa):
            raise ValueError(
                f"prefer is {self.prefer!r}, expected {', '.join(KAPPA)} or a number above 0."
            )
        if self.forgetting is not None and not _is_positive(self.forgetting):
            raise ValueError(
                f"forgetting is {self.forgetting!r}, expected nats above 0 that F_val may reach."
            )
        # the dial: log kappa, its gain, its last direction, and F_val when it was last measured
        self.state = {"dial": np.array([math.log(kappa), _GAIN, 0.0, 0.0])}

    def check_sources(self, sources: Sequence[Any]) -> None:
        """Refuses targets of other sources than those of new text."""
        names = [source.name for source in sources if source.role == "adaptation"]
        if isinstance(self.target, Mapping) and {*self.target} != {*names}:
            raise ValueError(
                f"There are targets of {', '.join(self.target)}, but the new sources of the run "
                f"are {', '.join(names)}: give each of these a target, or one for all."
            )

    @property
    def needs(self) -> frozenset[str]:
        """References of replay, of new text for a specialist alone, and F_val for a bound."""
        targets = self.target.values() if isinstance(self.target, Mapping) else [self.target]
        references = REFERENCES if "specialist" in targets else OF_REPLAY
        return references if self.forgetting is None else references | HELD_OUT

    def weigh(self, pool: Pool, score_C: Floats) -> Floats:
        """Returns the scores [C], those of replay multiplied by kappa."""
        return self._joint.weigh(pool, score_C)

    def select(self, pool: Pool, score_C: Floats | None, k: int) -> Ids:
        """Returns the positions of the k highest weighed scores; see `Policy.select`."""
        return self._joint.select(pool, score_C, k)

    def estimate(self, pool: Pool) -> Nats:
        """Returns a score for every candidate, nats, float32 [C]; see the module docstring.

        A source with low scores is hardly ever chosen, so a rise would be missed. If some source
        has gone unobserved for more steps than there are sources, one of its candidates therefore
        outranks all others after weighing: at most one block per batch.
        """
        state, is_new_M = self._full_state(pool), _is_new(pool)
        mean_M = state["mean"] - self.targets(pool)
        mean_M[np.isnan(mean_M)] = np.fmax.reduce(mean_M[is_new_M], initial=1.0)
        measured_M = ~is_new_M | self._aims_at(pool, "specialist")
        deviation_M = np.where(measured_M, np.sqrt(state["variance"]), SPREAD * np.abs(mean_M))
        if self.forgetting is not None:  # a source at its target: kappa must decide even then
            mean_M[is_new_M] = np.maximum(mean_M[is_new_M], 1e-3 * self.forgetting)
        source_C = pool.source_C
        draws = np.random.default_rng((derive_key(pool.seed, "averages"), pool.step))
        deviation_C = np.maximum(deviation_M, _MIN_DEVIATION)[source_C]
        drawn_C = mean_M[source_C] + deviation_C * draws.standard_normal(len(source_C))
        score_C: Nats = drawn_C.astype(np.float32)
        oldest = int(np.argmin(state["seen"][source_C]))
        if pool.step - state["seen"][source_C[oldest]] > len(mean_M):
            highest = float(max(self.weigh(pool, score_C).max(), score_C.max(), _MIN_DEVIATION))
            score_C[oldest] = np.nextafter(np.float32(highest), np.float32(np.inf))
            if 0 < (weighed := float(self.weigh(pool, score_C)[oldest])) < highest:
                score_C[oldest] *= 1.001 * highest / weighed
        return score_C

    def targets(self, pool: Pool) -> Floats:
        """Returns what is subtracted from the mean of every source now, nats, float64 [M].

        Raises:
            ValueError: targets are given for other sources than those of new text, or the length
                of the run, which a forecast needs, is unknown.
        """
        self.check_sources(pool.sources)
        target_M = np.zeros(len(pool.sources))
        for number in np.flatnonzero(_is_new(pool)).tolist():
            target = self._target(pool.sources[number].name)
            if target == "auto":
                target_M[number] = self._forecast(pool, number)
            elif target != "specialist":
                target_M[number] = target
        return target_M

    def observe(self, choice: Choice, loss_K: Nats) -> None:
        """Updates the averages, and the curves of new sources, with the losses of a batch."""
        pool, chosen = choice.pool, choice.chosen
        assert choice.reference is not None
        source_K = pool.source_C[chosen]
        compared_M = ~_is_new(pool) | self._aims_at(pool, "specialist")
        reference_K = np.where(compared_M[source_K], choice.reference[chosen], 0.0)
        value_K = loss_K.astype(np.float64) - reference_K
        known_K = np.isfinite(value_K)
        state = {name: value.copy() for name, value in self._full_state(pool).items()}
        state["batch"] = np.array(len(chosen))
        mean, variance, blocks = state["mean"], state["variance"], state["blocks"]
        is_auto_M = self._aims_at(pool, "auto")
        for source in np.unique(source_K[known_K]).tolist():
            new = value_K[known_K & (source_K == source)]
            memory = MEMORY_BLOCKS if compared_M[source] else LONG_MEMORY_BLOCKS
            blocks[source] = min(blocks[source], memory) + len(new)
            weight = len(new) / blocks[source]
            before = new.mean() if np.isnan(mean[source]) else mean[source]
            mean[source] = before + weight * (new.mean() - before)
            spread = ((new - mean[source]) ** 2).mean()
            variance[source] += weight * (spread - variance[source])
            state["seen"][source] = pool.step
            if is_auto_M[source]:
                curve = state["curve"][source]
                middle = curve[0].sum() + len(new) / 2
                number = min(int(4 * math.log2(max(1.0, middle))), _BINS_B - 1)
                curve[:, number] += len(new), len(new) * middle, new.sum()
        self.state = state
        self.state["aims"] = np.asarray((self.targets(pool)[is_auto_M] > 0).all())

    def measured(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Moves kappa towards a forgetting a little below the bound; see the module docstring."""
        now = metrics.get("validation/forgetting")
        if now is None or self.forgetting is None:
            return
        log_kappa, gain, direction, before = self.state["dial"].tolist()
        trend = min(2.0, max(0.5, now / before)) if before > 0 else 2.0
        expected = max(now, 1e-3 * self.forgetting) * trend
        excess = math.log(expected / (_GOAL * self.forgetting))
        if abs(excess) > _REST and self.state.get("aims", True):
            if direction * excess < 0:
                gain = max(_LEAST_GAIN, _TURNED * gain)
            direction = math.copysign(1.0, excess)
            log_kappa += gain * min(_MOST, max(-_MOST, excess))
        log_kappa = min(_LIMIT, max(-_LIMIT, log_kappa))
        self.state = self.state | {"dial": np.array([log_kappa, gain, direction, now])}

    def metrics(self, choice: Choice) -> dict[str, float | None]:
        """Returns kappa and the target of every new source, `rod/mix/target/<source>`."""
        pool, is_set = choice.pool, ~self._aims_at(choice.pool, "specialist") & _is_new(choice.pool)
        named = zip(pool.sources, self.targets(pool), is_set, strict=True)
        values: dict[str, float | None] = {"rod/mix/kappa": self._joint.kappa}
        return values | {f"rod/mix/target/{s.name}": float(t) for s, t, given in named if given}

    @property
    def _joint(self) -> Joint:
        return Joint(math.exp(self.state["dial"][0]))

    def _full_state(self, pool: Pool) -> dict[str, Any]:
        """Returns the state; before the first update, with what is known at the base."""
        if "mean" in self.state:
            return self.state
        is_new_M = _is_new(pool)
        return self.state | {
            # of the last blocks of each source, roughly how many these are, and their last step
            "mean": np.where(is_new_M, np.nan, 0.0),
            "variance": np.zeros(len(is_new_M)),
            "blocks": np.where(is_new_M, 0, MEMORY_BLOCKS),
            "seen": np.full(len(is_new_M), -1),
            # of every bin: blocks, and the sums of their places in the source and of their losses
            "curve": np.zeros((len(is_new_M), 3, _BINS_B)),
        }

    def _target(self, source: str) -> Target:
        return self.target[source] if isinstance(self.target, Mapping) else self.target

    def _aims_at(self, pool: Pool, target: str) -> Mask:
        """Returns whether a source is new text with a kind of target, bool [M]."""
        new = zip(pool.sources, _is_new(pool), strict=True)
        return np.array([is_new and self._target(s.name) == target for s, is_new in new])

    def _forecast(self, pool: Pool, source: int) -> float:
        """Returns the loss that a source would come to if all steps had new text alone."""
        if not pool.steps:
            raise ValueError(
                "target='auto' forecasts the loss at the end of a run, whose length is not known: "
                "give a number of nats per token."
            )
        if "curve" not in self.state:
            return 0.0
        count_M = np.where(_is_new(pool), [s.count for s in pool.sources], 0)
        share = count_M[source] / count_M.sum() if count_M.any() else 1 / _is_new(pool).sum()
        of_step = float(self.state["batch"] * share)  # its blocks in a step of new text
        count_B, place_B, loss_B = self.state["curve"][source]
        seen = count_B > 0
        if count_B.sum() < max(0.1 * pool.steps * of_step, 1) or seen.sum() < 3:
            return 0.0
        weight_B = count_B[seen] / count_B.sum()
        step_B, loss_B = place_B[seen] / count_B[seen] / of_step, loss_B[seen] / count_B[seen]
        x_EB = (step_B + _OLD_STEPS) ** -_EXPONENTS_E[:, None]
        end_E = (pool.steps + _OLD_STEPS) ** -_EXPONENTS_E
        mean_E, mean_loss = (weight_B * x_EB).sum(1), (weight_B * loss_B).sum()
        apart_EB = x_EB - mean_E[:, None]
        slope_E = (weight_B * apart_EB * (loss_B - mean_loss)).sum(1)  # by least squares
        slope_E = np.maximum(0.0, slope_E / (weight_B * apart_EB**2).sum(1))
        error_EB = loss_B - mean_loss - slope_E[:, None] * apart_EB
        best = int(np.argmin((weight_B * error_EB**2).sum(1)))
        return max(0.0, float(mean_loss + slope_E[best] * (end_E[best] - mean_E[best])))


def _is_new(pool: Pool) -> Mask:
    """Returns whether a source is of adaptation, bool [M]."""
    return np.array([source.role == "adaptation" for source in pool.sources])


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0
