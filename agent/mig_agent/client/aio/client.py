"""The agent's Python client for asyncio: what `mig_agent.client.Client` does, without a thread."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

import grpc

from mig_agent.client import calls, decode, types
from mig_agent.client.addresses import Address
from mig_agent.client.aio.acquire_stream import AsyncAcquiring
from mig_agent.client.aio.connection import AsyncConnection
from mig_agent.client.aio.hold_stream import AsyncHolding
from mig_agent.client.aio.leases import AsyncLease, Taking
from mig_agent.client.calls import Answer, Call
from mig_agent.client.channels import Tls
from mig_agent.client.connection import PATIENCE_SECONDS, Connections
from mig_agent.client.errors import ClientError
from mig_agent.client.hold_stream import OnQueued

if TYPE_CHECKING:
    from mig_agent.client.request_args import Asking


class AsyncClient:
    """Speaks with the agent of this node, or of another one, on one event loop.

    >>> async with AsyncClient() as client, client.lease(gpu_memory="4G") as lease:   # doctest: +SKIP
    ...     print(lease.devices[0].uuid)

    Its methods mean what those of `Client` do and raise the same. A call whose task is cancelled is given up, and a
    request that waits leaves the queue.
    """

    def __init__(
        self,
        address: str | Address | None = None,
        *,
        tls: Tls | None = None,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        """As `Client`. Nothing is connected before the first call, which ties the client to its event loop."""
        self._connections = Connections(AsyncConnection, address, tls, patience)
        self._holdings: weakref.WeakSet[AsyncHolding] = weakref.WeakSet()
        self._background: set[asyncio.Task[None]] = set()
        """Tasks that give back leases whose callers were cancelled."""

    @property
    def address(self) -> Address:
        """Where the agent is."""
        return self._connections.users.address

    async def close(self) -> None:
        """Closes the connections. Leases that were taken with `lease` end."""
        for holding in tuple(self._holdings):
            await holding.close()
        if self._background:
            await asyncio.wait(self._background)
        for connection in self._connections.opened():
            await connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # ------------------------------------------------------------ leases

    def lease(
        self,
        *,
        on_queued: OnQueued | None = None,
        on_lost: Callable[[ClientError], None] | None = None,
        **asking: Unpack[Asking],
    ) -> Taking:
        """As `Client.lease`: to be awaited, or entered with `async with`. Both callbacks are called on the loop."""
        request = calls.request_for(asking)

        async def take() -> AsyncLease:
            holding = AsyncHolding(self._connections.users, request, on_lost=on_lost)
            grant = await holding.open(on_queued)
            self._holdings.add(holding)
            return AsyncLease(self, grant, holding)

        return Taking(take)

    def acquire(self, *, on_queued: OnQueued | None = None, confirm: bool = True, **asking: Unpack[Asking]) -> Taking:
        """As `Client.acquire`: to be awaited, or entered with `async with`, which releases it at the block's end."""
        acquiring = AsyncAcquiring(self._connections.users, asking, self._background)

        async def take() -> AsyncLease:
            grant = await acquiring.take(on_queued, confirm=confirm)
            return AsyncLease(self, grant, acquiring=None if confirm else acquiring)

        return Taking(take)

    async def release(self, lease: str, token: str = "", *, force: bool = False) -> None:
        """As `Client.release`."""
        await self._ask(calls.release(lease, token, force=force))

    async def renew(self, lease: str, token: str = "", *, ttl: str | float | None = None) -> types.LeaseInfo:
        """As `Client.renew`."""
        return await self._ask(calls.renew(lease, token, ttl))

    async def recover(self, lease: str, token: str) -> types.Recovered:
        """As `Client.recover`."""
        return await self._ask(calls.recover(lease, token))

    # ------------------------------------------------------------ looking

    async def plan(self, *, explain: bool = False, **asking: Unpack[Asking]) -> types.Plan | types.NoPlan:
        """As `Client.plan`."""
        return (await self.plan_each([asking], explain=explain))[0]

    async def plan_each(self, askings: Sequence[Asking], *, explain: bool = False) -> list[types.Plan | types.NoPlan]:
        """As `Client.plan_each`."""
        return await self._ask(calls.plan_each(askings, explain=explain))

    async def status(self) -> types.Status:
        """As `Client.status`."""
        return await self._ask(calls.status())

    async def profiles(self) -> tuple[types.GpuModel, ...]:
        """As `Client.profiles`."""
        return await self._ask(calls.profiles())

    async def events(
        self, *, since: float | None = None, gpu: str | int | None = None, limit: int = 0
    ) -> tuple[types.Event, ...]:
        """As `Client.events`."""
        return await self._ask(calls.events(since, gpu, limit))

    async def usage(self) -> dict[int, types.Usage]:
        """As `Client.usage`."""
        return await self._ask(calls.usage())

    async def watch(self, after_revision: int | None = None) -> AsyncIterator[types.Event]:
        """As `Client.watch`; the stream ends with the iterator."""
        connection = self._connections.users
        stream = connection.stub.Watch(calls.watch(after_revision))
        try:
            async for answer in stream:
                if answer.HasField("event"):
                    yield decode.event(answer.event)
        except (grpc.RpcError, asyncio.CancelledError) as error:
            raise await connection.failure(error) from error
        finally:
            stream.cancel()

    # ------------------------------------------------------------ administration

    async def reclaim(self, *gpus: str | int) -> tuple[types.Instance, ...]:
        """As `Client.reclaim`."""
        return await self._ask(calls.reclaim(gpus))

    async def adopt(
        self, *uuids: str, gpus: Sequence[str | int] = (), everything: bool = False
    ) -> tuple[types.Instance, ...]:
        """As `Client.adopt`."""
        return await self._ask(calls.adopt(uuids, gpus, everything=everything))

    async def cordon(self, gpu: str | int, reason: str = "") -> types.Gpu:
        """As `Client.cordon`."""
        return await self._ask(calls.cordon(gpu, reason))

    async def uncordon(self, gpu: str | int) -> types.Gpu:
        """As `Client.uncordon`."""
        return await self._ask(calls.uncordon(gpu))

    async def set_mig_mode(self, gpu: str | int, *, enable: bool) -> types.ModeChange:
        """As `Client.set_mig_mode`."""
        return await self._ask(calls.set_mig_mode(gpu, enable=enable))

    async def pause(self, reason: str = "") -> types.Paused:
        """As `Client.pause`."""
        return await self._ask(calls.pause(reason))

    async def resume(self) -> types.Paused:
        """As `Client.resume`."""
        return await self._ask(calls.resume())

    async def _ask(self, call: Call[Answer]) -> Answer:
        connection = self._connections.of(call)
        ask = connection.call_safely_repeated if call.repeated else connection.call
        return call.read(await ask(call.on))
