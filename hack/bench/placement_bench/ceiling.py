"""An upper bound for a trace of rounds, even for a policy that knows all of it and may move instances freely.

A bound by prices: a slice of memory or of compute has a price in each round, for each GPU model. A pod is then worth
what it counts for, less the prices of the slices that it would take where they are cheapest, or nothing. Together with
the prices of all existing slices, that is never less than what any choice of pods can reach, whatever the prices:
Lagrange's dual of the whole problem, in which windows are ignored. A descent searches for prices that make it small.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mig_agent.core.model import Layout, Want
from mig_agent.core.planning.profiles import candidates
from placement_bench.rounds import Asked, Rounds
from placement_bench.rules import plain

Floats = npt.NDArray[np.float64]
_STEPS = 1000
_FIRST_STEP = 0.2


def ceiling(rounds: Rounds, models: Sequence[Layout], worth: Sequence[float]) -> float:
    """Return the bound of what served pods can count for; `worth` is of each pod of the trace, in its order."""
    pods = [asked for row in rounds for asked in row]
    if not pods:
        return 0.0
    wants = list(dict.fromkeys(asked.want for asked in pods))
    last = max(asked.ends for asked in pods)
    values = np.array(worth, dtype=np.float64)
    problem = _Problem(pods, wants, Counter(models), last, values)
    step = _FIRST_STEP * float(values.sum() / (problem.room.sum() * last)) * float(np.sqrt(last * problem.room.size))
    prices = np.zeros((last, *problem.room.shape))
    best = float(values.sum())
    for number in range(_STEPS):
        bound, slope = problem.dual(prices)
        best = min(best, bound)
        size = float(np.sqrt((slope * slope).sum()))
        if not size:
            break
        prices = np.maximum(0.0, prices - step / (1 + number / 50) * slope / size)
    return best


class _Problem:
    """The requests and the GPUs as arrays. Last axis: slices of memory, slices of compute."""

    def __init__(
        self, pods: Sequence[Asked], wants: Sequence[Want], models: Counter[Layout], last: int, values: Floats
    ) -> None:
        self.room = np.array([[gpus * size for size in _sizes(model)] for model, gpus in models.items()], dtype=float)
        self._values = values
        self._which = np.array([wants.index(asked.want) for asked in pods])
        self._stays = np.array([[asked.comes <= number < asked.ends for number in range(last)] for asked in pods])
        least = [[_least(want, model) for model in models] for want in wants]
        self._fits = np.array([[each is not None for each in row] for row in least])
        self._takes = np.array([[each or (0, 0) for each in row] for row in least], dtype=float)

    def dual(self, prices: Floats) -> tuple[float, Floats]:
        """Return the bound at these prices (by round and model), and how it changes with each of them.

        A pod may be on another GPU in every round.
        """
        costs = (prices * self._takes[:, None]).sum(axis=3)  # by want, round and model
        costs[np.broadcast_to(~self._fits[:, None], costs.shape)] = np.inf
        cheapest = costs.argmin(axis=2)
        paid = np.where(self._stays, costs.min(axis=2)[self._which], 0.0).sum(axis=1)
        left = self._values - paid
        chosen = left > 0
        there = np.zeros(cheapest.shape)
        np.add.at(there, self._which[chosen], self._stays[chosen])
        slope = np.repeat(self.room[None], len(prices), axis=0)
        for model in range(self.room.shape[0]):
            slope[:, model] -= (there * (cheapest == model)).T @ self._takes[:, model]
        return float((prices * self.room).sum() + left[chosen].sum()), slope


def _sizes(model: Layout) -> tuple[int, int]:
    """Return the slices of memory and of compute of one GPU."""
    return model.memory_slices, max(profile.compute_slices for profile in plain(model))


def _least(want: Want, model: Layout) -> tuple[int, int] | None:
    """Return the fewest slices of each kind that serve a want on a model; None if no profile there does."""
    fitting = candidates(want, model)
    if not fitting:
        return None
    return min(each.memory_slices for each in fitting), min(each.compute_slices for each in fitting)
