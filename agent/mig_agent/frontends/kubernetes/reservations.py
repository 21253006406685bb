"""Leases reserved for pods that have not started. Pure.

The kubelet does not know about these leases, and they no longer count as free capacity, so the advertised number of
devices must include each of them exactly once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mig_agent.core.model import GpuUuid, Layout, Lease, NodeView, Slot, Want, live_devices
from mig_agent.core.owner import KubeletDevice, Owner, Pod, PodOwner
from mig_agent.core.planning.profiles import serves, wasted_mib
from mig_agent.frontends.kubernetes.pod_leases import leases_of_pods

Asked = Callable[[Pod], Mapping[str, int] | None]
"""Returns what a pod requests by name of the extended resource, as the scheduler counts it; None if not known."""
ReservedSlots = tuple[Pod, tuple[Slot, ...]]
"""A pod, and the slots that one lease, or one request in progress, reserves for it."""


def requests_unknown(_pod: Pod) -> None:
    """Return None: what pods request is not known without an API server. An `Asked`."""
    return


def leases_for(view: NodeView, pod: Pod) -> tuple[Lease, ...]:
    """Return the reserved leases of a pod that have no devices of the kubelet yet, the oldest first."""
    return tuple(lease for lease, owner in _open(view) if owner.pod.may_be(pod))


def reserved_slots(view: NodeView) -> tuple[ReservedSlots, ...]:
    """Return the slots of all reserved leases, the oldest first; leases that lost a device are left out."""
    found = ((owner.pod, slots_of(lease, view)) for lease, owner in _open(view))
    return tuple((pod, slots) for pod, slots in found if slots)


def in_progress(reserving: Iterable[tuple[Owner, tuple[Slot, ...]]]) -> tuple[ReservedSlots, ...]:
    """Return what is being reserved for pods at this moment; `reserving` is `Manager.reserving`'s answer."""
    return tuple((owner.pod, slots) for owner, slots in reserving if isinstance(owner, PodOwner))


def slots_of(lease: Lease, view: NodeView) -> tuple[Slot, ...]:
    """Return the slot of each device of a lease; empty if one of them is lost."""
    instances = live_devices(view, lease)
    slots = tuple(each.slot for each in instances if each is not None)
    return slots if len(slots) == len(instances) else ()


def match_slots(
    groups: Sequence[Sequence[Slot]], wants: Sequence[Want], layouts: Mapping[GpuUuid, Layout]
) -> tuple[tuple[int, ...] | None, ...]:
    """Return for each group of slots the indices of the wants that they serve; each want is served once.

    The result is None for a group in which some slot serves no want. Earlier groups are matched first, and a slot
    serves a want for its own profile in preference to one for an amount of memory.
    """
    table = _Table(wants, layouts)
    taken = [table.take(number, group) for number, group in enumerate(groups)]
    return tuple(
        table.served(number, len(group)) if done else None
        for number, (group, done) in enumerate(zip(groups, taken, strict=True))
    )


def count_reserved(
    keeping: Iterable[ReservedSlots], view: NodeView, resources: Mapping[str, Want], asked: Asked
) -> Mapping[str, int]:
    """Return the number of reserved devices of each resource; `keeping` are the reserved slots of all pods.

    If a pod's requests are known, each of them counts once at most, without devices that the kubelet has allocated and
    that a lease of the pod already serves. If not, each slot counts for every resource that it can serve.
    """
    layouts = {uuid: gpu.layout for uuid, gpu in view.by_uuid.items()}
    by_pod: dict[Pod, list[tuple[Slot, ...]]] = {}
    for pod, slots in keeping:
        same = next((each for each in by_pod if each.may_be(pod)), pod)
        by_pod.setdefault(same, []).append(slots)
    total: Counter[str] = Counter()
    for pod, groups in by_pod.items():
        requests = asked(pod)
        if requests is None:
            for slot in (slot for group in groups for slot in group if slot.gpu in layouts):
                layout = layouts[slot.gpu]
                total.update(name for name, want in resources.items() if serves(slot.profile, want, layout))
            continue
        left = Counter(requests) - _handed(view, pod)
        names = [name for name in sorted(left) if name in resources for _ in range(left[name])]
        for fit in match_slots(groups, [resources[name] for name in names], layouts):
            total.update(names[place] for place in fit or ())
    return dict(total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Reservations after those of devices that the kubelet has allocated are subtracted."""

    promised: Mapping[str, int]
    """The number of reserved devices of each resource that the kubelet has not allocated."""
    unserved: tuple[KubeletDevice, ...]
    """Devices that the kubelet has allocated and that have no reservation."""


def count_unreserved(
    promises: Mapping[str, int], unserved: Sequence[KubeletDevice], judged: Collection[KubeletDevice]
) -> Counted:
    """Return the reservations that remain when each allocated device without a lease (`unserved`) uses one.

    A device that is `judged` uses none: its pod is known, and has no reservation that fits.
    """
    open_ = Counter(promises)
    left = []
    for device in unserved:
        if device not in judged and open_[device.resource] > 0:
            open_[device.resource] -= 1
        else:
            left.append(device)
    return Counted(promised={name: number for name, number in open_.items() if number > 0}, unserved=tuple(left))


def _open(view: NodeView) -> Sequence[tuple[Lease, PodOwner]]:
    """Return the leases of pods without devices of the kubelet, the oldest first."""
    found = (each for each in leases_of_pods(view) if not each[1].devices)
    return sorted(found, key=lambda each: (each[0].created_at, each[0].id))


def _handed(view: NodeView, pod: Pod) -> Counter[str]:
    """Return how many devices of each resource the pod has already."""
    return Counter(
        device.resource for _, owner in leases_of_pods(view) if owner.pod.may_be(pod) for device in owner.devices
    )


class _Table:
    """A bipartite matching of slots to wants that grows by one group at a time; a matched slot stays matched."""

    def __init__(self, wants: Sequence[Want], layouts: Mapping[GpuUuid, Layout]) -> None:
        self._wants = wants
        self._layouts = layouts
        self._choices: dict[tuple[int, int], tuple[int, ...]] = {}
        """By group and index, the wants that a slot could serve, the most exact first."""
        self._by_want: dict[int, tuple[int, int]] = {}

    def take(self, number: int, group: Sequence[Slot]) -> bool:
        """Match all slots of a group, or none; return whether they are matched."""
        before = dict(self._by_want)
        for place, slot in enumerate(group):
            self._choices[number, place] = self._serving(slot)
            if not self._augment((number, place), set()):
                self._by_want = before
                return False
        return True

    def served(self, number: int, length: int) -> tuple[int, ...]:
        """Return the wants that a matched group serves, in the order of its slots."""
        wants = {slot: want for want, slot in self._by_want.items()}
        return tuple(wants[number, place] for place in range(length))

    def _serving(self, slot: Slot) -> tuple[int, ...]:
        layout = self._layouts.get(slot.gpu)
        if layout is None:
            return ()
        found = [place for place, want in enumerate(self._wants) if serves(slot.profile, want, layout)]

        def waste(place: int) -> tuple[bool, float]:
            want = self._wants[place]
            return want.profile is None, wasted_mib(slot.profile, want, layout)

        return tuple(sorted(found, key=waste))

    def _augment(self, slot: tuple[int, int], seen: set[int]) -> bool:
        """Match a slot, if needed by moving other slots to other wants (augmenting path); return whether it worked."""
        for want in self._choices[slot]:
            if want in seen:
                continue
            seen.add(want)
            holder = self._by_want.get(want)
            if holder is None or self._augment(holder, seen):
                self._by_want[want] = slot
                return True
        return False
