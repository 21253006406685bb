"""Arriving requests: moments, kinds, and how long each lease lasts. Every policy gets the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from placement_bench.mixes import SLICES, Setting, sizes

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Arrivals:
    """Requests in order of time. Times are in mean service times."""

    at: tuple[float, ...]
    kind: tuple[int, ...]
    lasts: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.at)


def plain_poisson(setting: Setting, gpus: int, count: int, seed: int) -> Arrivals:
    """Return a Poisson process of requests, with leases that last an exponential time of mean 1."""
    generator = np.random.default_rng((seed, gpus, round(1000 * setting.load)))
    gaps = generator.exponential(1.0 / setting.mix.arrival_rate(setting.load, gpus), count)
    kind = generator.choice(len(setting.mix.shares), size=count, p=setting.mix.shares)
    return made(np.cumsum(gaps), kind, generator.exponential(1.0, count))


def poisson(setting: Setting, gpus: int, count: int, seed: int) -> Arrivals:
    """Return a Poisson process made as even as possible: for shares of requests that are served.

    The kinds come as often as the mix says and the leases are scaled, by a percent or so, so that the requested work is
    exactly the load: otherwise what is measured is mostly how much each seed happens to request.
    """
    generator = np.random.default_rng((seed, gpus, round(1000 * setting.load)))
    gaps = generator.exponential(1.0 / setting.mix.arrival_rate(setting.load, gpus), count)
    kind = _stratified(generator, setting.mix.shares, count)
    at = np.cumsum(gaps)
    lasts = generator.exponential(1.0, count)
    work = float(np.dot(np.array(sizes())[kind], lasts))
    return made(at, kind, lasts * (setting.load * SLICES * gpus * float(at[-1]) / work))


def _stratified(generator: np.random.Generator, shares: Sequence[float], count: int) -> Ints:
    """Return kinds in random order, each as often as its share says, to within one."""
    edges = np.round(np.cumsum(shares) * count).astype(np.int64)
    kind = np.searchsorted(edges, np.arange(count), side="right").clip(max=len(shares) - 1)
    generator.shuffle(kind)
    return kind.astype(np.int64)


def made(at: Floats, kind: Ints, lasts: Floats) -> Arrivals:
    """Return arrivals from arrays of one length."""
    return Arrivals(at=tuple(at.tolist()), kind=tuple(kind.tolist()), lasts=tuple(lasts.tolist()))
