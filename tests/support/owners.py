"""Owners of leases in tests, in a few words."""

from __future__ import annotations

from mig_agent.core.model import Lease
from mig_agent.core.owner import KubeletDevice, Pod, PodOwner


def bound(pod: Pod, devices: tuple[KubeletDevice, ...] = ()) -> PodOwner:
    """A pod on this node."""
    return PodOwner(pod=pod, devices=devices, is_bound=True)


def pod_of(lease: Lease) -> Pod:
    """The pod of a lease that has one."""
    assert isinstance(lease.owner, PodOwner)
    return lease.owner.pod


def devices_of(lease: Lease) -> tuple[KubeletDevice, ...]:
    """The kubelet's devices that a lease stands for."""
    return lease.owner.devices if isinstance(lease.owner, PodOwner) else ()
