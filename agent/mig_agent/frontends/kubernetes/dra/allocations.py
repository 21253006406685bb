"""Finds the devices that claims have: from the pods bound to the node, and from the leases of claims."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mig_agent.adapters.kubeapi import ClaimFacts, PodFacts, PodName
from mig_agent.core.dra.names import DRIVER
from mig_agent.core.model import Lease, NodeView
from mig_agent.core.owner import ClaimOwner
from mig_agent.frontends.kubernetes.dra.api import DriverApi

ClaimName = tuple[str, str]
"""Namespace and name."""


def claim_leases(view: NodeView) -> Iterator[tuple[Lease, ClaimOwner]]:
    """Yield the leases of prepared claims."""
    for lease in view.leases.values():
        if isinstance(lease.owner, ClaimOwner):
            yield lease, lease.owner


def devices_in(claim: ClaimFacts, pool: str) -> tuple[str, ...]:
    """Return the names of the devices of this node that a claim has; a claim may have those of other drivers, too."""
    return tuple(each.device for each in claim.devices if (each.driver, each.pool) == (DRIVER, pool))


class Allocations:
    """Finds the allocated devices. Not thread-safe; use from the event loop.

    A claim is allocated before its pod is bound to the node, and prepared only after the pod's volumes are mounted.
    """

    def __init__(self, api: DriverApi, pool: str) -> None:
        self._api = api
        self._pool = pool
        self._known: dict[ClaimName, ClaimFacts] = {}
        """The allocated claims of the pods that are there: an allocation stays as it is while a pod uses the claim."""

    async def find(self, pods: Mapping[PodName, PodFacts], view: NodeView) -> frozenset[str]:
        """Return the names of all allocated devices of the node. Raises KubeApiError."""
        used = {(pod.namespace, claim) for pod in pods.values() if not pod.finished for claim in pod.claims}
        self._known = {name: claim for name, claim in self._known.items() if name in used}
        found: set[str] = set()
        for name in sorted(used):
            claim = self._known.get(name) or await self._api.claim(*name)
            if claim is not None and claim.devices:
                self._known[name] = claim
                found.update(devices_in(claim, self._pool))
        # A claim whose pod is gone may still be allocated, and its devices count until it is not.
        for _, owner in claim_leases(view):
            name = (owner.claim.namespace, owner.claim.name)
            claim = self._known.get(name) or await self._api.claim(*name)
            if claim is not None and claim.uid == owner.claim.uid:
                found.update(devices_in(claim, self._pool))
        return frozenset(found)
