"""The GPUs that the simulation places requests on, under one policy or another, all with the same interface."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from mig_agent.core.model import Placement
from placement_bench.mixes import LARGEST, NAMES
from placement_bench.rules import Rule

HandleT = TypeVar("HandleT")
"""What a cluster uses to identify an instance that it gave."""


@dataclass(slots=True)
class Made:
    """Counts of what a cluster had to do to its GPUs."""

    created: int = 0
    reused: int = 0
    destroyed: int = 0


class Cluster(Protocol[HandleT]):
    """GPUs that requests are placed on and leave again."""

    made: Made

    def place(self, kind: int, now: float) -> HandleT | None:
        """Place an instance; None when the policy finds no slot."""

    def end(self, handle: HandleT, now: float) -> None:
        """End the lease of an instance."""


class RuleCluster:
    """GPUs under a rule that knows only which slices are busy; every instance is created and destroyed."""

    def __init__(self, rule: Rule, gpus: int) -> None:
        self.made = Made()
        self._rule = rule
        self._masks = np.zeros(gpus, dtype=np.int64)

    def place(self, kind: int, _now: float) -> tuple[int, int] | None:
        """Place where the rule's score is least."""
        scores = self._rule.scores[kind][self._masks]
        gpu = int(scores.argmin())
        place = self._rule.places[kind][int(self._masks[gpu])]
        if place is None:
            return None
        self._masks[gpu] |= place.mask
        self.made.created += 1
        return gpu, place.mask

    def end(self, handle: tuple[int, int], _now: float) -> None:
        """Destroy the instance."""
        gpu, mask = handle
        self._masks[gpu] ^= mask
        self.made.destroyed += 1


class RepackedCluster:
    """GPUs whose instances may be moved freely, as if migration cost nothing: a bound for policies that cannot migrate.

    Whether the instances fit in some arrangement follows from counting the halves of the GPUs. Slices 0-3 hold a 4g, a
    3g or two pairs; slices 4-7 a 3g or one pair and the two last slices; a pair holds a 2g, a 1g.20gb or two 1g, the
    two last slices a 1g.20gb or one 1g. A 4g needs a left half, a 3g gives up least in a right one, a 1g.20gb least in
    the last two.
    """

    def __init__(self, gpus: int) -> None:
        self.made = Made()
        self._gpus = gpus
        self._counts = [0] * len(NAMES)

    def place(self, kind: int, _now: float) -> int | None:
        """Place anywhere, as long as all instances fit."""
        self._counts[kind] += 1
        if fits(self._counts, self._gpus):
            self.made.created += 1
            return kind
        self._counts[kind] -= 1
        return None

    def end(self, handle: int, _now: float) -> None:
        """Remove the instance."""
        self._counts[handle] -= 1
        self.made.destroyed += 1


def fits(counts: list[int], gpus: int) -> bool:
    """Return True if these instances, counted by kind, fit on empty GPUs; see RepackedCluster."""
    ones, doubles, twos, threes, fours, sevens = counts
    left = right = gpus - sevens
    left -= fours
    if left < 0 or threes > left + right:
        return False
    in_right = min(threes, right)
    right -= in_right
    left -= threes - in_right
    tails = right
    pairs = 2 * left + right - twos - max(0, doubles - tails)
    return pairs >= 0 and ones <= 2 * pairs + max(0, tails - doubles)


def fewest_gpus(counts: list[int]) -> int:
    """Return the fewest GPUs that these instances, counted by kind, fit on."""
    gpus = counts[LARGEST]
    while not fits(counts, gpus):
        gpus += 1
    return gpus


@dataclass(slots=True)
class _Held:
    """An instance of IdleCluster; `since` is when its lease ended."""

    gpu: int
    kind: int
    place: Placement
    since: float = 0.0


class IdleCluster:
    """GPUs that keep instances for reuse: reuse comes first whatever it costs, then a slot is searched.

    `seek(cluster, kind)` finds the GPU and the slot of a new instance. Idle instances that it overlaps are destroyed.
    """

    def __init__(self, gpus: int, seek: Callable[[IdleCluster, int], tuple[int, Placement] | None]) -> None:
        self.made = Made()
        self.busy = [0] * gpus
        self.idle: list[_Held] = []
        """Longest idle first."""
        self._seek = seek

    def place(self, kind: int, _now: float) -> _Held | None:
        """Reuse an idle instance of the kind, the one idle for the shortest time; otherwise create one."""
        for held in reversed(self.idle):
            if held.kind == kind:
                self.idle.remove(held)
                self.made.reused += 1
                break
        else:
            found = self._seek(self, kind)
            if found is None:
                return None
            held = _Held(found[0], kind, found[1])
            self.drop([each for each in self.idle if each.gpu == held.gpu and each.place.mask & held.place.mask])
            self.made.created += 1
        self.busy[held.gpu] |= held.place.mask
        return held

    def end(self, handle: _Held, now: float) -> None:
        """End the lease; the instance stays, idle."""
        handle.since = now
        self.busy[handle.gpu] ^= handle.place.mask
        self.idle.append(handle)

    def drop(self, victims: list[_Held]) -> None:
        """Destroy idle instances."""
        for victim in victims:
            self.idle.remove(victim)
        self.made.destroyed += len(victims)

    def occupied(self) -> list[int]:
        """Return for each GPU the slices with any instance on them."""
        masks = list(self.busy)
        for held in self.idle:
            masks[held.gpu] |= held.place.mask
        return masks


def by_rule(rule: Rule) -> Callable[[IdleCluster, int], tuple[int, Placement] | None]:
    """Place by the rule as if nothing were idle; overlapped idle instances are destroyed."""
    return lambda cluster, kind: _choose(rule, kind, cluster.busy)


def oldest_victims(rule: Rule) -> Callable[[IdleCluster, int], tuple[int, Placement] | None]:
    """Destroy idle instances, the one idle for longest first on any GPU, until the rule finds a slot."""

    def seek(cluster: IdleCluster, kind: int) -> tuple[int, Placement] | None:
        if _choose(rule, kind, cluster.busy) is None:
            return None
        found = _choose(rule, kind, cluster.occupied())
        while found is None:
            cluster.drop(cluster.idle[:1])
            found = _choose(rule, kind, cluster.occupied())
        return found

    return seek


def _choose(rule: Rule, kind: int, masks: list[int]) -> tuple[int, Placement] | None:
    scores = [rule.scores[kind, mask] for mask in masks]
    gpu = min(range(len(masks)), key=scores.__getitem__)
    place = rule.places[kind][masks[gpu]]
    return None if place is None else (gpu, place)
