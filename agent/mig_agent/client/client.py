"""The agent's Python client: synchronous, typed, and safe to use from several threads."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

import grpc

from mig_agent.client import calls, decode, types
from mig_agent.client.acquire_stream import Acquiring
from mig_agent.client.addresses import Address
from mig_agent.client.calls import Answer, Call
from mig_agent.client.channels import Tls
from mig_agent.client.connection import PATIENCE_SECONDS, Connection, Connections
from mig_agent.client.error_mapping import failure_of
from mig_agent.client.errors import ClientError
from mig_agent.client.hold_stream import Holding, OnQueued
from mig_agent.client.leases import Lease

if TYPE_CHECKING:
    from mig_agent.client.request_args import Asking


class Client:
    """Speaks with the agent of this node.

    >>> with Client() as client, client.lease(gpu_memory="4G") as lease:   # doctest: +SKIP
    ...     print(lease.devices[0].uuid)

    Nothing is connected before the first call. Every call raises UsageError for a wrong argument, Refused when the
    agent says no, and NoAgent when none answers.
    """

    def __init__(
        self,
        address: str | Address | None = None,
        *,
        tls: Tls | None = None,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        """`address`: `unix:///path` or `host:port`; None: MIG_AGENT_ADDRESS, else the default socket.

        TCP needs `tls`, taken from MIG_AGENT_TLS_CA, _CERT, _KEY and _SERVER_NAME when it is None; its files are read
        again when they change. `patience`: for how many seconds to go on trying when the connection breaks.
        """
        self._connections = Connections(Connection, address, tls, patience)
        self._holdings: weakref.WeakSet[Holding] = weakref.WeakSet()

    @property
    def address(self) -> Address:
        """Where the agent is."""
        return self._connections.users.address

    def close(self) -> None:
        """Closes the connections. Leases that were taken with `lease` end 5 s later."""
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
        **asking: Unpack[Asking],
    ) -> Lease:
        """Takes devices for as long as this process lives, or until the lease is released or its `with` block ends.

        `on_queued` is called with the place in the queue (1 is next) while the request waits. `on_lost` is called from
        another thread when the lease ends by another's doing: a deadline, an administrator, or an agent that was away
        for too long.
        """
        holding = Holding(self._connections.users, calls.request_for(asking), on_lost=on_lost)
        grant = holding.open(on_queued)
        self._holdings.add(holding)
        return Lease(self, grant, holding)

    def acquire(self, *, on_queued: OnQueued | None = None, confirm: bool = True, **asking: Unpack[Asking]) -> Lease:
        """Takes devices that stay leased when this process ends: until they are released, or `ttl` or `pid` says so.

        `on_queued` is called with the place in the queue (1 is next) while the request waits. With `confirm=False` the
        lease ends after a time of grace (60 s) unless its `confirm` is called: for whoever has to write it down first.
        """
        acquiring = Acquiring(self._connections.users, asking)
        grant = acquiring.take(on_queued, confirm=confirm)
        return Lease(self, grant, acquiring=None if confirm else acquiring)

    def release(self, lease: str, token: str = "", *, force: bool = False) -> None:
        """Ends a lease. Without a token: for the user of this machine who asked for it, and for administrators.

        With `force`, for administrators, also that of a pod that has come for it and does not use it.
        """
        self._ask(calls.release(lease, token, force=force))

    def renew(self, lease: str, token: str = "", *, ttl: str | float | None = None) -> types.LeaseInfo:
        """Gives a lease a new deadline from now (`2h`, or seconds), or none. The token is needed as for `release`."""
        return self._ask(calls.renew(lease, token, ttl))

    def recover(self, lease: str, token: str) -> types.Recovered:
        """Makes a lease again that was live when the agent's ledger was lost: the same id, token and devices.

        It stays until it is released, or until its deadline. Recovering what has come back changes nothing.
        """
        return self._ask(calls.recover(lease, token))

    # ------------------------------------------------------------ looking

    def plan(self, *, explain: bool = False, **asking: Unpack[Asking]) -> types.Plan | types.NoPlan:
        """How a request would be served now, or why not; with `explain` also how that comes about. Changes nothing."""
        return self.plan_each([asking], explain=explain)[0]

    def plan_each(self, askings: Sequence[Asking], *, explain: bool = False) -> list[types.Plan | types.NoPlan]:
        """How each of several requests would be served now, each as though it came alone."""
        return self._ask(calls.plan_each(askings, explain=explain))

    def status(self) -> types.Status:
        """The node as it is: GPUs, instances, leases and the queue."""
        return self._ask(calls.status())

    def profiles(self) -> tuple[types.GpuModel, ...]:
        """What the node's GPUs can be cut into."""
        return self._ask(calls.profiles())

    def events(
        self, *, since: float | None = None, gpu: str | int | None = None, limit: int = 0
    ) -> tuple[types.Event, ...]:
        """What happened since a moment (seconds since the epoch), oldest first; at most `limit`, the newest."""
        return self._ask(calls.events(since, gpu, limit))

    def usage(self) -> dict[int, types.Usage]:
        """What is used on each instance at this moment, by its generation."""
        return self._ask(calls.usage())

    def watch(self, after_revision: int | None = None) -> Iterator[types.Event]:
        """What happens from now on, or after a revision, as it happens; ends only by an error, or by `close`."""
        stream = self._connections.users.stub.Watch(calls.watch(after_revision))
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
        """Destroys the idle instances, of these GPUs or of all; answers which. For administrators."""
        return self._ask(calls.reclaim(gpus))

    def adopt(
        self, *uuids: str, gpus: Sequence[str | int] = (), everything: bool = False
    ) -> tuple[types.Instance, ...]:
        """Takes over foreign instances with these UUIDs, on these GPUs, or all; answers which. For administrators."""
        return self._ask(calls.adopt(uuids, gpus, everything=everything))

    def cordon(self, gpu: str | int, reason: str = "") -> types.Gpu:
        """Keeps new leases off a GPU. For administrators."""
        return self._ask(calls.cordon(gpu, reason))

    def uncordon(self, gpu: str | int) -> types.Gpu:
        """Allows new leases on a GPU again. For administrators."""
        return self._ask(calls.uncordon(gpu))

    def set_mig_mode(self, gpu: str | int, *, enable: bool) -> types.ModeChange:
        """Switches a GPU's MIG mode; refused while anything runs on it or is leased. For administrators."""
        return self._ask(calls.set_mig_mode(gpu, enable=enable))

    def pause(self, reason: str = "") -> types.Paused:
        """Has the agent grant nothing more and let go of the driver; leases stay. For administrators."""
        return self._ask(calls.pause(reason))

    def resume(self) -> types.Paused:
        """Takes an administrator's pause back. For administrators."""
        return self._ask(calls.resume())

    def _ask(self, call: Call[Answer]) -> Answer:
        connection = self._connections.of(call)
        ask = connection.call_safely_repeated if call.repeated else connection.call
        return call.read(ask(call.on))
