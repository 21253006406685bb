"""Finds what blocks a request on a GPU and who holds it; names wants, GPUs and instances in messages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mig_agent.core.errors import THE_GPU, Blocker
from mig_agent.core.model import (
    Gpu,
    GpuState,
    Instance,
    InstanceState,
    NodeView,
    Placement,
    Profile,
    Request,
    Want,
)
from mig_agent.core.planning.occupancy import Occupancy
from mig_agent.core.planning.profiles import served_by
from mig_agent.core.planning.shares import devices_in_the_way
from mig_agent.core.quantities import format_duration, format_memory, shown


def describe_want(want: Want) -> str:
    """Return a want as messages name it: `4G`, `2g.10gb`, `the fraction 0.25 of a GPU`, `4G with +me`."""
    words = "a device"
    if want.whole_gpu:
        words = "a whole GPU"
    elif want.slot is not None:
        words = f"{want.slot} of GPU {want.slot.gpu}"
    elif want.profile is not None:
        words = shown(want.profile)
    elif want.memory_bytes is not None:
        words = shown(want.text) if want.text else format_memory(want.memory_bytes)
    elif want.fraction is not None:
        words = f"the fraction {shown(want.text) if want.text else f'{want.fraction:g}'} of a GPU"
    extras = [f"with {name}" for name in sorted(want.attributes)]
    if want.min_compute_slices > 1:
        extras.append(f"with at least {want.min_compute_slices} compute slices")
    if want.compute_percent is not None:
        extras.append(f"with {want.compute_percent}% of the multiprocessors")
    return " ".join((words, *extras))


def describe_wants(wants: Sequence[Want]) -> str:
    """Return wants as messages name them: `3 devices of 4G`, `2 whole GPUs`, `2 devices (2g.10gb, 4G)`."""
    words = [describe_want(want) for want in wants]
    if len(words) == 1:
        return words[0]
    if len(set(words)) == 1:
        return f"{len(words)} whole GPUs" if wants[0].whole_gpu else f"{len(words)} devices of {words[0]}"
    most = 6
    listed = ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")
    return f"{len(words)} devices ({listed})"


def describe_gpus(gpus: Iterable[Gpu]) -> str:
    """Return GPUs as messages name them: `GPU 0`, `GPUs 0, 2`."""
    numbers = [str(gpu.index) for gpu in gpus]
    return f"GPU {numbers[0]}" if len(numbers) == 1 else f"GPUs {', '.join(numbers)}"


def describe_scope(request: Request, gpus: Sequence[Gpu]) -> str:
    """Return where a request may be served: `on this node`, or `on GPU 1` if it named GPUs."""
    return f"on {describe_gpus(gpus)}" if request.gpus and gpus else "on this node"


MOST_BLOCKERS = 64
"""The most blockers in one refusal: enough for people, and bounded on the wire."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """The devices that would have to end on one GPU before a profile fits at one placement."""

    gpu: Gpu
    profile: Profile
    instances: tuple[Instance, ...]
    """On the slices of the placement."""
    engine_holders: tuple[Instance, ...] = ()
    """Elsewhere on the GPU, with engines that the profile needs: the other `+me` instance."""

    @property
    def everything(self) -> tuple[Instance, ...]:
        """All that would have to end."""
        return (*self.instances, *self.engine_holders)

    @property
    def weight(self) -> tuple[int, int, int, int]:
        """A sort key, the nearest first: nothing foreign, which may never end, then few leases, then few slices."""
        foreign = sum(each.state is InstanceState.FOREIGN for each in self.everything)
        slices = sum(each.slot.placement.size for each in self.everything)
        return (foreign, len(self.everything), slices, self.gpu.index)


def obstacle(view: NodeView, gpu: Gpu, profile: Profile, at: Placement | None = None) -> Obstacle:
    """Return the obstacle that is expected to end first, or with `at` the one at that placement."""
    if profile.kind.shares_memory:
        return Obstacle(gpu=gpu, profile=profile, instances=devices_in_the_way(gpu, profile))
    return min(_obstacles_on(gpu, profile, at), key=lambda each: _nearness(view, each))


def obstacles(view: NodeView, gpus: Iterable[Gpu], want: Want) -> list[Obstacle]:
    """Return the obstacle on each GPU that could serve the want, the one that is expected to end first before others.

    That is by the deadlines of the leases; those without any come after, the smallest first.
    """
    at = None if want.slot is None else want.slot.placement
    found = [obstacle(view, gpu, profile, at) for gpu in gpus if (profile := served_by(want, gpu)) is not None]
    return sorted(found, key=lambda each: _nearness(view, each))


def _nearness(view: NodeView, found: Obstacle) -> tuple[float, tuple[int, int, int, int]]:
    return (_ends_at(view, found), found.weight)


def _ends_at(view: NodeView, found: Obstacle) -> float:
    """Return when all of an obstacle has ended at the latest; infinite if some of it has no deadline."""
    ends = (deadline_of(view, each) for each in found.everything if each.state is not InstanceState.DESTROYING)
    return max((math.inf if end is None else end for end in ends), default=0.0)


def _obstacles_on(gpu: Gpu, profile: Profile, at: Placement | None) -> tuple[Obstacle, ...]:
    """Return the obstacle at each placement. Cached on the frozen GPU: refusals are frequent when a node is full."""
    key = f"obstacles {profile.id} {'' if at is None else at}"
    known = gpu.scratch.get(key)
    if not isinstance(known, tuple):
        occupancy = Occupancy.of(gpu)
        windows = (each for each in occupancy.tables.windows[profile.id] if at is None or each.placement == at)
        known = gpu.scratch[key] = tuple(_obstacle_at(occupancy, profile, window.mask) for window in windows)
    return known


def _obstacle_at(occupancy: Occupancy, profile: Profile, mask: int) -> Obstacle:
    held = [each for each in occupancy.gpu.instances if each.state is not InstanceState.IDLE]
    found = [each for each in held if each.slot.placement.mask & mask]
    tables = occupancy.tables
    taken = occupancy.engines + tables.engines_of(profile) - sum(tables.engines_of(each.slot.profile) for each in found)
    holders = []
    for each in held:
        if tables.engines_fit(taken):
            break
        missing = tables.missing_engines(taken)
        gives = zip(each.slot.profile.engines.as_tuple(), missing, strict=True)
        if each not in found and any(engine and lacking for engine, lacking in gives):
            holders.append(each)
            taken -= tables.engines_of(each.slot.profile)
    return Obstacle(gpu=occupancy.gpu, profile=profile, instances=tuple(found), engine_holders=tuple(holders))


def blockers_of(view: NodeView, gpu: Gpu, instances: Iterable[Instance]) -> tuple[Blocker, ...]:
    """Return instances as a refusal lists them."""
    return tuple(
        Blocker(
            gpu_index=gpu.index,
            what=str(each.slot),
            state=each.state.value,
            lease=each.lease or "",
            holder=holder_of(view, each),
            expires_at=deadline_of(view, each),
        )
        for each in instances
    )


def unavailable(gpus: Iterable[Gpu], state: str | None = None) -> tuple[Blocker, ...]:
    """Return unavailable GPUs as a refusal lists them: cordoned and lost ones, or all of them under `state`."""
    return tuple(
        Blocker(gpu_index=gpu.index, what=THE_GPU, state=state or gpu.state.value)
        for gpu in gpus
        if state is not None or gpu.state in {GpuState.CORDONED, GpuState.LOST}
    )


def holder_of(view: NodeView, instance: Instance) -> str:
    """Return who holds an instance, for messages; empty if there is no lease or it is unknown."""
    lease = view.leases.get(instance.lease) if instance.lease is not None else None
    return "" if lease is None else str(lease.holder)


def deadline_of(view: NodeView, instance: Instance) -> float | None:
    """Return when the lease of an instance ends unless it is renewed; None if there is none, or it has no deadline."""
    lease = view.leases.get(instance.lease) if instance.lease is not None else None
    return None if lease is None else lease.expires_at


def describe_obstacle(view: NodeView, found: Obstacle) -> str:
    """Return the obstacle as text: `slices 0-3 are leased to alice and slice 4 is leased to bob`."""
    words = [_describe_instance(view, each) for each in found.instances]
    words += [
        f"the engines that it needs are taken, as {_describe_instance(view, each)}" for each in found.engine_holders
    ]
    return " and ".join(words) or "nothing is in the way, but it may not be used just now"


def _describe_instance(view: NodeView, instance: Instance) -> str:
    holder = holder_of(view, instance)
    place = instance.slot.placement
    many = place.size > 1 and not instance.kind.takes_whole_gpu
    where = f"slices {place}" if many else f"slice {place}"
    if instance.kind.takes_whole_gpu:
        where = "the whole GPU"
    elif instance.kind.shares_memory:
        where = f"a {instance.slot}"
    are = "are" if many else "is"
    name = instance.slot.profile.name
    match instance.state:
        case InstanceState.LEASED:
            return f"{where} {are} leased to {holder or 'somebody'}"
        case InstanceState.FOREIGN:
            return f"{where} {are} held by a {name} that somebody made without mig-agent"
        case InstanceState.BLOCKED:
            return f"{where} {are} blocked{': ' + instance.reason if instance.reason else ''}"
        case InstanceState.CREATING:
            return f"{where} {are} being made into a {name}{' for ' + holder if holder else ''}"
        case _:
            return f"{where} {are} being made free"


def free_again(view: NodeView, found: Obstacle, now: float) -> str:
    """Return a hint when the obstacle ends by itself; empty if some of it has no deadline."""
    if any(deadline_of(view, each) is None for each in found.everything):
        return ""
    left = _ends_at(view, found) - now
    if left <= 0:
        return ""
    index = found.gpu.index
    return f"GPU {index} is free for it in {format_duration(left)} at the latest, when what is leased there ends"
