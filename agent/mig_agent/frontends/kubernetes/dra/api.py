"""The part of the API server that the DRA driver uses; `adapters.kubeapi.KubeClient` implements it."""

from __future__ import annotations

from typing import Protocol

from mig_agent.adapters.kubeapi import ClaimFacts, Json, NodeFacts


class DriverApi(Protocol):
    """The part of the API server that the DRA driver uses; its coroutines raise KubeApiError."""

    async def node(self) -> NodeFacts:
        """Return the agent's own node."""
        ...

    async def claim(self, namespace: str, name: str) -> ClaimFacts | None:
        """Return a claim; None if there is none of this name."""
        ...

    async def slices(self, driver: str) -> tuple[Json, ...]:
        """Return the slices of a driver on the node."""
        ...

    async def write_slice(self, body: Json, *, is_new: bool) -> Json:
        """Create or replace a slice; return it as the API server stored it."""
        ...

    async def delete_slice(self, name: str) -> None:
        """Delete a slice."""
        ...
