"""The mixes that users request: the profiles of the benchmark's GPU model, and how often each is wanted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from mig_agent.adapters import catalog_files
from mig_agent.core.model import Layout, Profile

_MODEL = Path(__file__).resolve().parents[3] / "profiles" / "a100-80gb.yaml"
NAMES = ("1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb")
"""The kinds of request; everywhere in the benchmark a kind is an index into this."""
LARGEST = len(NAMES) - 1
SLICES = 8
"""Memory slices of one GPU."""
_RANDOM_LOADS = (0.3, 1.2)


@cache
def layout() -> Layout:
    """Return the GPU model of all computations; A100 and H100 with 80 GB can be cut alike."""
    return catalog_files.load_model(_MODEL).layout


@cache
def kinds() -> tuple[Profile, ...]:
    """Return the profiles of the kinds, smallest first."""
    return tuple(layout().by_name[name] for name in NAMES)


@cache
def sizes() -> tuple[int, ...]:
    """Return the memory slices of each kind."""
    return tuple(kind.memory_slices for kind in kinds())


@dataclass(frozen=True, slots=True)
class Mix:
    """How large a share of all requests each kind has; the shares add up to 1."""

    name: str
    shares: tuple[float, ...]

    @property
    def mean_slices(self) -> float:
        """Memory slices of a request, on average."""
        return sum(share * size for share, size in zip(self.shares, sizes(), strict=True))

    def arrival_rate(self, load: float, gpus: int) -> float:
        """Return requests per mean service time such that the requested slices are `load` times the existing ones."""
        return load * SLICES * gpus / self.mean_slices


UNIFORM = Mix("uniform", (1 / 6,) * 6)
SKEW_SMALL = Mix("skew-small", (0.30, 0.25, 0.20, 0.10, 0.10, 0.05))
SKEW_BIG = Mix("skew-big", (0.05, 0.10, 0.10, 0.20, 0.25, 0.30))
BIMODAL = Mix("bimodal", (0.30, 0.15, 0.05, 0.05, 0.15, 0.30))
MIXES = (UNIFORM, SKEW_SMALL, SKEW_BIG, BIMODAL)


@dataclass(frozen=True, slots=True)
class Setting:
    """A mix and a load."""

    mix: Mix
    load: float


def random_settings(count: int, seed: int) -> tuple[Setting, ...]:
    """Return mixes drawn evenly from all possible (Dirichlet), with loads evenly between 0.3 and 1.2."""
    generator = np.random.default_rng(seed)
    drawn = []
    for number in range(count):
        shares = tuple(float(share) for share in generator.dirichlet(np.ones(len(NAMES))))
        drawn.append(Setting(Mix(f"random {number}", shares), float(generator.uniform(*_RANDOM_LOADS))))
    return tuple(drawn)
