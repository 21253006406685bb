"""Whether anybody has devices whose pod is not known, as in environment mode. Pure.

Which pod a lease is for Allocate does not say, so nobody can be asked about that pod. But where the kubelet lists every
pod that is bound to the node and lives with as many devices as it asks for, whatever it does not list nobody has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from mig_agent.adapters.kubeapi import PodFacts
from mig_agent.core.model import KubeletDevice
from mig_agent.frontends.deviceplugin.fates import Listing, Name


def nobody_has(
    devices: Collection[KubeletDevice],
    listing: Listing,
    bound: Mapping[Name, PodFacts],
    *,
    on_way: Collection[KubeletDevice],
    resources: Collection[str],
) -> bool:
    """Whether it is certain that these devices are nobody's any more.

    `bound` are the pods that the API server has on the node; `on_way` devices were allocated so lately that neither may
    have told of their pod; `resources` are the names that are served here.
    """
    if any(device in on_way for device in devices):
        return False
    owners = {name for device in devices for name in listing.owners.get(device, ())}
    if owners:
        # A kubelet before 1.34 lists pods that have ended.
        return all(name in bound and bound[name].finished for name in owners)
    return listing.kubelet is not None and all(
        _is_accounted_for(name, facts, listing, resources) for name, facts in bound.items() if not facts.finished
    )


def _is_accounted_for(name: Name, facts: PodFacts, listing: Listing, resources: Collection[str]) -> bool:
    """Whether the kubelet lists the pod with all that it asks for: not before it is admitted, nor if it is hidden."""
    listed = Counter(
        device.resource for pod in listing.pods if (pod.namespace, pod.name) == name for device in pod.devices
    )
    return all(listed[resource] >= facts.resources.get(resource, 0) for resource in resources)
