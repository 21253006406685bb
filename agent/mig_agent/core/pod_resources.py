"""The extended resources that a pod asks for, counted as Kubernetes' scheduler does, and the devices they mean.

The counting is that of `k8s.io/component-helpers/resource` (`PodRequests`): containers and sidecars run side by side;
an init container runs beside the sidecars that were started before it and nothing else; the larger of both counts, and
the overhead of the pod's runtime class is added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, TypeAlias, TypedDict

PROFILES: Final = "nvidia.com/mig-"
"""The prefix of a profile in a resource's name, unless the agents' `resource_prefix` says otherwise."""
MEMORY: Final = "mig-agent.io/memory-"
"""The prefix of an amount of memory (`memory_resource_prefix`)."""
_SIDECAR = "Always"
"""The restart policy of an init container that goes on running (a sidecar)."""

Amounts: TypeAlias = Mapping[str, str | int]
"""Quantities as Kubernetes writes them (`2`, `500m`, `4Gi`), by name of the resource."""


class _Resources(TypedDict, total=False):
    limits: Amounts | None
    requests: Amounts | None


class Container(TypedDict, total=False):
    """The fields of a container that count, as the API server has them."""

    resources: _Resources | None
    restartPolicy: str | None


class PodSpec(TypedDict, total=False):
    """The fields of a pod's `spec` that count, as the API server has them."""

    initContainers: Sequence[Container] | None
    containers: Sequence[Container] | None
    overhead: Amounts | None


def requested(spec: PodSpec) -> Mapping[str, int]:
    """Return how many of each extended resource the pod asks for, by name; none with a count of 0."""
    running: Counter[str] = Counter()
    starting: Counter[str] = Counter()
    for each in spec.get("initContainers") or ():
        wanted = _extended(_wanted(each))
        if each.get("restartPolicy") == _SIDECAR:
            running.update(wanted)
            starting |= running
        else:
            starting |= running + wanted
    for each in spec.get("containers") or ():
        running.update(_extended(_wanted(each)))
    total = (running | starting) + _extended(spec.get("overhead") or {})
    return MappingProxyType(dict(total))


def pod_resources(spec: PodSpec, *, profiles: str = PROFILES, memory: str = MEMORY) -> dict[str, int]:
    """Return how many of each of the agents' resources a pod asks for, by name, as Kubernetes' scheduler counts it.

    >>> pod_resources({"containers": [{"resources": {"limits": {"cpu": "2", "mig-agent.io/memory-5g": "1"}}}]})
    {'mig-agent.io/memory-5g': 1}
    """
    return {name: count for name, count in sorted(requested(spec).items()) if name.startswith((profiles, memory))}


def devices_of(resources: Mapping[str, int], *, profiles: str = PROFILES, memory: str = MEMORY) -> list[str]:
    """Return the agents' resources as `devices` of a request: profiles and amounts of memory; others are left out.

    >>> devices_of({"mig-agent.io/memory-5g": 1, "nvidia.com/mig-1g.10gb.me": 2, "cpu": 2})
    ['5G', '1g.10gb+me', '1g.10gb+me']

    For profiles it reverses `in_kubernetes`.
    """
    devices = []
    for name, count in sorted(resources.items()):
        if name.startswith(profiles):
            devices += [name.removeprefix(profiles).replace("gb.", "gb+")] * count
        elif name.startswith(memory):
            devices += [name.removeprefix(memory).upper()] * count
    return devices


def in_kubernetes(profile: str) -> str:
    """Return a profile's name as part of a resource's: `1g.10gb+me` becomes `1g.10gb.me`, as in NVIDIA's plugin."""
    return profile.replace("+", ".")


def _wanted(container: Container) -> Amounts:
    """Return what a container asks for.

    For an extended resource request and limit are equal; the API server writes both where one is given.
    """
    resources = container.get("resources") or {}
    return {**(resources.get("limits") or {}), **(resources.get("requests") or {})}


def _extended(amounts: Amounts) -> Counter[str]:
    """Return the extended resources only: those with a domain in their name, unlike `cpu` and `memory`."""
    return Counter(
        {
            name: int(amount)
            for name, amount in amounts.items()
            if "/" in name and str(amount).isdecimal() and int(amount) > 0
        }
    )
