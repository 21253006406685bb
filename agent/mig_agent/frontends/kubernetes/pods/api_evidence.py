"""Evidence from the API server on pods that have leases: whether they are bound, have ended, or must be asked for.

Pure. It also finds the pods of leases that name none: those of an earlier agent that gave devices by environment.

The kubelet did not say for whom it asked, and where no device plugin runs any more it is not asked either. Its record
of devices tells the pod's UID; that the pod has gone the API server has to say.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from mig_agent.adapters.kubeapi import PodFacts, PodName
from mig_agent.adapters.kubelet import CheckpointEntry
from mig_agent.core.model import Lease, Pod
from mig_agent.core.quantities import format_duration


def has_unknown_pod(lease: Lease) -> bool:
    """Whether it was made for a pod of which nothing is known but its devices."""
    pod = lease.holder.pod
    return pod is not None and not pod.namespace and not pod.uid and bool(lease.kubelet_devices)


def owner_of(lease: Lease, recorded: Collection[CheckpointEntry], pods: Mapping[PodName, PodFacts]) -> Pod | None:
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


def no_pod_asks(lease: Lease, pods: Mapping[PodName, PodFacts]) -> bool:
    """Whether no pod on the node could be the one, by what they ask for."""
    names = {device.resource for device in lease.kubelet_devices}
    return not any(names & facts.resources.keys() for facts in pods.values() if not facts.finished)


Pods = Mapping[PodName, PodFacts]
"""The pods that are bound to the node, as the watch shows them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Verdict: the pod is on this node, and the lease is to be bound to it."""

    pod: Pod


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Verdict: the pod has ended, will not come or is on another node, and its lease is to end."""

    words: str
    """The reason for messages: `its pod has ended`."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Verdict: the watch is not enough evidence, and the API server is to be asked for the pod."""


@dataclass(frozen=True, slots=True)
class Unchanged:
    """Verdict: nothing is to be done."""


Verdict = Bound | Ended | Ask | Unchanged

ASK: Final = Ask()
UNCHANGED: Final = Unchanged()
_ENDED: Final = Ended(words="its pod has ended")
_GONE: Final = Ended(words="its pod is gone")
NAMELESS_SECONDS: Final = 600.0
"""A pod that is known by its UID alone, or not at all, cannot be asked for; so long after it came, a watch that does
not show it is not just behind."""


def by_watch(lease: Lease, pods: Pods, now: float) -> Verdict:
    """By the pods that the watch shows, which may be some moments behind. `now` and the lease's times: seconds."""
    pod = pod_of(lease)
    facts = found(pod, pods)
    if not pod.namespace and facts is None:
        is_gone = bool(pod.uid) or (has_unknown_pod(lease) and no_pod_asks(lease, pods))
        return _GONE if is_gone and now - lease.created_at >= NAMELESS_SECONDS else UNCHANGED
    if facts is None or (facts.finished and not pod.uid):
        # It has not come yet, or it was that of an earlier one of its name. A deadline ends what never comes.
        return UNCHANGED if lease.promised and lease.expires_at is not None else ASK
    if pod.uid and pod.uid not in facts.uids:
        return ASK  # perhaps an earlier pod, whose end the watch has not shown yet
    if facts.finished:
        return _ENDED
    return _came(facts) if lease.promised else UNCHANGED


def by_answer(
    lease: Lease,
    facts: PodFacts | None,
    node: str,
    now: float,
    arrival_seconds: float,
    *,
    confirmed_at: float = -math.inf,
) -> Verdict:
    """Return the verdict by the API server's answer to a query for the pod; None: there is no pod of its name.

    A reserved lease without a deadline ends if its pod is not bound within `arrival_seconds` of its creation or its
    last renewal (`confirmed_at`): its scheduler renews it just before it binds the pod. All times are in seconds.
    """
    pod = pod_of(lease)
    waited = now - max(lease.created_at, confirmed_at)
    overdue = lease.promised and lease.expires_at is None and waited >= arrival_seconds
    never = Ended(words=f"its pod has not come in {format_duration(arrival_seconds)}") if overdue else UNCHANGED
    if lease.promised and not pod.uid and (facts is None or facts.finished):
        return never  # it may have been named before it was made
    if facts is None or (pod.uid and pod.uid not in facts.uids):
        return _GONE
    if facts.finished:
        return _ENDED
    if not facts.node:
        return never
    if facts.node != node:
        return Ended(words=f"its pod is on node {facts.node}")
    return _came(facts) if lease.promised else UNCHANGED


def found(pod: Pod, pods: Pods) -> PodFacts | None:
    """A pod among those that the watch shows, by its name, or by its UID where that is all that is known of it."""
    if pod.namespace:
        return pods.get((pod.namespace, pod.name))
    return next((each for each in pods.values() if pod.uid and pod.uid in each.uids), None)


def pod_of(lease: Lease) -> Pod:
    """The pod that a lease was taken for. Raises ValueError for a lease of anybody else."""
    if lease.holder.pod is None:
        raise ValueError(f"cannot follow the pod of lease {lease.id}: it is no pod's")
    return lease.holder.pod


def _came(facts: PodFacts) -> Bound:
    return Bound(pod=Pod(namespace=facts.namespace, name=facts.name, uid=facts.uid))
