"""Replays a node's history: what each lease would have waited, by the planner and the queue that serve the node now.

Deterministic and without a clock. The GPUs are those of the node now, empty at the beginning; every lease lasts as long
as it did. Requests that were never granted are not in the history, so waits are rather too short than too long.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mig_agent.core import queue
from mig_agent.core.accounting import AccountedUse
from mig_agent.core.backfill import ReservationCache
from mig_agent.core.model import (
    CallerId,
    Generation,
    Gpu,
    GpuState,
    GpuUuid,
    Holder,
    Instance,
    InstanceState,
    LeaseId,
    NodeView,
    Request,
    RequestId,
    Slot,
    Want,
)
from mig_agent.core.planning.feasibility import fits_when_empty
from mig_agent.core.planning.plan import Plan, Policy, ReuseInstance
from mig_agent.core.planning.search import named_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One lease of the past."""

    lease: str
    asked_at: float
    seconds: float
    """Time that it lasted."""
    wants: tuple[Want, ...]
    gpus: tuple[str, ...] = ()
    priority: int = 0
    tenant: str = ""

    @property
    def request(self) -> Request:
        """The request, as it is asked again in a replay."""
        return Request(
            wants=self.wants,
            request_id=RequestId(self.lease),
            holder=Holder(tenant=self.tenant),
            gpus=self.gpus,
            priority=self.priority,
            caller_id=CallerId("replay"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedNode:
    """A node to replay a history on."""

    view: NodeView
    policy: Policy
    reservation_after_seconds: float
    strict_fifo: bool = False


def runs_of(uses: Iterable[AccountedUse]) -> tuple[Run, ...]:
    """Return the runs of accounted leases, in the order in which they were asked for.

    A device of which it is not known what was asked counts as its profile. A lease without its first device, which a
    limit has cut off, is left out.
    """
    devices: dict[str, list[AccountedUse]] = {}
    for use in uses:
        devices.setdefault(use.lease, []).append(use)
    runs = []
    for lease, found in devices.items():
        found.sort(key=lambda each: each.number)
        first = found[0]
        if first.number == 0:
            runs.append(
                Run(
                    lease=lease,
                    asked_at=first.granted_at if first.asked_at is None else min(first.asked_at, first.granted_at),
                    seconds=first.seconds,
                    wants=tuple(wanted(each) for each in found),
                    gpus=first.gpus,
                    priority=first.priority,
                    tenant=first.tenant,
                )
            )
    return tuple(sorted(runs, key=lambda each: (each.asked_at, each.lease)))


def wanted(use: AccountedUse) -> Want:
    """Return what was asked for, as far as it is known: else the profile that was given."""
    if use.device.want is not None:
        return use.device.want
    name = use.device.profile
    return Want(whole_gpu=True, text=name) if name == "whole" else Want(profile=name, text=name)


def replay(node: ReplayedNode, runs: Sequence[Run]) -> Generator[None, None, Mapping[str, float]]:
    """Return how long each lease waits, in seconds by its id; yields between steps, so that others can take turns.

    What the node could never serve is left out. `runs` are in the order of their arrival.
    """
    gpus = {gpu.uuid: _emptied(gpu, number) for number, gpu in enumerate(node.view.gpus) if gpu.state != GpuState.LOST}
    generation = len(gpus)
    waiting = queue.Queue()
    by_lease = {each.lease: each for each in runs}
    ending: list[tuple[float, int, str, tuple[Generation, ...]]] = []
    waits: dict[str, float] = {}
    cache = ReservationCache()
    arrivals = list(reversed(runs))
    while arrivals or ending:
        if ending and (not arrivals or ending[0][0] <= arrivals[-1].asked_at):
            now, _, _, instances = heapq.heappop(ending)
            _free(gpus, frozenset(instances))
        else:
            run = arrivals.pop()
            now = run.asked_at
            there = named_gpus(replace(node.view, gpus=tuple(gpus.values())), run.request)
            if not fits_when_empty(there, run.wants):
                continue
            waiting.add(run.request, now)
        yield
        while len(waiting):
            found = queue.search(
                replace(node.view, gpus=tuple(gpus.values()), leases={}),
                waiting.waiting,
                node.policy,
                now,
                limit_seconds=node.reservation_after_seconds,
                strict_fifo=node.strict_fifo,
                known=cache,
            )
            if not isinstance(found, tuple):
                break
            started, plan = found
            waiting.remove(started.request.key)
            lease = started.request.request_id
            waits[lease] = now - started.since
            instances, generation = _apply(gpus, plan, LeaseId(lease), generation)
            heapq.heappush(ending, (now + by_lease[lease].seconds, started.seq, lease, instances))
            yield
    return waits


def _emptied(gpu: Gpu, number: int) -> Gpu:
    """Return a GPU as it is before anything was leased; whole GPUs have their one device."""
    state = GpuState.READY if gpu.mode.current else GpuState.WHOLE
    permanent = [each for each in gpu.layout.profiles if not each.kind.is_created]
    instances = tuple(
        Instance(
            slot=Slot(gpu.uuid, profile, profile.placements[0]),
            generation=Generation(number),
            state=InstanceState.IDLE,
            uuid=gpu.uuid,
            last_tenant=None,
        )
        for profile in permanent
    )
    return replace(gpu, state=state, reason="", set_aside=False, instances=instances)


def _apply(gpus: dict[GpuUuid, Gpu], plan: Plan, lease: LeaseId, generation: int) -> tuple[tuple[Generation, ...], int]:
    """Carry out a plan; return the generations of the lease's instances, and the last generation that was assigned."""
    taken = []
    for device in plan.devices:
        gpu = gpus[device.gpu]
        removed = {each.instance.generation for each in device.victims}
        if isinstance(device.serve, ReuseInstance):
            made = device.serve.instance
            removed.add(made.generation)
        else:
            generation += 1
            number = Generation(generation)
            made = Instance(slot=device.slot, generation=number, state=InstanceState.LEASED, uuid=f"MIG-{number}")
        leased = replace(made, state=InstanceState.LEASED, lease=lease)
        kept = (each for each in gpu.instances if each.generation not in removed)
        gpus[device.gpu] = _with(gpu, (*kept, leased))
        taken.append(leased.generation)
    return tuple(taken), generation


def _free(gpus: dict[GpuUuid, Gpu], instances: frozenset[Generation]) -> None:
    """Make the instances of a lease that ended idle."""
    for uuid, gpu in gpus.items():
        if any(each.generation in instances for each in gpu.instances):
            freed = tuple(
                replace(each, state=InstanceState.IDLE, lease=None) if each.generation in instances else each
                for each in gpu.instances
            )
            gpus[uuid] = _with(gpu, freed)


def _with(gpu: Gpu, instances: Iterable[Instance]) -> Gpu:
    return replace(gpu, instances=tuple(sorted(instances, key=lambda each: each.slot.placement.start)))
