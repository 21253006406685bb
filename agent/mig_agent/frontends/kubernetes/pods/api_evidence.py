"""Evidence from the API server on pods that have leases: whether they are bound, have ended, or must be asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from mig_agent.adapters.kubeapi import PodFacts, PodName
from mig_agent.core.model import Lease
from mig_agent.core.owner import Pod
from mig_agent.core.quantities import format_duration
from mig_agent.frontends.kubernetes.pod_leases import pod_owner

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


def by_watch(lease: Lease, pods: Pods) -> Verdict:
    """Return the verdict by the pods that the watch shows, which may be some moments behind."""
    pod = pod_of(lease)
    facts = pods.get((pod.namespace, pod.name))
    if facts is None or (facts.finished and not pod.uid):
        # Not bound yet, or this is an earlier pod of its name. A deadline ends a lease whose pod never comes.
        return UNCHANGED if lease.owner.is_reserved and lease.expires_at is not None else ASK
    if pod.uid and pod.uid not in facts.uids:
        return ASK  # perhaps an earlier pod, whose end the watch has not shown yet
    if facts.finished:
        return _ENDED
    return _came(facts) if lease.owner.is_reserved else UNCHANGED


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
    overdue = lease.owner.is_reserved and lease.expires_at is None and waited >= arrival_seconds
    never = Ended(words=f"its pod has not come in {format_duration(arrival_seconds)}") if overdue else UNCHANGED
    if lease.owner.is_reserved and not pod.uid and (facts is None or facts.finished):
        return never  # the lease may have been taken before the pod was created
    if facts is None or (pod.uid and pod.uid not in facts.uids):
        return _GONE
    if facts.finished:
        return _ENDED
    if not facts.node:
        return never
    if facts.node != node:
        return Ended(words=f"its pod is on node {facts.node}")
    return _came(facts) if lease.owner.is_reserved else UNCHANGED


def pod_of(lease: Lease) -> Pod:
    """Return the pod that a lease was taken for. Raises ValueError if the lease is not for a pod."""
    owner = pod_owner(lease)
    if owner is None:
        raise ValueError(f"cannot follow the pod of lease {lease.id}: it is no pod's")
    return owner.pod


def _came(facts: PodFacts) -> Bound:
    return Bound(pod=Pod(namespace=facts.namespace, name=facts.name, uid=facts.uid))
