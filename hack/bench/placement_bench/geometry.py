"""nos-like: GPUs have one of the known geometries, and get another only when no ready instance serves.

A geometry is a maximal layout. A request takes a free instance of its profile from the first GPU that has one;
otherwise the first GPU gets a new geometry for which some geometry keeps all busy instances and has the profile free.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from mig_agent.core.model import Placement
from placement_bench.clusters import Made
from placement_bench.mixes import kinds
from placement_bench.optimum import states_by_profile

Piece = tuple[int, Placement]
"""A kind and its placement."""


@cache
def geometries() -> tuple[frozenset[Piece], ...]:
    """Return all maximal layouts, the one cut into most pieces first."""
    windows = [(kind, place) for kind, profile in enumerate(kinds()) for place in profile.placements]
    maximal = []
    for state in states_by_profile():
        mask = sum(place.mask for _, place in state)
        if all(place.mask & mask for _, place in windows):
            maximal.append(state)
    return tuple(sorted(maximal, key=lambda each: (-len(each), sorted(each))))


@cache
def _geometry_with(busy: frozenset[Piece], kind: int) -> tuple[frozenset[Piece], Piece] | None:
    """Return the first geometry that keeps the busy pieces and has one of the kind free, with that piece."""
    for geometry in geometries():
        if busy <= geometry:
            free = sorted(piece for piece in geometry - busy if piece[0] == kind)
            if free:
                return geometry, free[0]
    return None


@dataclass(slots=True)
class _Cut:
    """A GPU: its pieces, and which of them are leased."""

    pieces: frozenset[Piece] = frozenset()
    busy: frozenset[Piece] = frozenset()
    free: set[Piece] = field(default_factory=set)


class GeometryCluster:
    """GPUs that are cut into known geometries."""

    def __init__(self, gpus: int) -> None:
        self.made = Made()
        self._gpus = [_Cut() for _ in range(gpus)]

    def place(self, kind: int, _now: float) -> tuple[int, Piece] | None:
        """Lease a ready piece, or one of a GPU that gets a new geometry."""
        for number, gpu in enumerate(self._gpus):
            ready = [piece for piece in gpu.free if piece[0] == kind]
            if ready:
                self.made.reused += 1
                return self._lease(number, min(ready))
        for number, gpu in enumerate(self._gpus):
            found = _geometry_with(gpu.busy, kind)
            if found is not None:
                geometry, piece = found
                self.made.created += len(geometry - gpu.pieces)
                self.made.destroyed += len(gpu.pieces - geometry)
                gpu.pieces = geometry
                gpu.free = set(geometry - gpu.busy)
                return self._lease(number, piece)
        return None

    def end(self, handle: tuple[int, Piece], _now: float) -> None:
        """End the lease; the piece stays, ready."""
        number, piece = handle
        gpu = self._gpus[number]
        gpu.busy -= {piece}
        gpu.free.add(piece)

    def _lease(self, number: int, piece: Piece) -> tuple[int, Piece]:
        gpu = self._gpus[number]
        gpu.free.remove(piece)
        gpu.busy |= {piece}
        return number, piece
