"""The agent's Python client: synchronous, typed, and safe to use from several threads."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

import grpc

from mig_agent.client import api_methods, decode, types
from mig_agent.client.acquire_stream import Acquiring
from mig_agent.client.addresses import Address
from mig_agent.client.api_methods import Answer, Call
from mig_agent.client.channels import Tls
from mig_agent.client.connection import PATIENCE_SECONDS, Connection, Connections
from mig_agent.client.error_mapping import failure_of
from mig_agent.client.errors import ClientError
from mig_agent.client.hold_stream import Holding, OnQueued
from mig_agent.client.leases import Lease

if TYPE_CHECKING:
    from mig_agent.client.request_args import RequestArgs


class Client:
    """A client of this node's agent.

    >>> with Client() as client, client.lease(gpu_memory="4G") as lease:   # doctest: +SKIP
    ...     print(lease.devices[0].uuid)

    Nothing is connected before the first call. Every call raises UsageError for an invalid argument, Refused when the
    agent refuses, and NoAgent when none answers.
    """

    def __init__(
        self,
        address: str | Address | None = None,
        *,
        tls: Tls | None = None,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        """Set where and how to connect.

        `address`: `unix:///path` or `host:port`; None: MIG_AGENT_ADDRESS, else the default socket.

        TCP needs `tls`, taken from MIG_AGENT_TLS_CA, _CERT, _KEY and _SERVER_NAME if it is None; its files are read
        again when they change. `patience`: how many seconds to retry a call whose connection breaks.
        """
        self._connections = Connections(Connection, address, tls, patience)
        self._holdings: weakref.WeakSet[Holding] = weakref.WeakSet()

    @property
    def address(self) -> Address:
        """The agent's address."""
        return self._connections.users.address

    def close(self) -> None:
        """Close the connections. Leases taken with `lease` end 5 s later."""
        for holding in tuple(self._holdings):
            holding.close()
        for connection in self._connections.opened():
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------ leases

    def lease(
        self,
        *,
        on_queued: OnQueued | None = None,
        on_lost: Callable[[ClientError], None] | None = None,
        **args: Unpack[RequestArgs],
    ) -> Lease:
        """Lease devices for the life of this process, or until `release` or the end of the `with` block.

        `on_queued` is called with the position in the queue (1 is next) while the request waits. `on_lost` is called
        from another thread when the lease ends for another reason: a deadline, an administrator, or an agent that was
        away for too long.
        """
        holding = Holding(self._connections.users, api_methods.request_for(args), on_lost=on_lost)
        grant = holding.open(on_queued)
        self._holdings.add(holding)
        return Lease(self, grant, holding)

    def acquire(self, *, on_queued: OnQueued | None = None, confirm: bool = True, **args: Unpack[RequestArgs]) -> Lease:
        """Lease devices beyond the life of this process: until they are released, or `ttl` or `pid` ends the lease.

        `on_queued` is called with the position in the queue (1 is next) while the request waits. With `confirm=False`
        the lease ends after the grace period (60 s) unless its `confirm` is called: for a caller that has to record it
        first.
        """
        acquiring = Acquiring(self._connections.users, args)
        grant = acquiring.take(on_queued, confirm=confirm)
        return Lease(self, grant, acquiring=None if confirm else acquiring)

    def release(self, lease: str, token: str = "", *, force: bool = False) -> None:
        """End a lease. Without a token: only for the user of this machine who requested it, and for administrators.

        With `force`, for administrators, also one bound to a pod on this node that does not use it.
        """
        self._call(api_methods.release(lease, token, force=force))

    def renew(self, lease: str, token: str = "", *, ttl: str | float | None = None) -> types.LeaseInfo:
        """Set a new deadline from now (`2h`, or seconds), or none. The token is needed as for `release`."""
        return self._call(api_methods.renew(lease, token, ttl))

    def recover(self, lease: str, token: str) -> types.Recovered:
        """Restore a lease that was active when the agent's ledger was lost: the same id, token and devices.

        It lasts until it is released, or until its deadline. Recovering it again changes nothing.
        """
        return self._call(api_methods.recover(lease, token))

    # ------------------------------------------------------------ reading

    def plan(self, *, explain: bool = False, **args: Unpack[RequestArgs]) -> types.Plan | types.NoPlan:
        """Return how a request would be served now, or why not; with `explain` also why so. Changes nothing."""
        return self.plan_each([args], explain=explain)[0]

    def plan_each(self, args_list: Sequence[RequestArgs], *, explain: bool = False) -> list[types.Plan | types.NoPlan]:
        """Return how each of several requests would be served now, each as if it came alone."""
        return self._call(api_methods.plan_each(args_list, explain=explain))

    def record_plans(self, args_list: Sequence[RequestArgs] = ()) -> str:
        """Return the plans of these requests and of those that wait, with everything that they depend on, as JSON.

        `mig-agent replay` reads it. Empty from an agent that cannot record. Changes nothing.
        """
        return self._call(api_methods.record_plans(args_list))

    def status(self) -> types.Status:
        """Return the node's state: GPUs, instances, leases and the queue."""
        return self._call(api_methods.status())

    def profiles(self) -> tuple[types.GpuModel, ...]:
        """Return the profiles that the node's GPUs offer."""
        return self._call(api_methods.profiles())

    def events(
        self, *, since: float | None = None, gpu: str | int | None = None, limit: int = 0
    ) -> tuple[types.Event, ...]:
        """Return events since a time (seconds since the epoch), oldest first; at most `limit`, the newest."""
        return self._call(api_methods.events(since, gpu, limit))

    def usage(self) -> dict[int, types.Usage]:
        """Return the present usage of each instance, by its generation."""
        return self._call(api_methods.usage())

    def watch(self, after_revision: int | None = None) -> Iterator[types.Event]:
        """Yield events as they happen, from now on or after a revision; ends only by an error, or by `close`."""
        stream = self._connections.users.stub.Watch(api_methods.watch(after_revision))
        try:
            for answer in stream:
                if answer.HasField("event"):
                    yield decode.event(answer.event)
        except grpc.RpcError as error:
            raise failure_of(error, self.address) from error
        finally:
            stream.cancel()

    # ------------------------------------------------------------ administration

    def reclaim(self, *gpus: str | int) -> tuple[types.Instance, ...]:
        """Destroy idle instances on these GPUs, or on all; return them. For administrators."""
        return self._call(api_methods.reclaim(gpus))

    def adopt(
        self, *uuids: str, gpus: Sequence[str | int] = (), everything: bool = False
    ) -> tuple[types.Instance, ...]:
        """Adopt foreign instances with these UUIDs, on these GPUs, or all; return them. For administrators."""
        return self._call(api_methods.adopt(uuids, gpus, everything=everything))

    def cordon(self, gpu: str | int, reason: str = "") -> types.Gpu:
        """Keep new leases off a GPU. For administrators."""
        return self._call(api_methods.cordon(gpu, reason))

    def uncordon(self, gpu: str | int) -> types.Gpu:
        """Allow new leases on a GPU again. For administrators."""
        return self._call(api_methods.uncordon(gpu))

    def set_mig_mode(self, gpu: str | int, *, enable: bool) -> types.ModeChange:
        """Switch a GPU's MIG mode; refused while anything runs on it or is leased. For administrators."""
        return self._call(api_methods.set_mig_mode(gpu, enable=enable))

    def pause(self, reason: str = "") -> types.Paused:
        """Make the agent grant nothing more and release the driver; leases stay. For administrators."""
        return self._call(api_methods.pause(reason))

    def resume(self) -> types.Paused:
        """End an administrator's pause. For administrators."""
        return self._call(api_methods.resume())

    def _call(self, call: Call[Answer]) -> Answer:
        connection = self._connections.of(call)
        call_method = connection.call_safely_repeated if call.repeated else connection.call
        return call.read(call_method(call.on))
