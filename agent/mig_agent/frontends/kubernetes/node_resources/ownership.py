"""Ownership of the node object's extended resources, and the number of devices of each of the agent's resources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from mig_agent.adapters.kubeapi import NodeFacts
from mig_agent.core.model import NodeView, Want
from mig_agent.frontends.kubernetes import resources
from mig_agent.frontends.kubernetes.metrics import Devices
from mig_agent.frontends.kubernetes.pod_leases import leases_of_pods
from mig_agent.frontends.kubernetes.reservations import Asked, ReservedSlots, count_reserved, reserved_slots
from mig_agent.frontends.kubernetes.resources import Naming, resources_of

OURS: Final = "mig-agent.io/node-resources"
"""The annotation with the names of the resources that the agent wrote, separated by commas."""
_NONE: Final = "0"


class OwnershipConflict(StrEnum):
    """The reasons why the agent must not write the number of a resource; the values are for messages."""

    PLUGIN = "a device plugin serves that there"
    ENDED = "the kubelet still counts devices of a plugin that has ended, for five minutes"
    SHOWN = "somebody else shows that there"


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Numbers and annotations to write on the node; None removes one."""

    counts: Mapping[str, int | None] = field(default_factory=dict)
    """Devices by name of the resource; None removes the resource."""
    annotations: Mapping[str, str | None] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.counts or self.annotations)

    @property
    def removes(self) -> bool:
        """True if this only removes resources."""
        return bool(self.counts) and all(count is None for count in self.counts.values())


def owned(facts: NodeFacts) -> frozenset[str]:
    """Return the names of the resources that an agent wrote, by its annotation."""
    return frozenset(filter(None, facts.annotations.get(OURS, "").split(",")))


def others(
    names: Collection[str], facts: NodeFacts, registered: Mapping[str, frozenset[str]], written: Collection[str] = ()
) -> Mapping[str, OwnershipConflict]:
    """Return which of the names the agent must not write, and why: one resource is never served in two ways on a node.

    `registered` are the resources of device plugins that the kubelet has, with the ids of their devices. `written` are
    names that this agent has written, even if its annotation was changed since.
    """
    ours = owned(facts) | frozenset(written)
    found = {}
    for name in names:
        devices = registered.get(name)
        if devices is not None:
            # Without devices, or with those of an earlier agent, the kubelet will forget the resource soon.
            found[name] = (
                OwnershipConflict.ENDED if all(map(resources.is_agent_id, devices)) else OwnershipConflict.PLUGIN
            )
        elif name not in ours and facts.allocatable.get(name, _NONE) != _NONE:
            found[name] = OwnershipConflict.SHOWN
    return found


def correction(
    wanted: Mapping[str, int], facts: NodeFacts, not_ours: Collection[str], *, removing: bool = True
) -> Correction:
    """Return the next write that brings the node closer to the wanted numbers; names in `not_ours` are left alone.

    Wrong numbers are corrected first. Resources that are no longer wanted are removed only after that, if `removing`:
    the API server may refuse it where the names of the agent's resources were changed together with its rights.
    """
    kept = {name: count for name, count in wanted.items() if name not in not_ours}
    stale = owned(facts) - kept.keys() - frozenset(not_ours)
    counts: dict[str, int | None] = {
        name: count
        for name, count in sorted(kept.items())
        if not facts.allocatable.get(name) == facts.capacity.get(name) == str(count)
    }
    if removing and not counts:
        counts = {name: None for name in sorted(stale) if name in facts.allocatable or name in facts.capacity}
        stale = frozenset()
    text = ",".join(sorted(kept.keys() | stale)) or None
    return Correction(counts=counts, annotations={} if facts.annotations.get(OURS) == text else {OURS: text})


def numbers(
    view: NodeView, naming: Naming, creatable: Callable[[Want], int], asked: Asked, making: Iterable[ReservedSlots] = ()
) -> Mapping[str, Devices]:
    """Return the numbers of devices by name of the resource.

    `creatable` returns how many more devices could be leased now, with only busy instances in the way. `making` are the
    slots in which devices are being created for pods at this moment.
    """
    # Without leases, since names that pods were served under and that are no longer configured are not shown.
    wants = {resource.name: resource.want for resource in resources_of(replace(view, leases={}), naming)}
    taken = Counter(count_reserved((*reserved_slots(view), *making), view, wants, asked))
    bound = replace(view, leases={name: lease for name, lease in view.leases.items() if lease.owner.is_bound})
    allocated = Counter(count_reserved(reserved_slots(bound), bound, wants, asked))
    # Devices of pods that a device plugin served before, and that still run.
    by_plugin = Counter(device.resource for _, owner in leases_of_pods(bound) for device in owner.devices)
    return {
        name: Devices(
            possible=taken[name] + by_plugin[name] + creatable(want),
            allocated=allocated[name] + by_plugin[name],
            promised=max(taken[name] - allocated[name], 0),
        )
        for name, want in wants.items()
    }
