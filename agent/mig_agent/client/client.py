"""The agent's Python client: synchronous, typed, and safe to use from several threads."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import grpc

from mig_agent.client import api_methods, decode, types
from mig_agent.client.absence import OnAway
from mig_agent.client.acquire_stream import Acquiring
from mig_agent.client.addresses import Address
from mig_agent.client.api_methods import Answer, Call
from mig_agent.client.channels import Tls
from mig_agent.client.connection import PATIENCE_SECONDS, Connection, Connections
from mig_agent.client.error_mapping import failure_of
from mig_agent.client.errors import ClientError
from mig_agent.client.hold_stream import Holding, OnQueued
from mig_agent.client.leases import Lease, without_client
from mig_agent.client.waiting import Waiting

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack  # noqa: UP035 -- mig-agent-client is also for Python 3.10

    from mig_agent.client.request_args import RequestArgs


class Client:
    """A client of this node's agent.

    >>> with Client() as client, client.lease(gpu_memory="4G") as lease:   # doctest: +SKIP
    ...     print(lease.devices[0].uuid)

    Nothing is connected before the first call. Every call raises UsageError for an argument that is invalid on every
    node, Refused when the agent refuses, and NoAgent when none answers; all three are MigAgentErrors.
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
        """Close the connections. Leases taken with `lease` end 5 s later. Raises nothing."""
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
        on_away: OnAway | None = None,
        **args: Unpack[RequestArgs],
    ) -> Lease:
        """Lease devices for the life of this process, or until `release` or the end of the `with` block.

        `on_queued` is called with a `QueuePosition` (1 is next) while the request waits. `on_lost` is called
        from another thread when the lease ends for another reason, such as a deadline or an administrator. The lease
        outlives an agent that is away, however long: `on_away` is called with the reason once it cannot be reached for
        longer than a restart takes, and with None when it is back, before the grant on the caller's thread and later
        from another one. A request that waits is sent again then, within its `wait`. Raises Refused, NoAgent, and
        UsageError.
        """
        holding = Holding(self._connections.users, api_methods.request_for(args), on_lost=on_lost, on_away=on_away)
        grant = holding.open(on_queued)
        self._holdings.add(holding)
        return Lease(self, grant, holding)

    def acquire(
        self,
        *,
        on_queued: OnQueued | None = None,
        on_away: OnAway | None = None,
        confirm: bool = True,
        **args: Unpack[RequestArgs],
    ) -> Lease:
        """Lease devices beyond the life of this process: until they are released, or `ttl` or `pid` ends the lease.

        `on_queued` is called with a `QueuePosition` (1 is next) while the request waits, and `on_away` as by
        `lease`. With `confirm=False` the lease ends after the grace period (60 s) unless its `confirm` is called: for a
        caller that has to record it first. Raises Refused, NoAgent, and UsageError.
        """
        acquiring = Acquiring(self._connections.users, args)
        waiting = Waiting(self._connections.users, args.get("wait"), on_queued, on_away)
        while True:
            try:
                grant = acquiring.take(waiting.report, confirm=confirm)
            except ClientError as error:
                time.sleep(waiting.pause_after(error))
                continue
            waiting.over()
            return Lease(self, grant, acquiring=None if confirm else acquiring)

    def release(self, lease: types.LeaseRef | Lease, token: str = "", *, force: bool = False) -> None:
        """End a lease, given by its id, as a Lease, or as `status` tells it.

        Without a token: only for the user of this machine who requested it, and for administrators. With `force`, for
        administrators, also one bound to a pod on this node that does not use it. Raises Refused (such as
        `wrong-token`, `unknown-lease`), NoAgent, and UsageError.
        """
        if isinstance(lease, Lease) and not (token or force):
            lease.release()
        else:
            self._call(api_methods.release(without_client(lease), token, force=force))

    def cancel(
        self, request_id: str | types.Waiting = "", *, mine: bool = False, reason: str = ""
    ) -> tuple[types.Waiting, ...]:
        """Take a waiting request out of the queue by its id or a unique beginning of it, or with `mine` all of yours.

        The client that waits is refused and told who cancelled it. Administrators may cancel any request: two users'
        requests may have the same id, then give the one of `Status.queue` that is meant.
        Raises Refused (such as `unknown-request`), NoAgent, and UsageError.
        """
        return self._call(api_methods.cancel(request_id, mine=mine, reason=reason))

    def renew(self, lease: types.LeaseRef | Lease, token: str = "", *, ttl: str | float | None) -> types.LeaseInfo:
        """Set a new deadline, `2h` or seconds from now; None removes it. Lease and token are given as to `release`.

        Raises Refused (such as `lease-ended`), NoAgent, and UsageError.
        """
        if isinstance(lease, Lease) and not token:
            return lease.renew(ttl)
        return self._call(api_methods.renew(without_client(lease), token, ttl))

    def recover(self, lease: types.LeaseRef | Lease, token: str = "") -> types.Recovered:
        """Restore a lease that was active when the agent's ledger was lost: the same id, token and devices.

        It lasts until it is released, or until its deadline. Recovering it again changes nothing. A Lease or a Grant
        has the token; with an id it is given, too. Raises Refused, NoAgent, and UsageError.
        """
        return self._call(api_methods.recover(without_client(lease), token))

    # ------------------------------------------------------------ reading

    def plan(
        self, *, explain: bool = False, estimate: bool = False, **args: Unpack[RequestArgs]
    ) -> types.Plan | types.NoPlan:
        """Return how a request would be served now, or why not; with `explain` also why so. Changes nothing.

        With `estimate` a refusal says when the request would be likely to start if it waited, which takes longer.
        A request that would be refused gives a NoPlan. Raises NoAgent, UsageError, and Refused if the agent cannot
        plan.
        """
        return self.plan_each([args], explain=explain, estimate=estimate)[0]

    def plan_each(
        self, args_list: Sequence[RequestArgs], *, explain: bool = False, estimate: bool = False
    ) -> list[types.Plan | types.NoPlan]:
        """Return how each of several requests would be served now, each as if it came alone.

        With `estimate`, as in `plan`: only the first few refusals get one. Raises NoAgent, UsageError, and Refused if
        the agent cannot plan.
        """
        return self._call(api_methods.plan_each(args_list, explain=explain, estimate=estimate))

    def record_plans(self, args_list: Sequence[RequestArgs] = ()) -> str:
        """Return the plans of these requests and of those that wait, with everything that they depend on, as JSON.

        `mig-agent replay` reads it. Empty from an agent that cannot record. Changes nothing. Raises Refused, NoAgent,
        and UsageError.
        """
        return self._call(api_methods.record_plans(args_list))

    def status(self) -> types.Status:
        """Return the node's state: GPUs, instances, leases, the queue and what fits now.

        Raises NoAgent, and Refused without a role.
        """
        return self._call(api_methods.status())

    def profiles(self) -> tuple[types.GpuModel, ...]:
        """Return the profiles that the node's GPUs offer. Raises NoAgent, and Refused without a role."""
        return self._call(api_methods.profiles())

    def events(
        self,
        *,
        since: float | None = None,
        gpu: str | int | None = None,
        limit: int = 0,
        lease: types.LeaseRef | Lease = "",
    ) -> tuple[types.Event, ...]:
        """Return events since a time (seconds since the epoch), oldest first; at most `limit`, the newest.

        Of one GPU or one lease where these are given: a lease by its id, or the latest of a name. A limit of 0 is what
        the agent gives at once (1000). The agent keeps the newest 10,000 events. Raises Refused, NoAgent, and
        UsageError.
        """
        return self.event_page(since=since, gpu=gpu, limit=limit, lease=lease).events

    def event_page(
        self,
        *,
        since: float | None = None,
        gpu: str | int | None = None,
        limit: int = 0,
        lease: types.LeaseRef | Lease = "",
    ) -> types.EventPage:
        """Return what `events` returns, with the number of earlier events that match and were left out.

        Raises Refused, NoAgent, and UsageError.
        """
        pages = api_methods.event_pages(since, gpu, limit, without_client(lease))
        call = next(pages)
        while True:
            try:
                call = pages.send(self._call(call))
            except StopIteration as end:
                found: types.EventPage = end.value
                return found

    def usage(self) -> dict[int, types.Usage]:
        """Return the present usage of each instance, by its generation. Raises NoAgent, and Refused without a role."""
        return self._call(api_methods.usage())

    def account(self, by: str = "tenant", *, since: float | None = None, until: float | None = None) -> types.Account:
        """Return who leased how much in a period (seconds since the epoch), by user, tenant, name or profile.

        Names of other users' leases are counted under their users, unless an administrator asks. Raises Refused,
        NoAgent, and UsageError.
        """
        return self._call(api_methods.account(by, since, until))

    def advise(self, name: str = "", *, since: float | None = None) -> tuple[types.Advice, ...]:
        """Return what leases of a name, or of all names, asked for against what they used: own leases only.

        Administrators and schedulers get advice on everybody's. Raises Refused, NoAgent, and UsageError.
        """
        return self._call(api_methods.advise(name, since))

    def watch(self, after_revision: int | None = None) -> Iterator[types.Event]:
        """Yield events as they happen, from now on or after a revision; ends only by an error, or by `close`.

        Raises NoAgent when the connection ends, Refused (such as `revision-changed` for a revision that is too long
        ago), and UsageError.
        """
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
        """Destroy idle instances on these GPUs, or on all; return them. For administrators.

        Raises Refused, NoAgent, and UsageError.
        """
        return self._call(api_methods.reclaim(gpus))

    def adopt(
        self, *uuids: str, gpus: Sequence[str | int] = (), everything: bool = False
    ) -> tuple[types.Instance, ...]:
        """Adopt foreign instances with these UUIDs, on these GPUs, or all; return them. For administrators.

        Raises Refused, NoAgent, and UsageError.
        """
        return self._call(api_methods.adopt(uuids, gpus, everything=everything))

    def cordon(self, gpu: str | int, reason: str = "") -> types.Gpu:
        """Keep new leases off a GPU. For administrators. Raises Refused, NoAgent, and UsageError."""
        return self._call(api_methods.cordon(gpu, reason))

    def uncordon(self, gpu: str | int) -> types.Gpu:
        """Allow new leases on a GPU again. For administrators. Raises Refused, NoAgent, and UsageError."""
        return self._call(api_methods.uncordon(gpu))

    def drain(self, *gpus: str | int, deadline: str | float | None = None, reason: str = "") -> types.Drained:
        """Cordon GPUs, or all, so that they become empty; what is leased ends by itself, or after `deadline` (`2h`).

        For administrators. The leases of pods on this node never end by this: evict the pods. Raises Refused, NoAgent,
        and UsageError.
        """
        return self._call(api_methods.drain(gpus, deadline, reason))

    def undrain(self, *gpus: str | int) -> tuple[types.Gpu, ...]:
        """End the draining of GPUs, or of all, and allow new leases there again. For administrators.

        Raises Refused, NoAgent, and UsageError.
        """
        return self._call(api_methods.undrain(gpus))

    def set_mig_mode(self, gpu: str | int, *, enable: bool) -> types.ModeChange:
        """Switch a GPU's MIG mode; refused while anything runs on it or is leased. For administrators.

        Raises Refused (such as `in-use`), NoAgent, and UsageError.
        """
        return self._call(api_methods.set_mig_mode(gpu, enable=enable))

    def pause(self, reason: str = "") -> types.Paused:
        """Make the agent grant nothing more and release the driver; leases stay. For administrators.

        Raises Refused, NoAgent, and UsageError.
        """
        return self._call(api_methods.pause(reason))

    def resume(self) -> types.Paused:
        """End an administrator's pause. For administrators. Raises Refused, and NoAgent."""
        return self._call(api_methods.resume())

    def _call(self, call: Call[Answer]) -> Answer:
        connection = self._connections.of(call)
        call_method = connection.call_safely_repeated if call.repeated else connection.call
        return call.read(call_method(call.on))
