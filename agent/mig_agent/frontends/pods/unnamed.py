"""Whose the leases are that name no pod: those of an agent before that gave devices by environment variables. Pure.

The kubelet did not say for whom it asked, and where no device plugin runs any more it is not asked either. Its record
of devices tells the pod's UID; that the pod has gone the API server has to say.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from mig_agent.adapters.kubeapi import PodFacts, PodName
from mig_agent.adapters.kubelet import CheckpointEntry
from mig_agent.core.model import Lease, Pod


def names_nobody(lease: Lease) -> bool:
    """Whether it was made for a pod of which nothing is known but its devices."""
    pod = lease.holder.pod
    return pod is not None and not pod.namespace and not pod.uid and bool(lease.kubelet_devices)


def owner(lease: Lease, recorded: Collection[CheckpointEntry], pods: Mapping[PodName, PodFacts]) -> Pod | None:
    """The pod that has the devices by the kubelet's record; by its UID alone where it is not among the node's `pods`.

    None where the record does not tell, or names several.
    """
    devices = set(lease.kubelet_devices)
    uids = {entry.pod_uid for entry in recorded if not devices.isdisjoint(entry.devices)}
    if len(uids) != 1 or lease.holder.pod is None:
        return None
    (uid,) = uids
    for facts in pods.values():
        if uid in facts.uids:
            return Pod(namespace=facts.namespace, name=facts.name, uid=uid)
    return Pod(namespace="", name=lease.holder.pod.name, uid=uid)


def nobody_asks(lease: Lease, pods: Mapping[PodName, PodFacts]) -> bool:
    """Whether no pod on the node could be the one, by what they ask for."""
    names = {device.resource for device in lease.kubelet_devices}
    return not any(names & facts.resources.keys() for facts in pods.values() if not facts.finished)
