"""How many of each extended resource a pod asks for, as the scheduler counts it; pure.

From `k8s.io/component-helpers/resource` (`PodRequests`): containers and sidecars run beside each other; an init
container runs beside the sidecars that were started before it and nothing else; the larger of both counts, and the
overhead of the pod's runtime class is added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_SIDECAR = "Always"
"""The restart policy of an init container that goes on running."""


def requested(spec: Mapping[str, Any]) -> Mapping[str, int]:
    """By name of the resource; only extended ones, of which there are whole numbers, and only those asked for."""
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


def _wanted(container: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of an extended resource request and limit are the same; the API server writes both where one is given."""
    resources = container.get("resources") or {}
    return {**(resources.get("limits") or {}), **(resources.get("requests") or {})}


def _extended(amounts: Mapping[str, Any]) -> Counter[str]:
    """Those with a domain in their name, as `cpu`, `memory` and the like have none."""
    return Counter(
        {
            name: int(amount)
            for name, amount in amounts.items()
            if "/" in name and str(amount).isdecimal() and int(amount) > 0
        }
    )
