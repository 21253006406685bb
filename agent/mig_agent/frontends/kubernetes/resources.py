"""Extended resources of a node: names of its profiles, memory sizes and whole GPUs, and the ids of their devices."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Final

from mig_agent.core.model import Gpu, GpuState, NodeView, Want
from mig_agent.core.planning.capacity import servable
from mig_agent.core.pod_resources import MEMORY, PROFILES, in_kubernetes
from mig_agent.core.requests import memory_want, profile_want, whole_gpu_want

_BEGINNING = "mig-agent-"
_OURS = re.compile(rf"{_BEGINNING}(0|[1-9][0-9]{{0,8}})", re.ASCII)


def device_id(number: int) -> str:
    """The id with this number, from 0 on."""
    return f"{_BEGINNING}{number}"


def is_ours(device: str) -> bool:
    """Whether this agent, or one before it on this node, made the id."""
    return _OURS.fullmatch(device) is not None


def number_of(device: str) -> int:
    """The number of an id of ours. Raises ValueError for another's."""
    match = _OURS.fullmatch(device)
    if match is None:
        raise ValueError(device)
    return int(match[1])


def listed(total: int, allocated: Collection[str]) -> tuple[str, ...]:
    """The ids that there are for the kubelet: what it has allocated, and the lowest others, `total` if possible.

    An id that a container has is never left out, whatever the total. Ordered by number.
    """
    chosen = set(allocated)
    free = (device for device in map(device_id, count()) if device not in allocated)
    while len(chosen) < total:
        chosen.add(next(free))
    return tuple(sorted(chosen, key=number_of))


_WHOLE: Final = replace(whole_gpu_want(), profile="whole")
"""Of a GPU without MIG mode, and of nothing else."""
_WELL_KNOWN: Final = frozenset({"nvidia.com", "mig-agent.io"})
"""Domains that labels leave out: no two resources of these differ in nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """How resources are called, as configured."""

    profiles: str = PROFILES
    """What stands before a profile's name."""
    memory: str = MEMORY
    """What stands before an amount of memory."""
    amounts: tuple[str, ...] = ("5g", "10g", "20g", "40g", "80g")
    """Decimal gigabytes."""
    whole_gpu: str = ""
    """The name for GPUs without MIG mode; empty where they are not served."""

    def has(self, name: str) -> bool:
        """Whether a resource is called so by these; the agent may change no other on the node object."""
        return name.startswith((self.profiles, self.memory)) or name == self.whole_gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """One extended resource."""

    name: str
    """`nvidia.com/mig-1g.10gb`."""
    label: str
    """What tells it from the others in names of sockets and CDI devices: `mig-1g.10gb`."""
    want: Want
    """What one device of it is."""


def resources_of(view: NodeView, naming: Naming) -> tuple[Resource, ...]:
    """The resources of a node as it is now, by name, and those that leases were given as: their pods may restart."""
    wants = _leased(view) | dict(_wants(view, naming))
    return tuple(Resource(name=name, label=label_of(name), want=wants[name]) for name in sorted(wants))


def label_of(name: str) -> str:
    """What tells a resource from all others in names, always the same: containers know their devices by it."""
    domain, _, last = name.partition("/")
    return last if domain in _WELL_KNOWN else f"{domain}_{last}"


def _leased(view: NodeView) -> dict[str, Want]:
    """Of resources that may not be served any more, by what stands for them."""
    wants = {}
    for lease in view.leases.values():
        for device, generation in zip(lease.kubelet_devices, lease.instances, strict=False):
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
        if servable(view, want):
            yield naming.memory + amount, want
    if naming.whole_gpu and any(gpu.state is GpuState.WHOLE for gpu in view.gpus):
        yield naming.whole_gpu, _WHOLE


def _profiles(gpus: Iterable[Gpu]) -> Iterator[str]:
    """Each once; a GPU without MIG mode has none."""
    yield from dict.fromkeys(
        profile.name for gpu in gpus for profile in gpu.layout.profiles if profile.kind.needs_mig_mode
    )
