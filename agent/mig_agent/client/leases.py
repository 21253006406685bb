"""A lease as the client that requested it sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from mig_agent.client import api_methods
from mig_agent.client.errors import ClientError, NoAgent
from mig_agent.client.types import Device, Grant, LeaseInfo, LeaseRef

if TYPE_CHECKING:
    from typing_extensions import Self  # noqa: UP035 -- mig-agent-client is also for Python 3.10

    from mig_agent.client.acquire_stream import Acquiring
    from mig_agent.client.client import Client
    from mig_agent.client.hold_stream import Holding


class Held(Protocol):
    """Keeps a lease alive, and knows if it ended anyway."""

    @property
    def lost(self) -> ClientError | None:
        """The error that ended the lease; None while it is active."""
        ...


class BaseLease:
    """The parts of a lease that the synchronous and the asynchronous client share."""

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
        """The secret that releases and renews the lease."""
        return self._grant.token

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices in the order in which they were requested."""
        return self._grant.devices

    @property
    def env(self) -> dict[str, str]:
        """Environment for processes that use the devices: the visible devices, and what a share needs for its limit."""
        return dict(self._grant.env)

    @property
    def expires_at(self) -> float | None:
        """Deadline in seconds since the epoch; None if there is none."""
        return self._grant.expires_at

    @property
    def lost(self) -> ClientError | None:
        """The error that ended the lease before `release`, as far as this process knows; None while it is active."""
        return self._held.lost if self._held is not None else None

    def _expires(self, at: float | None) -> None:
        self._grant = replace(self._grant, expires_at=at)

    def __repr__(self) -> str:
        """Return a text without the token."""
        return f"{type(self).__name__}({self.id!r}, {[each.uuid for each in self.devices]})"


class Lease(BaseLease):
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
        """Confirms the lease; None once that is done."""

    def confirm(self) -> None:
        """Confirm the lease after it was recorded, if it was taken with `confirm=False`; otherwise do nothing.

        Raises Refused if it has ended meanwhile, NoAgent.
        """
        if self._acquiring is not None:
            self._acquiring.confirm()
            self._acquiring = None

    def renew(self, ttl: str | float | None) -> LeaseInfo:
        """Set a new deadline from now (`2h`, or seconds); None removes it. Raises Refused, NoAgent, UsageError."""
        renewed = self._client.renew(self.grant, ttl=ttl)
        self._expires(renewed.expires_at)
        self._leave_stream()  # renewing has confirmed the lease
        return renewed

    def _leave_stream(self) -> None:
        if self._acquiring is not None:
            self._acquiring.close()
            self._acquiring = None

    def release(self) -> None:
        """Release the devices; do nothing the second time. Raises Refused, NoAgent.

        After NoAgent a lease of `Client.lease` is released when the agent is back, if this process lives then.
        """
        if self._released:
            return
        self._released = True
        try:
            if self._holding is not None:
                self._holding.stop_attaching()
            if self.lost is None:
                self._client.release(self.id, self.token)
        except NoAgent:
            if self._holding is not None:
                self._holding.release_later(api_methods.release(self.id, self.token, force=False))
            raise
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


def without_client(lease: LeaseRef | BaseLease) -> LeaseRef:
    """Return a lease as API methods take it: of one that belongs to a client its grant, with the token."""
    return lease.grant if isinstance(lease, BaseLease) else lease


def environment_of(grant: Grant) -> Mapping[str, str]:
    """Return the environment of a process that uses a lease: its devices, the lease's id, and how large a device is.

    Of several devices the smallest is told, by its profile and its memory in MiB: a program that runs on all of them
    must fit there.
    """
    smallest = min(grant.devices, key=lambda each: each.memory_mib)
    return {
        **grant.env,
        "MIG_AGENT_LEASE": grant.id,
        "MIG_AGENT_DEVICE_PROFILE": smallest.profile,
        "MIG_AGENT_DEVICE_MEMORY": str(smallest.memory_mib),
    }
