"""The exact optimum for one GPU, and the exact value of any policy there.

Requests come as a Poisson process, leases last an exponential time, and a request that fits must be served: a policy
only chooses the placement. That is a Markov decision process with one state for each set of instances that fit side by
side. Howard's policy iteration gives its optimum: solve the linear equations of a policy, improve it, until nothing
changes. The worth of a policy is the share of the requested slices that it serves.

Two instances on the same slices behave alike whatever their profiles, so states are kept by windows, which loses
nothing: the 723 states by profile become 417 by window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mig_agent.core.model import Placement
from placement_bench.mixes import Setting, kinds, sizes

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Choice = Callable[[int, int], Placement | None]
"""Maps (kind, busy mask) to the placement that a policy takes; None where none is free."""
REFUSED = -1
_ROUNDING = 1e-9
"""Differences below this are noise of the linear equations, not improvements."""


def states_by_profile() -> frozenset[frozenset[tuple[int, Placement]]]:
    """Return every set of instances, as (kind, placement), that fit side by side on one GPU."""
    windows = [(kind, place) for kind, profile in enumerate(kinds()) for place in profile.placements]
    found: set[frozenset[tuple[int, Placement]]] = {frozenset()}
    ahead: list[tuple[frozenset[tuple[int, Placement]], int]] = [(frozenset(), 0)]
    while ahead:
        state, mask = ahead.pop()
        for window in windows:
            larger = state | {window}
            if not window[1].mask & mask and larger not in found:
                found.add(larger)
                ahead.append((larger, mask | window[1].mask))
    return frozenset(found)


class OneGpu:
    """One GPU as a Markov decision process."""

    def __init__(self) -> None:
        by_windows = {tuple(sorted(place for _, place in state)) for state in states_by_profile()}
        self.states: tuple[tuple[Placement, ...], ...] = tuple(
            sorted(by_windows, key=lambda state: (len(state), state))
        )
        self._index = {state: number for number, state in enumerate(self.states)}
        self.masks = [sum(place.mask for place in state) for state in self.states]

    @cached_property
    def actions(self) -> list[list[list[tuple[Placement, int]]]]:
        """Return by kind and state the free placements, each with the state that taking it leads to."""
        return [
            [
                [
                    (place, self._index[tuple(sorted((*state, place)))])
                    for place in sorted(profile.placements)
                    if not place.mask & mask
                ]
                for state, mask in zip(self.states, self.masks, strict=True)
            ]
            for profile in kinds()
        ]

    @cached_property
    def departures(self) -> Floats:
        """Rates from state to state as leases end, one per mean service time each; the diagonal balances."""
        rates = np.zeros((len(self.states), len(self.states)))
        for number, state in enumerate(self.states):
            for place in state:
                rates[number, self._index[tuple(each for each in state if each != place)]] += 1
            rates[number, number] = -len(state)
        return rates

    @cached_property
    def _padded(self) -> Ints:
        """Maps (kind, state, choice) to the next state, the last choice repeated; REFUSED where none is free."""
        most = max(len(choices) for row in self.actions for choices in row)
        table = np.full((len(self.actions), len(self.states), most), REFUSED, dtype=np.int64)
        for kind, row in enumerate(self.actions):
            for number, choices in enumerate(row):
                for place in range(most if choices else 0):
                    table[kind, number, place] = choices[min(place, len(choices) - 1)][1]
        return table

    def table_of(self, choice: Choice) -> Ints:
        """Return a policy as a table from (kind, state) to the next state."""
        table = np.full((len(self.actions), len(self.states)), REFUSED, dtype=np.int64)
        for kind, row in enumerate(self.actions):
            for number, choices in enumerate(row):
                place = choice(kind, self.masks[number])
                if place is not None:
                    table[kind, number] = dict(choices)[place]
                elif choices:
                    message = f"a policy refused kind {kind} on mask {self.masks[number]:08b}, where it fits"
                    raise ValueError(message)
        return table

    def evaluate(self, policy: Ints, setting: Setting) -> tuple[float, Floats]:
        """Return the share of the requested slices that a policy serves, and the relative worth of each state."""
        count = len(self.states)
        rates = _rates(setting)
        rows = np.arange(count)
        generator = self.departures.copy()
        reward = np.zeros(count)
        for kind, rate in enumerate(rates):
            served = policy[kind] != REFUSED
            np.add.at(generator, (rows[served], policy[kind][served]), rate)
            generator[rows[served], rows[served]] -= rate
            reward[served] += rate * sizes()[kind]
        # 0 = reward - gain + generator x worth, with the worth of the empty GPU as the unit's zero.
        system = generator.copy()
        system[:, 0] = -1.0
        solved: Floats = np.linalg.solve(system, -reward).astype(np.float64)
        gain = float(solved[0])
        solved[0] = 0.0
        return gain / float(np.dot(rates, sizes())), solved

    def optimum(self, setting: Setting, start: Ints | None = None) -> tuple[float, Ints]:
        """Return the best share that any policy can serve, and a policy that reaches it."""
        policy = self.table_of(self._first_place) if start is None else start
        while True:
            share, worth = self.evaluate(policy, setting)
            better = self._improved(policy, worth)
            if np.array_equal(better, policy):
                return share, policy
            policy = better

    def _improved(self, policy: Ints, worth: Floats) -> Ints:
        ahead = np.where(self._padded == REFUSED, -np.inf, worth[self._padded])
        best = ahead.argmax(axis=2)
        chosen = np.take_along_axis(self._padded, best[:, :, None], axis=2)[:, :, 0]
        now = np.where(policy == REFUSED, -np.inf, worth[policy])
        gains = np.take_along_axis(ahead, best[:, :, None], axis=2)[:, :, 0] > now + _ROUNDING
        return np.where(gains, chosen, policy)

    def _first_place(self, kind: int, mask: int) -> Placement | None:
        return next((place for place in sorted(kinds()[kind].placements) if not place.mask & mask), None)


def _rates(setting: Setting) -> Sequence[float]:
    total = setting.mix.arrival_rate(setting.load, 1)
    return [total * share for share in setting.mix.shares]
