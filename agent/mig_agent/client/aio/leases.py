"""A lease as the coroutine that requested it sees it, and one that is not granted yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mig_agent.client import api_methods
from mig_agent.client.errors import NoAgent
from mig_agent.client.leases import BaseLease
from mig_agent.client.types import Grant, LeaseInfo

if TYPE_CHECKING:
    from mig_agent.client.aio.acquire_stream import AsyncAcquiring
    from mig_agent.client.aio.client import AsyncClient
    from mig_agent.client.aio.hold_stream import AsyncHolding


class AsyncLease(BaseLease):
    """Devices that are yours until `release`, or the end of the `async with` block."""

    def __init__(
        self,
        client: AsyncClient,
        grant: Grant,
        holding: AsyncHolding | None = None,
        acquiring: AsyncAcquiring | None = None,
    ) -> None:
        super().__init__(grant, holding)
        self._client = client
        self._holding = holding
        self._acquiring = acquiring
        self._later: asyncio.Task[None] | None = None

    async def confirm(self) -> None:
        """Confirm the lease after it was recorded, if it was taken with `confirm=False`; otherwise do nothing."""
        if self._acquiring is not None:
            await self._acquiring.confirm()
            self._acquiring = None

    async def renew(self, ttl: str | float | None) -> LeaseInfo:
        """Set a new deadline from now (`2h`, or seconds); None removes it. Raises Refused, NoAgent, UsageError."""
        renewed = await self._client.renew(self.grant, ttl=ttl)
        self._expires(renewed.expires_at)
        self._leave_stream()  # renewing has confirmed the lease
        return renewed

    def _leave_stream(self) -> None:
        if self._acquiring is not None:
            self._acquiring.close()
            self._acquiring = None

    async def release(self) -> None:
        """Release the devices; do nothing the second time. Raises Refused, NoAgent.

        After NoAgent a lease of `AsyncClient.lease` is released when the agent is back, if the event loop runs then.
        """
        if self._released:
            return
        self._released = True
        try:
            if self._holding is not None:
                self._holding.stop_attaching()
            if self.lost is None:
                await self._client.release(self.id, self.token)
        except NoAgent:
            if self._holding is not None:
                self._later = self._holding.release_later(api_methods.release(self.id, self.token, force=False))
            raise
        finally:
            self._leave_stream()
            if self._holding is not None:
                await self._holding.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.release()


class Taking(Coroutine[Any, Any, AsyncLease]):
    """A lease that is not granted yet: `lease = await taking`, or `async with taking as lease`, which releases it.

    It is a coroutine, so that it can be the work of a task, too.
    """

    def __init__(self, take: Callable[[], Coroutine[Any, Any, AsyncLease]]) -> None:
        self._take = take
        self._lease: AsyncLease | None = None
        self._task: Coroutine[Any, Any, AsyncLease] | None = None
        """The coroutine that a task runs."""

    def __await__(self) -> Generator[Any, Any, AsyncLease]:
        return self._take().__await__()

    def send(self, value: Any) -> Any:  # noqa: ANN401 -- of the protocol
        """Run on to the next pause, for a task."""
        if self._task is None:
            self._task = self._take()
        return self._task.send(value)

    def throw(self, *error: Any) -> Any:  # noqa: ANN401 -- of the protocol
        """Raise an error where it pauses, for a task that is cancelled."""
        if self._task is None:
            self._task = self._take()
        return self._task.throw(*error)

    def close(self) -> None:
        """End it where it pauses."""
        if self._task is not None:
            self._task.close()

    async def __aenter__(self) -> AsyncLease:
        self._lease = await self._take()
        return self._lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._lease is not None:
            await self._lease.release()
