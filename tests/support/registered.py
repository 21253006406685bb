"""What a resource's service needs to stand in a test that is not about what it decides."""

from __future__ import annotations

from collections.abc import Sequence

from mig_agent.core.owner import KubeletDevice
from mig_agent.frontends.kubernetes.device_plugin.allocate import Allocated


class Decided:
    """Everything is allowed, and nothing is put into containers."""

    async def allocate(self, containers: Sequence[Sequence[KubeletDevice]]) -> Sequence[Allocated]:
        """Allow all containers, and inject nothing."""
        return [Allocated() for _ in containers]

    async def start_container(self, devices: Sequence[KubeletDevice], seconds: float) -> None:
        """Let the container start."""
