"""The exact number of further devices of one kind that a node can give: for advertising where only counts can be given.

Instances that are leased, foreign, blocked, or being created or destroyed occupy capacity; idle ones do not, since a
plan reuses or destroys them. GPUs share nothing, so their counts add up. On one GPU the windows of one profile are
intervals on the slice axis; the most that do not overlap are found by taking the one that ends first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from mig_agent.core.model import GpuState, GpuUuid, Isolation, Layout, NodeView, Profile, Request, Want
from mig_agent.core.planning.exact_packing import pack
from mig_agent.core.planning.feasibility import empty_occupancy
from mig_agent.core.planning.occupancy import Candidate, Occupancy
from mig_agent.core.planning.placement import tables_for
from mig_agent.core.planning.plan import DEFAULT_POLICY, Policy
from mig_agent.core.planning.profiles import order_of_size, smallest_profile, wasted_mib
from mig_agent.core.planning.search import NOTHING_RESERVED, usable_gpus
from mig_agent.core.planning.shares import largest_share

_ANYTHING = Request(wants=())
_STEPS = 200
"""Steps of the search for a way to place all pending wants, where one after the other they do not fit."""


def creatable(
    view: NodeView,
    want: Want,
    policy: Policy = DEFAULT_POLICY,
    before: Sequence[Want] = (),
    *,
    reserved: frozenset[GpuUuid] = NOTHING_RESERVED,
) -> int:
    """Return how many devices for this want could be leased now, one after the other.

    `before` are pending wants: they are placed first, by the rules of `plan`; one that does not fit waits, and takes
    nothing. `reserved` are GPUs reserved for other requests. Cordoned and lost GPUs give nothing.
    """
    return RemainingCapacity(view, policy, before, reserved=reserved).creatable(want)


@dataclass(frozen=True, slots=True, kw_only=True)
class Available:
    """Number of devices of one profile, by its name on all GPUs, that could be leased now if nothing else were."""

    profile: str
    memory_mib: int
    """The least where GPU models differ."""
    count: int


def available(
    view: NodeView, policy: Policy = DEFAULT_POLICY, *, reserved: frozenset[GpuUuid] = NOTHING_RESERVED
) -> tuple[Available, ...]:
    """Return how many devices of each plain profile could be leased now, the smallest profile first.

    A profile with attributes is left out: it takes the place of a plain one. One that a GPU offers and of which none
    fits now has the count 0; one that only lost GPUs offer is left out.
    """
    occupancies = {gpu.uuid: Occupancy.of(gpu, policy) for gpu in usable_gpus(view, _ANYTHING, reserved)}
    smallest: dict[str, Profile] = {}
    counts: dict[str, int] = {}
    for gpu in view.gpus:
        if gpu.state is GpuState.LOST:
            continue
        occupancy = occupancies.get(gpu.uuid)
        for profile in gpu.layout.profiles:
            if profile.attributes:
                continue
            name = profile.name
            smallest[name] = min(smallest.get(name, profile), profile, key=order_of_size)
            fitting = 0 if occupancy is None else _most(gpu.layout, profile, occupancy.held, occupancy.engines)
            counts[name] = counts.get(name, 0) + fitting
    return tuple(
        Available(profile=name, memory_mib=profile.memory_mib, count=counts[name])
        for name, profile in sorted(smallest.items(), key=lambda item: order_of_size(item[1]))
    )


def largest_share_mib(view: NodeView, *, reserved: frozenset[GpuUuid] = NOTHING_RESERVED) -> int:
    """Return the limit of the largest share of a GPU that could be leased now, in MiB; 0 if there is none."""
    shares = (largest_share(gpu) for gpu in usable_gpus(view, _ANYTHING, reserved))
    return max((each.memory_mib for each in shares if each is not None), default=0)


def servable(view: NodeView, want: Want) -> int:
    """Return the most devices for this want that the node could ever give: all of its GPUs usable and empty."""
    return _count((empty_occupancy(gpu, keep_foreign=False) for gpu in view.gpus), want)


def servable_in_containers(view: NodeView, want: Want) -> int:
    """Return the same without shares: nothing brings what enforces their limits into a container."""
    return servable(view, replace(want, isolation=Isolation.MIG))


class RemainingCapacity:
    """Counts what a node has left after the pending wants, for questions about several kinds of devices."""

    def __init__(
        self,
        view: NodeView,
        policy: Policy = DEFAULT_POLICY,
        before: Sequence[Want] = (),
        *,
        reserved: frozenset[GpuUuid] = NOTHING_RESERVED,
    ) -> None:
        occupancies = [Occupancy.of(gpu, policy) for gpu in usable_gpus(view, _ANYTHING, reserved)]
        self.placed = 0
        """How many of the pending wants fit."""
        self._occupancies = occupancies
        if before:
            self._occupancies, self.placed = _after(occupancies, before, policy)

    def creatable(self, want: Want) -> int:
        """Return how many more devices for this want could be leased now, one after the other."""
        return _count(self._occupancies, want)


def _count(occupancies: Iterable[Occupancy], want: Want) -> int:
    total = 0
    for occupancy in occupancies:
        profile = smallest_profile(want, occupancy.gpu.layout)
        if profile is not None and profile.kind.shares_memory:
            total += occupancy.most_shares(profile)
        elif profile is not None:
            total += _most(occupancy.gpu.layout, profile, occupancy.held, occupancy.engines)
    return total


@lru_cache(maxsize=16384)
def _most(layout: Layout, profile: Profile, held: int, engines: int) -> int:
    """Return the most instances of one profile beside those held (`held` is a mask of slices, `engines` is packed)."""
    tables = tables_for(layout)
    free = (ranked.window.mask for ranked in tables.ranked(profile.id, held))
    each = tables.engines_of(profile)
    count = 0
    for mask in sorted(free, key=int.bit_length):
        if mask & held or not tables.engines_fit(engines + each):
            continue
        held |= mask
        engines += each
        count += 1
    return count


def _after(occupancies: list[Occupancy], before: Sequence[Want], policy: Policy) -> tuple[list[Occupancy], int]:
    """Return the GPUs with the pending wants placed as they would be planned one by one, and how many fit."""
    # What does not fit even alone waits, whatever the others do.
    fitting = [want for want in before if _cheapest(occupancies, want, policy)[1] is not None]
    one_by_one, placed = _placed(occupancies, fitting, policy)
    if placed == len(fitting):
        return one_by_one, placed
    # In another order or other places all of them may fit, and a request for several is planned that way.
    packed = pack(occupancies, fitting, most_steps=_STEPS)
    if packed is None:
        return one_by_one, placed
    together = occupancies.copy()
    for number, window in packed:
        candidate = together[number].candidate_at(window, policy.creation_cost)
        if candidate is None:
            raise AssertionError(f"no place for {window} that was packed")
        together[number] = together[number].place(candidate)
    return together, len(fitting)


def _placed(occupancies: Sequence[Occupancy], wants: Sequence[Want], policy: Policy) -> tuple[list[Occupancy], int]:
    """Return the GPUs after each want that fits, and how many did."""
    after, placed = list(occupancies), 0
    for want in wants:
        number, candidate = _cheapest(after, want, policy)
        if candidate is not None:
            after[number] = after[number].place(candidate)
            placed += 1
    return after, placed


def _cheapest(occupancies: Sequence[Occupancy], want: Want, policy: Policy) -> tuple[int, Candidate | None]:
    """Return the GPU, by its place in the list, and the slot that the planner would choose; the first of equals."""
    best: tuple[bool, float, float, float] | None = None
    chosen, found = 0, None
    for number, occupancy in enumerate(occupancies):
        profile = smallest_profile(want, occupancy.gpu.layout)
        candidate = None if profile is None else occupancy.best(profile, policy.creation_cost)
        if profile is None or candidate is None:
            continue
        key = (
            profile.kind.shares_memory,
            wasted_mib(profile, want, occupancy.gpu.layout),
            candidate.cost,
            candidate.age,
        )
        if best is None or key < best:
            best, chosen, found = key, number, candidate
    return chosen, found
