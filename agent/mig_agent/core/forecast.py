"""Forecasts when waiting requests start: plays the queue forward, many times, with sampled lease times.

Each run draws when the active leases end (`core.load_history`, with deadlines as upper bounds), lets new requests come
as they came of late, and starts what fits by the rules of `core.backfill` and the planner. The starts of a request in
all runs are its distribution. With too few past leases there is one run in which every lease lasts until its deadline.

A forecast is resumable, since it takes long: call `advance` until it returns True.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from mig_agent.core.backfill import Reservation, WaitingRequest, gpu_share, in_order
from mig_agent.core.fairness import with_rank
from mig_agent.core.load_history import NO_DEMAND, Demand, PastLeases, RemainingTimes
from mig_agent.core.model import (
    Generation,
    Gpu,
    GpuUuid,
    Instance,
    InstanceState,
    NodeView,
    Placement,
    Profile,
    Request,
    Slot,
)
from mig_agent.core.planning.feasibility import FeasibilityCache, fewest_gpus
from mig_agent.core.planning.plan import DEFAULT_POLICY, Policy, Reuse
from mig_agent.core.planning.search import NOTHING_RESERVED, find, usable_gpus

RUNS = 40
"""Number of times that the queue is played forward."""
FEWEST_LEASE_TIMES = 10
"""With fewer past leases, only deadlines say when leases end."""
EARLY, LATE = 0.1, 0.9
"""The shares of runs between which the interval lies: 80 %."""
_CLEANING_SECONDS = 1.0
"""Longest time that an instance may take to be destroyed."""
_EVENTS_PER_REQUEST = 50
_LEAST_EVENTS = 2000
"""A run ends after so many events, even if not all requests have started in it."""

Uniform = Callable[[], float]
"""Draws evenly from 0 to 1."""


class Basis(StrEnum):
    """The basis of an estimate. The values are in messages for programs; never rename one."""

    DEADLINES = "deadlines"
    """The deadlines of the leases: an upper bound."""
    LEASES = "leases"
    """Durations of the last leases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEstimate:
    """The likely start of a waiting request: moments in seconds since the epoch; None: not known.

    It starts between `earliest` and `latest` with a probability of 80 %, and before `median` with 50 %.
    """

    earliest: float | None
    median: float | None
    latest: float | None
    basis: Basis
    leases: int = 0
    """Number of past leases that it goes by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """All that a forecast goes by."""

    view: NodeView
    waiting: Sequence[WaitingRequest]
    now: float
    past: PastLeases
    reservation_delay: float
    demand: Demand = NO_DEMAND
    policy: Policy = DEFAULT_POLICY
    strict_fifo: bool = False
    used: Mapping[str, float] | None = None
    """With fair share: what each tenant used, in weighted GPU-seconds (`core.fairness`), as if that stayed as it is."""

    def ranked(self, waiting: WaitingRequest, at: float) -> WaitingRequest:
        """Return a waiting request with its rank at a moment."""
        return waiting if self.used is None else with_rank(waiting, self.used, at, self.reservation_delay)

    @property
    def basis(self) -> Basis:
        """What the forecast goes by."""
        return Basis.LEASES if len(self.past.times) >= FEWEST_LEASE_TIMES else Basis.DEADLINES


_Place = tuple[int, int, int]
"""A device: the number of its GPU in the view, where it starts, and its profile's id."""
_Devices = tuple[tuple[int, int], ...]
"""The devices on one GPU: where each starts, and its profile's id."""


class Forecast:
    """Computes the likely starts of all waiting requests of a situation. The same draws give the same estimates."""

    def __init__(self, situation: Situation, uniform: Uniform, *, runs: int = RUNS) -> None:
        self._situation = situation
        self._uniform = uniform
        self._runs = runs if situation.basis is Basis.LEASES else 1
        self._node = _Node(situation.view)
        self._classes = _Classes(situation.view)
        self._lifetimes = _Lifetimes(situation)
        self._active = _active_leases(situation)
        self._strata = [_shuffled(self._runs, uniform) for _ in self._active]
        self._starts: dict[int, list[float]] = {each.seq: [] for each in situation.waiting}
        self._run: Iterator[None] | None = None
        self.done = 0
        """Number of runs that have ended."""

    def advance(self, enough: Callable[[], bool] = lambda: False) -> bool:
        """Go on until all runs have ended (True) or `enough` returns True (False)."""
        while self.done < self._runs and self._starts:
            if self._run is None:
                self._run = self._one_run()
            for _ in self._run:
                if enough():
                    return False
            self._run = None
            self.done += 1
        return True

    def estimates(self) -> Mapping[int, StartEstimate]:
        """Return the estimates by arrival number, from the runs that have ended; none where nothing is known."""
        found = {seq: self._estimate(sorted(starts[: self.done])) for seq, starts in self._starts.items() if self.done}
        return {seq: estimate for seq, estimate in found.items() if estimate is not None}

    def _estimate(self, starts: Sequence[float]) -> StartEstimate | None:
        situation = self._situation
        if situation.basis is Basis.DEADLINES:
            latest = _known(starts[0])
            if latest is None:
                return None
            return StartEstimate(earliest=situation.now, median=None, latest=latest, basis=Basis.DEADLINES)
        earliest, median, latest = (_quantile(starts, share) for share in (EARLY, 0.5, LATE))
        if earliest is None:
            return None
        return StartEstimate(
            earliest=earliest, median=median, latest=latest, basis=Basis.LEASES, leases=len(situation.past.times)
        )

    def _one_run(self) -> Iterator[None]:
        """Play the queue forward once; yield after each event."""
        situation, uniform = self._situation, self._uniform
        run = _Run(situation, self._node, self._classes)
        by_times = situation.basis is Basis.LEASES
        for lease, strata in zip(self._active, self._strata, strict=True):
            share = (strata[self.done] + uniform()) / self._runs
            run.end_later(situation.now + self._lifetimes.rest(lease.age, lease.at_most, share), lease.places)

        def lasts(request: Request) -> float:
            return self._lifetimes.rest(
                0.0, math.inf if request.ttl_seconds is None else request.ttl_seconds, uniform()
            )

        demand = situation.demand if by_times else NO_DEMAND
        next_request = math.inf
        if demand.per_second > 0:
            next_request = situation.now + _gap(demand, uniform)
        run.start_what_fits(situation.now, lasts)
        events = max(_LEAST_EVENTS, _EVENTS_PER_REQUEST * len(self._starts))
        while run.to_start and events:
            events -= 1
            ends = run.next_end
            if math.isinf(ends) and math.isinf(next_request):
                break
            if ends <= next_request:
                run.end(lasts)
            else:
                request = demand.requests[int(uniform() * len(demand.requests))]
                run.arrive(request, next_request, lasts)
                next_request += _gap(demand, uniform)
            yield
        for seq, starts in self._starts.items():
            starts.append(run.starts.get(seq, math.inf))


class _Lifetimes:
    """Draws how long leases go on.

    A lease with a deadline goes by how much of the time until theirs the others have used, as users of a node state
    deadlines more or less well; while few have ended, and without a deadline, it goes by how long all have lasted.
    """

    def __init__(self, situation: Situation) -> None:
        self._by_times = situation.basis is Basis.LEASES
        leases = situation.view.leases.values()
        self._times = RemainingTimes(situation.past.times, [situation.now - each.created_at for each in leases])
        self._shares: RemainingTimes | None = None
        if len(situation.past.shares) >= FEWEST_LEASE_TIMES:
            used = [
                (situation.now - each.created_at) / (each.expires_at - each.created_at)
                for each in leases
                if each.expires_at is not None and each.expires_at > each.created_at
            ]
            self._shares = RemainingTimes(situation.past.shares, used)

    def rest(self, age: float, at_most: float, share: float) -> float:
        """Return within how many more seconds this share of the leases of such an age and deadline end."""
        if not self._by_times:
            return at_most
        allowed = age + at_most
        if self._shares is None or not 0 < allowed < math.inf:
            return min(self._times.after(age, share), at_most)
        return min(self._shares.after(age / allowed, share) * allowed, at_most)


@dataclass(frozen=True, slots=True)
class _ActiveLease:
    """An active lease, or another thing that holds slices; `at_most` is how many more seconds it may last."""

    places: tuple[_Place, ...]
    age: float
    at_most: float


def _active_leases(situation: Situation) -> list[_ActiveLease]:
    view, now = situation.view, situation.now
    by_lease: dict[str, list[_Place]] = {}
    others: list[_ActiveLease] = []
    for number, gpu in enumerate(view.gpus):
        for each in gpu.instances:
            place = (number, each.slot.placement.start, each.slot.profile.id)
            match each.state:
                case InstanceState.LEASED | InstanceState.CREATING:
                    by_lease.setdefault(each.lease or f"generation {each.generation}", []).append(place)
                case InstanceState.DESTROYING:
                    others.append(_ActiveLease((place,), 0.0, _CLEANING_SECONDS))
                case _:
                    pass  # idle ones are in nobody's way; foreign and blocked ones are taken to stay
    leases = {str(lease.id): lease for lease in view.leases.values()}
    for lease_id, places in by_lease.items():
        lease = leases.get(lease_id)
        expires = None if lease is None else lease.expires_at
        others.append(
            _ActiveLease(
                places=tuple(places),
                age=0.0 if lease is None else max(now - lease.created_at, 0.0),
                at_most=math.inf if expires is None else max(expires - now, 0.0),
            )
        )
    return others


class _Node:
    """The GPUs of a view with any devices on them. A GPU with the same devices is the same value, with its caches."""

    def __init__(self, view: NodeView) -> None:
        self._gpus = view.gpus
        self._numbers = {gpu.uuid: number for number, gpu in enumerate(view.gpus)}
        self._known: list[dict[_Devices, Gpu]] = [{} for _ in view.gpus]
        self._staying = [
            tuple(each for each in gpu.instances if each.state in {InstanceState.FOREIGN, InstanceState.BLOCKED})
            for gpu in view.gpus
        ]
        self._existing = [{_key(each.slot): each for each in gpu.instances} for gpu in view.gpus]

    def number(self, gpu: GpuUuid) -> int:
        """Return the number of a GPU in the view."""
        return self._numbers[gpu]

    def gpu(self, number: int, devices: _Devices) -> Gpu:
        """Return a GPU with these leased devices, and whatever is taken to stay."""
        known = self._known[number].get(devices)
        if known is None:
            gpu = self._gpus[number]
            leased = [self._leased(gpu, number, each) for each in devices]
            instances = (*self._staying[number], *leased, *self._not_leased(number, devices))
            ordered = sorted(instances, key=lambda each: each.slot.placement.start)
            known = self._known[number][devices] = replace(gpu, instances=tuple(ordered))
        return known

    def _not_leased(self, number: int, devices: _Devices) -> list[Instance]:
        """Return the devices that exist although they are not leased: whole GPUs."""
        return [
            replace(each, state=InstanceState.IDLE, lease=None)
            for key, each in self._existing[number].items()
            if not each.kind.is_created and key not in devices and each not in self._staying[number]
        ]

    def _leased(self, gpu: Gpu, number: int, device: tuple[int, int]) -> Instance:
        existing = self._existing[number].get(device)
        if existing is not None:
            return replace(existing, state=InstanceState.LEASED)
        start, profile_id = device
        profile = gpu.layout.by_id[profile_id]
        slot = Slot(gpu.uuid, profile, _placement(profile, start))
        return Instance(slot=slot, generation=Generation(0), state=InstanceState.LEASED)


def _key(slot: Slot) -> tuple[int, int]:
    return (slot.placement.start, slot.profile.id)


def _placement(profile: Profile, start: int) -> Placement:
    return next(each for each in profile.placements if each.start == start)


@dataclass(frozen=True, slots=True, eq=False)
class _Class:
    """Requests that are alike: what does not fit for one does not fit for another."""

    order: tuple[int, float]
    """By rising order they are tried: higher priority first, then the larger (`backfill_order`)."""
    request: Request
    one_device: bool
    cache: FeasibilityCache
    full: set[int] = field(default_factory=set)
    """GPUs, by identity of their values, which `_Node` keeps, on which a request for one device does not fit."""


class _Classes:
    """Sorts requests into classes. Shared by all runs of a forecast."""

    def __init__(self, view: NodeView) -> None:
        self._view = view
        self._known: dict[tuple[object, ...], _Class] = {}
        self._of: dict[int, tuple[Request, _Class]] = {}
        """By identity of the request, which is kept here so that no other gets the same id."""

    def of(self, request: Request) -> _Class:
        """Return the class of a request."""
        found = self._of.get(id(request))
        if found is None:
            wants = tuple(replace(want, text="") for want in request.wants)
            key = (wants, request.gpus, request.priority)
            known = self._known.get(key)
            if known is None:
                known = self._known[key] = _Class(
                    order=(-request.priority, -gpu_share(self._view, request)),
                    request=replace(request, wants=wants),
                    one_device=len(wants) == 1 and wants[0].slot is None,
                    cache=FeasibilityCache(wants),
                )
            found = self._of[id(request)] = (request, known)
        return found[1]


@dataclass(slots=True)
class _Line:
    """The waiting requests of one class, with fair share also of one tenant, first come."""

    of: _Class
    waiting: deque[WaitingRequest] = field(default_factory=deque)


class _Run:
    """One run: the devices on each GPU, the leases that will end, and the requests that wait."""

    def __init__(self, situation: Situation, node: _Node, classes: _Classes) -> None:
        self._situation = situation
        self._node = node
        self._classes = classes
        # No instance is idle in a run, and whether one could be reused never decides what fits.
        self._policy = replace(situation.policy, reuse=Reuse.ANY)
        self._devices: list[_Devices] = [() for _ in situation.view.gpus]
        self._gpus = [node.gpu(number, ()) for number in range(len(self._devices))]
        self._ends: list[tuple[float, int, tuple[_Place, ...]]] = []
        self._count = 0
        self._lines: dict[tuple[int, str], _Line] = {}
        """By identity of the class, and with fair share the tenant."""
        self._reserved: Reservation | None = None
        self.starts: dict[int, float] = {}
        """Time at which each request of the situation has started, by arrival number."""
        self.to_start = len(situation.waiting)
        self._next_seq = 1 + max((each.seq for each in situation.waiting), default=0)
        self._newcomers_from = self._next_seq
        for each in in_order(situation.waiting):
            self._line(each.request).waiting.append(each)

    # Events

    @property
    def next_end(self) -> float:
        """Time at which the next lease ends; infinite if none does."""
        return self._ends[0][0] if self._ends else math.inf

    def end_later(self, moment: float, places: tuple[_Place, ...]) -> None:
        """Put devices in use until a moment."""
        for number, start, profile in places:
            self._put(number, tuple(sorted((*self._devices[number], (start, profile)))))
        if math.isfinite(moment):
            self._count += 1
            heapq.heappush(self._ends, (moment, self._count, places))

    def end(self, lasts: Callable[[Request], float]) -> None:
        """End the next lease and start what fits then."""
        now, _, places = heapq.heappop(self._ends)
        for number, start, profile in places:
            self._put(number, tuple(each for each in self._devices[number] if each != (start, profile)))
        self.start_what_fits(now, lasts)

    def arrive(self, request: Request, now: float, lasts: Callable[[Request], float]) -> None:
        """Let a new request come: it starts if it fits, and waits if it may."""
        newcomer = WaitingRequest(request=request, seq=self._next_seq, since=now)
        self._next_seq += 1
        line = self._line(request)
        if not line.waiting and not (self._situation.strict_fifo and self._anyone_waits):
            self._reserved = self._reservation(now)
            if self._start(self._situation.ranked(newcomer, now), line.of, now, lasts):
                return
        if request.wait_seconds:
            line.waiting.append(newcomer)

    def start_what_fits(self, now: float, lasts: Callable[[Request], float]) -> None:
        """Start all that fit now, in turn."""
        self._reserved = self._reservation(now)
        while self._start_one(now, lasts):
            self._reserved = self._reservation(now)

    # Inside

    @property
    def _anyone_waits(self) -> bool:
        return any(line.waiting for line in self._lines.values())

    def _line(self, request: Request) -> _Line:
        of = self._classes.of(request)
        key = (id(of), "" if self._situation.used is None else request.holder.tenant)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line(of)
        return line

    def _put(self, number: int, devices: _Devices) -> None:
        self._devices[number] = devices
        self._gpus[number] = self._node.gpu(number, devices)

    def _start_one(self, now: float, lasts: Callable[[Request], float]) -> bool:
        """Start the first request in turn that fits; return False if none does."""
        first = None if self._reserved is None else self._reserved.waiting.seq
        heads = [(self._situation.ranked(line.waiting[0], now), line) for line in self._lines.values() if line.waiting]
        if self._situation.strict_fifo:
            heads = sorted(heads, key=lambda each: each[0].order)[:1]

        def in_turn(each: tuple[WaitingRequest, _Line]) -> tuple[int, bool, float, float, int]:
            priority, share = each[1].of.order
            return (priority, each[0].seq != first, each[0].rank, share, each[0].seq)

        for head, line in sorted(heads, key=in_turn):
            if self._start(head, line.of, now, lasts):
                line.waiting.popleft()
                return True
        return False

    def _start(self, waiting: WaitingRequest, of: _Class, now: float, lasts: Callable[[Request], float]) -> bool:
        """Start a request if it fits."""
        reserved = NOTHING_RESERVED if self._reserved is None else self._reserved.against(waiting)
        gpus = tuple(gpu for gpu in self._gpus if id(gpu) not in of.full)
        if all(gpu.uuid in reserved for gpu in gpus):
            return False
        plan = find(NodeView(node="", revision=0, gpus=gpus), of.request, self._policy, reserved=reserved)
        if plan is None:
            if of.one_device:
                of.full.update(id(gpu) for gpu in gpus if gpu.uuid not in reserved)
            return False
        if waiting.seq < self._newcomers_from:
            self.starts[waiting.seq] = now
            self.to_start -= 1
        if not _has_left(waiting, now):
            places = tuple((self._node.number(each.gpu), *_key(each.slot)) for each in plan.devices)
            self.end_later(now + lasts(waiting.request), places)
        return True

    def _reservation(self, now: float) -> Reservation | None:
        """Return the reservation, as `backfill.reservation` finds it: only the first of each line can have one."""
        if self._situation.strict_fifo:
            return None
        waited = [
            (self._situation.ranked(head, now), line.of)
            for line in self._lines.values()
            if (head := next((each for each in line.waiting if not _has_left(each, now)), None)) is not None
            and now - head.since >= self._situation.reservation_delay
        ]
        view = NodeView(node="", revision=0, gpus=tuple(self._gpus))
        for head, of in sorted(waited, key=lambda each: each[0].order):
            gpus = fewest_gpus(usable_gpus(view, of.request), of.request.wants, of.cache)
            if gpus:
                return Reservation(waiting=head, gpus=gpus)
        return None


def _has_left(waiting: WaitingRequest, now: float) -> bool:
    """Return True if the request has left the queue by now: it takes nothing, but when it would start is noted."""
    seconds = waiting.request.wait_seconds
    return seconds is not None and now - waiting.since > seconds


def _gap(demand: Demand, uniform: Uniform) -> float:
    """Return the time until the next request, which is exponentially distributed."""
    return -math.log(1.0 - uniform()) / demand.per_second


def _shuffled(count: int, uniform: Uniform) -> list[int]:
    """Return the numbers below `count` in random order: each run draws from another part of a lease's distribution."""
    return sorted(range(count), key=lambda _: uniform())


def _known(moment: float) -> float | None:
    return moment if math.isfinite(moment) else None


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    """Return the value below which one more run would end with this probability; None where it is infinite."""
    place = min(max(share * (len(ordered) + 1) - 1, 0.0), len(ordered) - 1.0)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    if place == low or not math.isfinite(ordered[high]):
        return _known(ordered[low]) if place == low else None
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
