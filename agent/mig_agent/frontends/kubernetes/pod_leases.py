"""Leases of pods: the pod and the kubelet's devices of a lease, where its owner is a pod."""

from __future__ import annotations

from collections.abc import Iterator

from mig_agent.core.model import Lease, NodeView
from mig_agent.core.owner import KubeletDevice, PodOwner


def pod_owner(lease: Lease) -> PodOwner | None:
    """Return the owner of a lease where that is a pod, else None."""
    return lease.owner if isinstance(lease.owner, PodOwner) else None


def devices_of(lease: Lease) -> tuple[KubeletDevice, ...]:
    """Return the kubelet's device for each instance of a lease; nothing where the kubelet allocated none."""
    return lease.owner.devices if isinstance(lease.owner, PodOwner) else ()


def leases_of_pods(view: NodeView) -> Iterator[tuple[Lease, PodOwner]]:
    """Yield the leases of a node that pods have or that were reserved for pods."""
    for lease in view.leases.values():
        if isinstance(lease.owner, PodOwner):
            yield lease, lease.owner
