"""What the device plugin asks of the API server; `adapters.kubeapi.KubeApi` does it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from mig_agent.adapters.kubeapi import PodFacts
from mig_agent.core.model import Pod


class Api(Protocol):
    """All of it raises KubeApiError."""

    async def pod(self, namespace: str, name: str) -> PodFacts | None:
        """A pod; None where there is none of this name."""
        ...

    async def patch_resources(self, counts: Mapping[str, int], capacity: Mapping[str, int]) -> None:
        """Writes into the status of the node how many of each resource it gives, and how many it has."""
        ...

    async def tell(self, about: Pod | None, reason: str, words: str, *, warning: bool) -> None:
        """An event on a pod, or on the node."""
        ...
