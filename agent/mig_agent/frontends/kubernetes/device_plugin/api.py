"""The part of the API server that the device plugin uses; `adapters.kubeapi.KubeClient` implements it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final, Protocol

from mig_agent.adapters.kubeapi import KubeApiError, PodFacts
from mig_agent.core.owner import Pod

_SECONDS: Final = 3.0
"""How long the start of a container waits for an answer."""


class DevicePluginApi(Protocol):
    """The part of the API server that the device plugin uses; its coroutines raise KubeApiError."""

    async def pod(self, namespace: str, name: str) -> PodFacts | None:
        """Return a pod; None if there is none of this name."""
        ...

    async def patch_resources(self, counts: Mapping[str, int], capacity: Mapping[str, int]) -> None:
        """Set the allocatable number and the capacity of each resource in the node's status."""
        ...

    async def tell(self, about: Pod | None, reason: str, words: str, *, warning: bool) -> None:
        """Send an Event about a pod, or about the node."""
        ...


async def pod_in_time(api: DevicePluginApi, namespace: str, name: str) -> PodFacts | None:
    """Return a pod, as `DevicePluginApi.pod` does. Raises KubeApiError, also if no answer comes within 3 s."""
    try:
        async with asyncio.timeout(_SECONDS):
            return await api.pod(namespace, name)
    except TimeoutError as error:
        raise KubeApiError("the API server does not answer in time") from error
