"""The agent's Python client: synchronous, typed, and safe to use from several threads."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

import grpc

from mig_agent.client import answers, reading
from mig_agent.client.addresses import Address, resolve
from mig_agent.client.channels import Tls
from mig_agent.client.connection import Connection
from mig_agent.client.errors import ClientError
from mig_agent.client.failures import failure_of
from mig_agent.client.holding import Holding, OnQueued, first_grant
from mig_agent.client.leases import Lease
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb

if TYPE_CHECKING:
    from mig_agent.client.asking import Asking

ANSWER_SECONDS = 60.0
"""How long a plain call may take."""
WORK_SECONDS = 240.0
"""How long a call may take that works on the hardware, waiting in the queue aside: the agent gives up long before."""
PATIENCE_SECONDS = 15.0
"""How long a call is repeated whose connection broke, as it does when the agent restarts."""


class Client:
    """Speaks with the agent of this node.

    >>> with Client() as client, client.lease(gpu_memory="4G") as lease:   # doctest: +SKIP
    ...     print(lease.devices[0].uuid)

    Nothing is connected before the first call. Every call raises UsageError for what cannot be meant, Refused when the
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

        TCP needs `tls`, taken from MIG_AGENT_TLS_CA, _CERT and _KEY when it is None. `patience`: for how many seconds
        to go on trying when the connection breaks.
        """
        self._tls = tls or Tls.from_environment()
        self._patience = patience
        place = address if isinstance(address, Address) else resolve(address)
        self._connection = Connection(place, self._tls, patience=patience)
        self._admin: Connection | None = None
        self._holdings: weakref.WeakSet[Holding] = weakref.WeakSet()

    @property
    def address(self) -> Address:
        """Where the agent is."""
        return self._connection.address

    def close(self) -> None:
        """Closes the connections. Leases that were taken with `lease` end."""
        for holding in tuple(self._holdings):
            holding.close()
        self._connection.close()
        if self._admin is not None and self._admin is not self._connection:
            self._admin.close()

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
        holding = Holding(self._connection, request_for(asking), on_lost=on_lost)
        grant = holding.open(on_queued)
        self._holdings.add(holding)
        return Lease(self, grant, holding)

    def acquire(self, *, on_queued: OnQueued | None = None, **asking: Unpack[Asking]) -> Lease:
        """Takes devices that stay leased when this process ends: until they are released, or `ttl` or `pid` says so.

        `on_queued` is called with the place in the queue (1 is next) while the request waits.
        """
        request = request_for(asking)
        timeout = _timeout(request)

        def take() -> answers.Grant:
            stream = self._connection.stub.Acquire(pb.AcquireRequest(request=request), timeout=timeout)
            return first_grant(stream, on_queued)

        return Lease(self, self._connection.call_safely_repeated(lambda _stub: take()))

    def release(self, lease: str, token: str = "") -> None:
        """Ends a lease. Without a token: for the user of this machine who asked for it, and for administrators."""
        connection = self._connection if token else self._for_admin()
        request = pb.ReleaseRequest(lease=lease, token=token)
        connection.call_safely_repeated(lambda stub: stub.Release(request, timeout=ANSWER_SECONDS))

    def renew(self, lease: str, token: str = "", *, ttl: str | float | None = None) -> answers.LeaseInfo:
        """Gives a lease a new deadline from now (`2h`, or seconds), or none. The token is needed as for `release`."""
        connection = self._connection if token else self._for_admin()
        request = pb.RenewRequest(lease=lease, token=token, ttl_seconds=seconds(ttl))
        answer = connection.call_safely_repeated(lambda stub: stub.Renew(request, timeout=ANSWER_SECONDS))
        return reading.lease(answer.lease)

    # ------------------------------------------------------------ looking

    def plan(self, *, explain: bool = False, **asking: Unpack[Asking]) -> answers.Plan | answers.NoPlan:
        """How a request would be served now, or why not; with `explain` also how that comes about. Changes nothing."""
        return self.plan_each([asking], explain=explain)[0]

    def plan_each(self, askings: Sequence[Asking], *, explain: bool = False) -> list[answers.Plan | answers.NoPlan]:
        """How each of several requests would be served now, each as though it came alone."""
        request = pb.PlanRequest(requests=[request_for(each) for each in askings], explain=explain)
        answer = self._connection.call_safely_repeated(lambda stub: stub.Plan(request, timeout=ANSWER_SECONDS))
        return [reading.outcome(each, answer.revision) for each in answer.outcomes]

    def status(self) -> answers.Status:
        """The node as it is: GPUs, instances, leases and the queue."""
        return reading.status(
            self._connection.call_safely_repeated(lambda stub: stub.Status(pb.StatusRequest(), timeout=ANSWER_SECONDS))
        )

    def profiles(self) -> tuple[answers.GpuModel, ...]:
        """What the node's GPUs can be cut into."""
        return reading.models(
            self._connection.call_safely_repeated(
                lambda stub: stub.Profiles(pb.ProfilesRequest(), timeout=ANSWER_SECONDS)
            )
        )

    def events(
        self, *, since: float | None = None, gpu: str | int | None = None, limit: int = 0
    ) -> tuple[answers.Event, ...]:
        """What happened since a moment (seconds since the epoch), oldest first; at most `limit`, the newest."""
        if limit < 0:
            raise ValueError("limit must not be negative")
        request = pb.EventsRequest(since=since, gpu="" if gpu is None else gpu_name(gpu), limit=limit)
        answer = self._connection.call_safely_repeated(lambda stub: stub.Events(request, timeout=ANSWER_SECONDS))
        return tuple(reading.event(each) for each in answer.events)

    def usage(self) -> dict[int, answers.Usage]:
        """What is used on each instance at this moment, by its generation."""
        answer = self._connection.call_safely_repeated(
            lambda stub: stub.Usage(pb.UsageRequest(), timeout=ANSWER_SECONDS)
        )
        return {each.generation: reading.usage(each) for each in answer.instances}

    def watch(self, after_revision: int | None = None) -> Iterator[answers.Event]:
        """What happens from now on, or after a revision, as it happens; ends only by an error, or by `close`."""
        stream = self._connection.stub.Watch(pb.WatchRequest(after_revision=after_revision))
        try:
            for answer in stream:
                if answer.HasField("event"):
                    yield reading.event(answer.event)
        except grpc.RpcError as error:
            raise failure_of(error, self.address) from error
        finally:
            stream.cancel()

    # ------------------------------------------------------------ administration

    def reclaim(self, *gpus: str | int) -> tuple[answers.Instance, ...]:
        """Destroys the idle instances, of these GPUs or of all; answers which. For administrators."""
        request = pb.ReclaimRequest(gpus=[gpu_name(each) for each in gpus])
        answer = self._for_admin().call(lambda stub: stub.Reclaim(request, timeout=WORK_SECONDS))
        return tuple(reading.instance(each) for each in answer.destroyed)

    def cordon(self, gpu: str | int, reason: str = "") -> answers.Gpu:
        """Keeps new leases off a GPU. For administrators."""
        return self._cordon(pb.CordonRequest(gpu=gpu_name(gpu), reason=reason))

    def uncordon(self, gpu: str | int) -> answers.Gpu:
        """Allows new leases on a GPU again. For administrators."""
        return self._cordon(pb.CordonRequest(gpu=gpu_name(gpu), uncordon=True))

    def set_mig_mode(self, gpu: str | int, *, enable: bool) -> answers.ModeChange:
        """Switches a GPU's MIG mode; refused while anything runs on it or is leased. For administrators."""
        mode = pb.MIG_MODE_TARGET_ENABLED if enable else pb.MIG_MODE_TARGET_DISABLED
        request = pb.SetMigModeRequest(gpu=gpu_name(gpu), mode=mode)
        return reading.mode_change(self._for_admin().call(lambda stub: stub.SetMigMode(request, timeout=WORK_SECONDS)))

    def _cordon(self, request: pb.CordonRequest) -> answers.Gpu:
        return reading.gpu(
            self._for_admin().call_safely_repeated(lambda stub: stub.Cordon(request, timeout=ANSWER_SECONDS)).gpu
        )

    def _for_admin(self) -> Connection:
        """To the administrators' socket where this person may open it; otherwise the agent refuses in words."""
        if self._admin is None:
            address = self.address.for_admin
            self._admin = (
                self._connection if address == self.address else Connection(address, self._tls, patience=self._patience)
            )
        return self._admin


def request_for(asking: Asking) -> pb.Request:
    """What is asked for, as a message. Raises UsageError."""
    # Only now: looking at a node, which has to be quick, needs none of what judges a request.
    from mig_agent.client import asking as judging  # noqa: PLC0415 -- see above

    return judging.request_for(asking)


def seconds(value: str | float | None) -> float | None:
    """A duration as text or seconds. Raises UsageError."""
    from mig_agent.client import asking as judging  # noqa: PLC0415 -- as above

    return judging.seconds(value)


def gpu_name(gpu: str | int) -> str:
    """An index or UUID as the API takes it. Raises UsageError."""
    from mig_agent.core.requests import parse_gpu  # noqa: PLC0415 -- as above

    return parse_gpu(str(gpu))


def _timeout(request: pb.Request) -> float | None:
    """Seconds for Acquire: the wait asked for, and the work."""
    if not request.HasField("wait_seconds"):
        return WORK_SECONDS
    return None if math.isinf(request.wait_seconds) else request.wait_seconds + WORK_SECONDS
