"""The part of the API server that the pod tracker uses; `adapters.kubeapi.KubeClient` implements it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from mig_agent.adapters.kubeapi import InformerSubscription, PodFacts, PodName


class PodTrackerApi(Protocol):
    """The API server, as the pod tracker uses it. `pod` raises KubeApiError."""

    async def pod(self, namespace: str, name: str) -> PodFacts | None:
        """Return a pod; None if there is no pod of this name."""
        ...

    def follow_pods(
        self, on_change: Callable[[Mapping[PodName, PodFacts]], None], on_lost: Callable[[str], None]
    ) -> InformerSubscription:
        """Call `on_change` with all pods bound to this node, now and at each change, until the result is closed.

        `on_lost` is called with the error when the watch fails.
        """
        ...
