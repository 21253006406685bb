"""The part of the API server that the device plugin uses; `adapters.kubeapi.KubeClient` implements it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final, Protocol

from mig_agent.adapters.kubeapi import KubeApiError, PodFacts
from mig_agent.core.owner import Pod

_SECONDS: Final = 3.0
"""For an answer that a container's start waits for."""


class DevicePluginApi(Protocol):
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


async def pod_in_time(api: DevicePluginApi, namespace: str, name: str) -> PodFacts | None:
    """A pod, for a container that starts. Raises KubeApiError, also where no answer comes in time."""
    try:
        async with asyncio.timeout(_SECONDS):
            return await api.pod(namespace, name)
    except TimeoutError as error:
        raise KubeApiError("the API server does not answer in time") from error
