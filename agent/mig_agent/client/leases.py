"""A lease in the hand of the one who asked for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from mig_agent.client.types import Device, Grant

if TYPE_CHECKING:
    from mig_agent.client.acquire_stream import Acquiring
    from mig_agent.client.client import Client
    from mig_agent.client.errors import ClientError
    from mig_agent.client.hold_stream import Holding


class Held(Protocol):
    """What keeps a lease alive, and is told when it ended all the same."""

    @property
    def lost(self) -> ClientError | None:
        """Why."""
        ...


class GivenLease:
    """What a lease has, however its client works: its devices, its token, and whether it still stands."""

    def __init__(self, grant: Grant, held: Held | None) -> None:
        self._grant = grant
        self._held = held
        self._released = False

    @property
    def grant(self) -> Grant:
        """The agent's answer as a frozen value."""
        return self._grant

    @property
    def id(self) -> str:
        """The lease's id, as `migctl release` takes it."""
        return self._grant.id

    @property
    def token(self) -> str:
        """What releasing and renewing ask for. A secret."""
        return self._grant.token

    @property
    def devices(self) -> tuple[Device, ...]:
        """In the order in which they were asked for."""
        return self._grant.devices

    @property
    def env(self) -> dict[str, str]:
        """What a process needs in its environment: CUDA_VISIBLE_DEVICES and NVIDIA_VISIBLE_DEVICES."""
        return dict(self._grant.env)

    @property
    def expires_at(self) -> float | None:
        """Seconds since the epoch; None: no deadline."""
        return self._grant.expires_at

    @property
    def lost(self) -> ClientError | None:
        """Why the lease ended without being released, as far as this process was told; None while it stands."""
        return self._held.lost if self._held is not None else None

    def _expires(self, at: float | None) -> None:
        self._grant = replace(self._grant, expires_at=at)

    def __repr__(self) -> str:
        """Without the token."""
        return f"{type(self).__name__}({self.id!r}, {[each.uuid for each in self.devices]})"


class Lease(GivenLease):
    """Devices that are yours until `release`, or the end of the `with` block.

    >>> with Client().lease(gpu_memory="4G") as lease:      # doctest: +SKIP
    ...     subprocess.run(command, env=os.environ | lease.env)
    """

    def __init__(
        self, client: Client, grant: Grant, holding: Holding | None = None, acquiring: Acquiring | None = None
    ) -> None:
        super().__init__(grant, holding)
        self._client = client
        self._holding = holding
        self._acquiring = acquiring
        """What confirms it, until that is done."""

    def confirm(self) -> None:
        """Tell the agent that the lease was written down, where it was taken with `confirm=False`; otherwise nothing.

        Raises Refused where it has ended meanwhile, NoAgent.
        """
        if self._acquiring is not None:
            self._acquiring.confirm()
            self._acquiring = None

    def renew(self, ttl: str | float | None) -> None:
        """Gives it a new deadline from now (`2h`, or seconds), or none. Raises Refused, NoAgent, UsageError."""
        self._expires(self._client.renew(self.id, self.token, ttl=ttl).expires_at)
        self._leave_stream()  # whoever renews a lease has confirmed it

    def _leave_stream(self) -> None:
        if self._acquiring is not None:
            self._acquiring.close()
            self._acquiring = None

    def release(self) -> None:
        """Gives the devices back; nothing the second time. Raises Refused, NoAgent."""
        if self._released:
            return
        self._released = True
        try:
            if self._holding is not None:
                self._holding.stop_attaching()
            if self.lost is None:
                self._client.release(self.id, self.token)
        finally:
            self._leave_stream()
            if self._holding is not None:
                self._holding.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


def environment_of(grant: Grant) -> Mapping[str, str]:
    """The environment of a process that uses a lease: its devices, and the lease's id."""
    return {**grant.env, "MIG_AGENT_LEASE": grant.id}
