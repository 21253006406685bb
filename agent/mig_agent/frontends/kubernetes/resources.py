"""Extended resources of a node: names for profiles, amounts of memory and whole GPUs, and the ids of their devices."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Final

from mig_agent.core.model import Gpu, GpuState, NodeView, Want
from mig_agent.core.planning.capacity import servable_in_containers
from mig_agent.core.pod_resources import MEMORY, PROFILES, in_kubernetes
from mig_agent.core.requests import memory_want, profile_want, whole_gpu_want
from mig_agent.frontends.kubernetes.pod_leases import leases_of_pods

_BEGINNING = "mig-agent-"
_OURS = re.compile(rf"{_BEGINNING}(0|[1-9][0-9]{{0,8}})", re.ASCII)


def device_id(number: int) -> str:
    """Return the device id with this number; numbers start at 0."""
    return f"{_BEGINNING}{number}"


def is_agent_id(device: str) -> bool:
    """Return whether this agent, or an earlier one on this node, made the device id."""
    return _OURS.fullmatch(device) is not None


def number_of(device: str) -> int:
    """Return the number in a device id of the agent. Raises ValueError for any other id."""
    match = _OURS.fullmatch(device)
    if match is None:
        raise ValueError(device)
    return int(match[1])


def listed(total: int, allocated: Collection[str]) -> tuple[str, ...]:
    """Return the device ids to list to the kubelet, by number: those it has allocated, and the lowest others.

    There are `total` ids, or more if more are allocated: an allocated id is never left out.
    """
    chosen = set(allocated)
    free = (device for device in map(device_id, count()) if device not in allocated)
    while len(chosen) < total:
        chosen.add(next(free))
    return tuple(sorted(chosen, key=number_of))


_WHOLE: Final = replace(whole_gpu_want(), profile="whole")
"""The want that only a GPU without MIG mode serves."""
_WELL_KNOWN: Final = frozenset({"nvidia.com", "mig-agent.io"})
"""Domains that labels leave out: no two resources differ only in which of these they have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """The configured names of extended resources."""

    profiles: str = PROFILES
    """The prefix of a profile's name."""
    memory: str = MEMORY
    """The prefix of an amount of memory."""
    amounts: tuple[str, ...] = ("5g", "10g", "20g", "40g", "80g")
    """The offered amounts of memory, in decimal gigabytes."""
    whole_gpu: str = ""
    """The name for GPUs without MIG mode; empty if they are not served."""

    def has(self, name: str) -> bool:
        """Return whether the agent uses this name; it must not change other resources on the node object."""
        return name.startswith((self.profiles, self.memory)) or name == self.whole_gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """One extended resource."""

    name: str
    """The full name: `nvidia.com/mig-1g.10gb`."""
    label: str
    """A short unique name, for sockets and CDI devices: `mig-1g.10gb`."""
    want: Want
    """What one device of the resource provides."""


def resources_of(view: NodeView, naming: Naming) -> tuple[Resource, ...]:
    """Return the resources of a node, sorted by name; also those of existing leases, whose pods may restart."""
    wants = _leased(view) | dict(_wants(view, naming))
    return tuple(Resource(name=name, label=label_of(name), want=wants[name]) for name in sorted(wants))


def label_of(name: str) -> str:
    """Return a resource's label. It must never change: running containers know their devices by it."""
    domain, _, last = name.partition("/")
    return last if domain in _WELL_KNOWN else f"{domain}_{last}"


def _leased(view: NodeView) -> dict[str, Want]:
    """Return the resources of existing leases, which may not be offered now; their wants follow from the instances."""
    wants = {}
    for lease, owner in leases_of_pods(view):
        for device, generation in zip(owner.devices, lease.instances, strict=False):
            instance = view.instances.get(generation)
            if instance is not None:
                whole = instance.kind.takes_whole_gpu
                wants[device.resource] = _WHOLE if whole else profile_want(instance.slot.profile.name)
    return wants


def _wants(view: NodeView, naming: Naming) -> Iterator[tuple[str, Want]]:
    for profile in _profiles(view.gpus):
        yield naming.profiles + in_kubernetes(profile), profile_want(profile)
    for amount in naming.amounts:
        want = replace(memory_want(amount.upper()), text=amount.upper())
        if servable_in_containers(view, want):
            yield naming.memory + amount, want
    if naming.whole_gpu and any(gpu.state is GpuState.WHOLE for gpu in view.gpus):
        yield naming.whole_gpu, _WHOLE


def _profiles(gpus: Iterable[Gpu]) -> Iterator[str]:
    """Yield the name of each MIG profile once."""
    yield from dict.fromkeys(
        profile.name for gpu in gpus for profile in gpu.layout.profiles if profile.kind.needs_mig_mode
    )
