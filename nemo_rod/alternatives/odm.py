"""Online Data Mixing (Albalak et al., 2023): a bandit over sources, rewarded by their losses.

The sources with the highest training losses are sampled most. No block is scored, and there are no
references: the losses are those of the updates. The algorithm is Exp3 with a moving average:

    eps(t)  = min(1 / G, sqrt(ln G / (G t)))                exploration, of t = 1, 2, ...
    pi_g(t) = (1 - G eps(t)) softmax_g(eps(t - 1) R(t)) + eps(t)
    R_g(t)  = alpha R_g(t - 1) + (1 - alpha) loss_g(t) / pi_g(t)     of the sources just sampled

Instead of drawing one source at random per step, a batch is divided among all by pi.

Shape suffixes: C = candidates, K = chosen, G = sources.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from nemo_rod.selection.arrays import Floats, Ids, Nats
from nemo_rod.selection.candidates import Pool
from nemo_rod.selection.choice import Choice
from nemo_rod.selection.policies import NOTHING, Policy, apportion, first_of_groups


@dataclass(eq=False)
class ODM(Policy):
    """Divides every batch among the sources by the probabilities of a bandit.

    Raises:
        ValueError: alpha is not in [0, 1).
    """

    alpha: float = 0.9  # weight of the former reward in the moving average
    needs = NOTHING

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < 1:
            raise ValueError(f"alpha of ODM is {self.alpha}, expected a number in [0, 1).")
        # estimated rewards, float64 [G]; empty before the first update
        self.state = {"reward": np.empty(0), "updates": np.zeros((), dtype=np.int64)}

    def probabilities(self, num_sources: int) -> Floats:
        """Returns the probabilities of the sources at the next step, float64 [G]."""
        reward, t = self.state["reward"], int(self.state["updates"]) + 1
        if not len(reward):
            return np.full(num_sources, 1 / num_sources)
        explore = _exploration(num_sources, t)
        value = _exploration(num_sources, t - 1) * reward
        weight = np.exp(value - value.max())
        return (1 - num_sources * explore) * weight / weight.sum() + explore

    def select(self, pool: Pool, score_C: Floats | None, k: int) -> Ids:
        """Returns k positions, divided among the sources; see `Policy.select`."""
        share_G = self.probabilities(len(pool.sources))
        return first_of_groups(pool.source_C, apportion(share_G, k, pool.step), k)

    def observe(self, choice: Choice, loss_K: Nats) -> None:
        """Rewards the sources of a batch with the mean losses of their blocks."""
        num_sources = len(choice.pool.sources)
        share_G = self.probabilities(num_sources)
        source_K = choice.pool.source_C[choice.chosen]
        known_K = np.isfinite(loss_K)
        count_G = np.bincount(source_K[known_K], minlength=num_sources)
        sum_G = np.bincount(source_K[known_K], loss_K[known_K].astype(np.float64), num_sources)
        reward = self.state["reward"] if len(self.state["reward"]) else np.zeros(num_sources)
        seen = count_G > 0
        new_G = sum_G[seen] / count_G[seen] / share_G[seen]
        reward[seen] = self.alpha * reward[seen] + (1 - self.alpha) * new_G
        self.state = {"reward": reward, "updates": self.state["updates"] + 1}

    def metrics(self, choice: Choice) -> dict[str, float | None]:
        """Returns the probability of every source, `rod/odm/<source>`."""
        sources = choice.pool.sources
        share_G = self.probabilities(len(sources))
        return {f"rod/odm/{s.name}": float(p) for s, p in zip(sources, share_G, strict=True)}


def _exploration(num_sources: int, t: int) -> float:
    """Returns the exploration rate of update t, which is that of update 1 before."""
    spread = math.sqrt(math.log(max(2, num_sources)) / (num_sources * max(1, t)))
    return min(1 / num_sources, spread)
