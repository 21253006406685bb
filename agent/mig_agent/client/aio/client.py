"""The agent's Python client for asyncio: as `mig_agent.client.Client`, without threads."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

import grpc

from mig_agent.client import api_methods, decode, types
from mig_agent.client.absence import OnAway
from mig_agent.client.addresses import Address
from mig_agent.client.aio.acquire_stream import AsyncAcquiring
from mig_agent.client.aio.connection import AsyncConnection
from mig_agent.client.aio.hold_stream import AsyncHolding
from mig_agent.client.aio.leases import AsyncLease, Taking
from mig_agent.client.api_methods import Answer, Call
from mig_agent.client.channels import Tls
from mig_agent.client.connection import PATIENCE_SECONDS, Connections
from mig_agent.client.errors import ClientError
from mig_agent.client.hold_stream import OnQueued
from mig_agent.client.leases import without_client
from mig_agent.client.waiting import Waiting

if TYPE_CHECKING:
    from mig_agent.client.request_args import RequestArgs


class AsyncClient:
    """A client of this node's agent, or of another node's, for one event loop.

    >>> async with AsyncClient() as client, client.lease(gpu_memory="4G") as lease:   # doctest: +SKIP
    ...     print(lease.devices[0].uuid)

    Its methods have the meaning and the errors of `Client`. Cancelling the task of a call abandons the call, and
    removes a waiting request from the queue.
    """

    def __init__(
        self,
        address: str | Address | None = None,
        *,
        tls: Tls | None = None,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        """Set the arguments of `Client`. The first call connects, and ties the client to its event loop."""
        self._connections = Connections(AsyncConnection, address, tls, patience)
        self._holdings: weakref.WeakSet[AsyncHolding] = weakref.WeakSet()
        self._background: set[asyncio.Task[None]] = set()
        """Tasks that release leases whose callers were cancelled."""

    @property
    def address(self) -> Address:
        """The agent's address."""
        return self._connections.users.address

    async def close(self) -> None:
        """Close the connections. Leases taken with `lease` end."""
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
        on_away: OnAway | None = None,
        **args: Unpack[RequestArgs],
    ) -> Taking:
        """Take a lease as `Client.lease`: await it, or use `async with`. All callbacks run on the event loop."""
        request = api_methods.request_for(args)

        async def take() -> AsyncLease:
            holding = AsyncHolding(self._connections.users, request, on_lost=on_lost, on_away=on_away)
            grant = await holding.open(on_queued)
            self._holdings.add(holding)
            return AsyncLease(self, grant, holding)

        return Taking(take)

    def acquire(
        self,
        *,
        on_queued: OnQueued | None = None,
        on_away: OnAway | None = None,
        confirm: bool = True,
        **args: Unpack[RequestArgs],
    ) -> Taking:
        """Take a lease as `Client.acquire`: await it, or use `async with`, which releases it at the end."""
        acquiring = AsyncAcquiring(self._connections.users, args, self._background)

        async def take() -> AsyncLease:
            waiting = Waiting(self._connections.users, args.get("wait"), on_queued, on_away)
            while True:
                try:
                    grant = await acquiring.take(waiting.report, confirm=confirm)
                except ClientError as error:
                    await asyncio.sleep(waiting.pause_after(error))
                    continue
                waiting.over()
                return AsyncLease(self, grant, acquiring=None if confirm else acquiring)

        return Taking(take)

    async def release(self, lease: types.LeaseRef | AsyncLease, token: str = "", *, force: bool = False) -> None:
        """End a lease, as `Client.release`."""
        if isinstance(lease, AsyncLease) and not (token or force):
            await lease.release()
        else:
            await self._call(api_methods.release(without_client(lease), token, force=force))

    async def cancel(
        self, request_id: str | types.Waiting = "", *, mine: bool = False, reason: str = ""
    ) -> tuple[types.Waiting, ...]:
        """Take waiting requests out of the queue, as `Client.cancel`."""
        return await self._call(api_methods.cancel(request_id, mine=mine, reason=reason))

    async def renew(
        self, lease: types.LeaseRef | AsyncLease, token: str = "", *, ttl: str | float | None
    ) -> types.LeaseInfo:
        """Set a lease's deadline, as `Client.renew`."""
        if isinstance(lease, AsyncLease) and not token:
            return await lease.renew(ttl)
        return await self._call(api_methods.renew(without_client(lease), token, ttl))

    async def recover(self, lease: types.LeaseRef | AsyncLease, token: str = "") -> types.Recovered:
        """Restore a lease of a lost ledger, as `Client.recover`."""
        return await self._call(api_methods.recover(without_client(lease), token))

    # ------------------------------------------------------------ reading

    async def plan(
        self, *, explain: bool = False, estimate: bool = False, **args: Unpack[RequestArgs]
    ) -> types.Plan | types.NoPlan:
        """Plan a request, as `Client.plan`."""
        return (await self.plan_each([args], explain=explain, estimate=estimate))[0]

    async def plan_each(
        self, args_list: Sequence[RequestArgs], *, explain: bool = False, estimate: bool = False
    ) -> list[types.Plan | types.NoPlan]:
        """Plan several requests, as `Client.plan_each`."""
        return await self._call(api_methods.plan_each(args_list, explain=explain, estimate=estimate))

    async def record_plans(self, args_list: Sequence[RequestArgs] = ()) -> str:
        """Return what plans depend on, as `Client.record_plans`."""
        return await self._call(api_methods.record_plans(args_list))

    async def status(self) -> types.Status:
        """Return the node's state, as `Client.status`."""
        return await self._call(api_methods.status())

    async def profiles(self) -> tuple[types.GpuModel, ...]:
        """Return the GPUs' profiles, as `Client.profiles`."""
        return await self._call(api_methods.profiles())

    async def events(
        self,
        *,
        since: float | None = None,
        gpu: str | int | None = None,
        limit: int = 0,
        lease: types.LeaseRef | AsyncLease = "",
    ) -> tuple[types.Event, ...]:
        """Return past events, as `Client.events`."""
        return (await self.event_page(since=since, gpu=gpu, limit=limit, lease=lease)).events

    async def event_page(
        self,
        *,
        since: float | None = None,
        gpu: str | int | None = None,
        limit: int = 0,
        lease: types.LeaseRef | AsyncLease = "",
    ) -> types.EventPage:
        """Return past events and how many were left out, as `Client.event_page`."""
        pages = api_methods.event_pages(since, gpu, limit, without_client(lease))
        call = next(pages)
        while True:
            try:
                call = pages.send(await self._call(call))
            except StopIteration as end:
                found: types.EventPage = end.value
                return found

    async def usage(self) -> dict[int, types.Usage]:
        """Return the usage of each instance, as `Client.usage`."""
        return await self._call(api_methods.usage())

    async def account(
        self, by: str = "tenant", *, since: float | None = None, until: float | None = None
    ) -> types.Account:
        """Return who leased how much in a period, as `Client.account`."""
        return await self._call(api_methods.account(by, since, until))

    async def advise(self, name: str = "", *, since: float | None = None) -> tuple[types.Advice, ...]:
        """Return what leases asked for against what they used, as `Client.advise`."""
        return await self._call(api_methods.advise(name, since))

    async def watch(self, after_revision: int | None = None) -> AsyncIterator[types.Event]:
        """Yield events, as `Client.watch`; the stream ends with the iterator."""
        connection = self._connections.users
        stream = connection.stub.Watch(api_methods.watch(after_revision))
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
        """Destroy idle instances, as `Client.reclaim`."""
        return await self._call(api_methods.reclaim(gpus))

    async def adopt(
        self, *uuids: str, gpus: Sequence[str | int] = (), everything: bool = False
    ) -> tuple[types.Instance, ...]:
        """Adopt foreign instances, as `Client.adopt`."""
        return await self._call(api_methods.adopt(uuids, gpus, everything=everything))

    async def cordon(self, gpu: str | int, reason: str = "") -> types.Gpu:
        """Keep new leases off a GPU, as `Client.cordon`."""
        return await self._call(api_methods.cordon(gpu, reason))

    async def uncordon(self, gpu: str | int) -> types.Gpu:
        """Allow new leases on a GPU again, as `Client.uncordon`."""
        return await self._call(api_methods.uncordon(gpu))

    async def drain(self, *gpus: str | int, deadline: str | float | None = None, reason: str = "") -> types.Drained:
        """Cordon GPUs so that they become empty, as `Client.drain`."""
        return await self._call(api_methods.drain(gpus, deadline, reason))

    async def undrain(self, *gpus: str | int) -> tuple[types.Gpu, ...]:
        """End the draining of GPUs, as `Client.undrain`."""
        return await self._call(api_methods.undrain(gpus))

    async def set_mig_mode(self, gpu: str | int, *, enable: bool) -> types.ModeChange:
        """Switch a GPU's MIG mode, as `Client.set_mig_mode`."""
        return await self._call(api_methods.set_mig_mode(gpu, enable=enable))

    async def pause(self, reason: str = "") -> types.Paused:
        """Pause the agent, as `Client.pause`."""
        return await self._call(api_methods.pause(reason))

    async def resume(self) -> types.Paused:
        """End an administrator's pause, as `Client.resume`."""
        return await self._call(api_methods.resume())

    async def _call(self, call: Call[Answer]) -> Answer:
        connection = self._connections.of(call)
        call_method = connection.call_safely_repeated if call.repeated else connection.call
        return call.read(await call_method(call.on))
