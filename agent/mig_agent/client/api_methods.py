"""The API's methods as values for both clients: what to send, the time limit, how to read the answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from google.protobuf.message import Message

from mig_agent.client import arg_checks, decode, types
from mig_agent.core.errors import UsageError
from mig_agent.core.quantities import shown
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb

if TYPE_CHECKING:
    from mig_agent.client.request_args import RequestArgs

ANSWER_SECONDS = 60.0
"""Time limit of a plain call."""
WORK_SECONDS = 240.0
"""Time limit of a call that works on the hardware, without its wait in the queue: the agent gives up long before."""

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[Answer]):
    """One call of a method with a single answer."""

    method: str
    """The method's name in the service."""
    request: Message
    read: Callable[[Any], Answer]
    """Converts the method's message to the caller's value."""
    seconds: float = ANSWER_SECONDS
    for_admin: bool = False
    """True if it goes to the administrators' socket if this user may open it; otherwise the agent refuses."""
    repeated: bool = True
    """True if it is safe to repeat, and so repeated while the connection breaks."""

    def on(self, stub: object) -> Any:  # noqa: ANN401 -- an answer, or with an asynchronous stub what gives one
        """Call the method."""
        return getattr(stub, self.method)(self.request, timeout=self.seconds)


def release(lease: types.LeaseRef, token: str, *, force: bool = False) -> Call[None]:
    """Return the call that ends a lease. Raises UsageError."""
    name, token = _id_and_token(lease, token)
    return Call(
        method="Release",
        request=pb.ReleaseRequest(lease=name, token=token, force=force),
        read=_nothing,
        for_admin=force or not token,
    )


def cancel(request: str | types.Waiting, *, mine: bool, reason: str) -> Call[tuple[types.Waiting, ...]]:
    """Return the call that takes waiting requests out of the queue. Raises UsageError."""
    arg_checks.WAITING.check("request_id", request)
    arg_checks.TEXT.check("reason", reason)
    if isinstance(request, types.Waiting) and not request.request_id:
        raise UsageError(
            f"cannot cancel the request of {request.holder}: its id is not known",
            "the agent tells it to its caller and to administrators",
        )
    request_id, caller = (request, "") if isinstance(request, str) else (request.request_id, request.caller)
    if mine == bool(request_id):
        raise UsageError("cannot tell which request to cancel", "give the id of a waiting request, or say mine")
    return Call(
        method="Cancel",
        request=pb.CancelRequest(request_id=request_id, mine=mine, reason=reason, caller=caller),
        read=lambda answer: tuple(decode.waiting(each) for each in answer.cancelled),
        # An administrator may cancel any request, but has own ones only on the socket on which they were made.
        for_admin=not mine,
        repeated=mine,
    )


def renew(lease: types.LeaseRef, token: str, ttl: str | float | None) -> Call[types.LeaseInfo]:
    """Return the call that sets a lease's deadline; None and `none` remove it. Raises UsageError."""
    name, token = _id_and_token(lease, token)
    return Call(
        method="Renew",
        request=pb.RenewRequest(lease=name, token=token, ttl_seconds=_new_deadline(ttl)),
        read=lambda answer: decode.lease(answer.lease),
        for_admin=not token,
    )


def recover(lease: types.LeaseRef, token: str) -> Call[types.Recovered]:
    """Return the call that restores a lease of a lost ledger. Raises UsageError."""
    name, token = _id_and_token(lease, token)
    if not token:
        raise UsageError(f"cannot recover lease {shown(name)} without its token", "give the token that came with it")
    return Call(
        method="Recover",
        request=pb.RecoverRequest(lease=name, token=token),
        read=decode.recovered,
        seconds=WORK_SECONDS,
    )


def plan_each(
    args_list: Sequence[RequestArgs], *, explain: bool, estimate: bool = False
) -> Call[list[types.Plan | types.NoPlan]]:
    """Return the call that plans several requests. Raises UsageError."""
    return Call(
        method="Plan",
        request=pb.PlanRequest(requests=[request_for(each) for each in args_list], explain=explain, estimate=estimate),
        read=lambda answer: [decode.outcome(each, answer.revision) for each in answer.outcomes],
    )


def record_plans(args_list: Sequence[RequestArgs]) -> Call[str]:
    """Return the call that plans requests and records what the plans depend on. Raises UsageError."""
    return Call(
        method="Plan",
        request=pb.PlanRequest(requests=[request_for(each) for each in args_list], record=True),
        read=lambda answer: str(answer.recording),
    )


def status() -> Call[types.Status]:
    """Return the call for the node's state."""
    return Call(method="Status", request=pb.StatusRequest(), read=decode.status)


def profiles() -> Call[tuple[types.GpuModel, ...]]:
    """Return the call for the GPUs' profiles."""
    return Call(method="Profiles", request=pb.ProfilesRequest(), read=decode.models)


def events(
    since: float | None, gpu: str | int | None, limit: int, lease: types.LeaseRef, *, before: int = 0
) -> Call[types.EventPage]:
    """Return the call for one page of past events, the newest or those before a number. Raises UsageError."""
    arg_checks.MOMENT.check("since", since)
    arg_checks.check_count("limit", limit)
    arg_checks.LEASE.check("lease", lease)
    chosen = "" if gpu is None else _gpu_name(gpu)
    return Call(
        method="Events",
        request=pb.EventsRequest(since=since, gpu=chosen, limit=limit, before=before, lease=_id_of(lease)),
        read=decode.event_page,
    )


def event_pages(
    since: float | None, gpu: str | int | None, limit: int, lease: types.LeaseRef
) -> Generator[Call[types.EventPage], types.EventPage, types.EventPage]:
    """Yield the calls that read up to `limit` events, page by page, and return all of them. Raises UsageError.

    Each page is sent in as the value of its `yield`. A limit of 0 reads what the agent gives at once.
    """
    page = yield events(since, gpu, limit, lease)
    found = page.events
    # An older agent does not number its events, and tells nothing of earlier ones.
    while page.events and page.events[0].number and page.earlier and len(found) < limit:
        # By its id: a name may mean a later lease by now.
        lease = page.events[0].lease if _id_of(lease) else ""
        page = yield events(since, gpu, limit - len(found), lease, before=page.events[0].number)
        found = page.events + found
    return types.EventPage(events=found, earlier=page.earlier)


def usage() -> Call[dict[int, types.Usage]]:
    """Return the call for the usage of each instance."""
    return Call(
        method="Usage",
        request=pb.UsageRequest(),
        read=lambda answer: {each.generation: decode.usage(each) for each in answer.instances},
    )


ACCOUNTING_KEYS: Final = MappingProxyType(
    {
        "user": pb.ACCOUNTING_KEY_USER,
        "tenant": pb.ACCOUNTING_KEY_TENANT,
        "name": pb.ACCOUNTING_KEY_NAME,
        "profile": pb.ACCOUNTING_KEY_PROFILE,
    }
)
"""The keys by which accounting can be grouped."""


def account(by: str, since: float | None, until: float | None) -> Call[types.Account]:
    """Return the call for who leased how much. Raises UsageError."""
    key = ACCOUNTING_KEYS.get(by)
    if key is None:
        raise UsageError(f"cannot group by {shown(str(by))}", f"by is one of {', '.join(ACCOUNTING_KEYS)}")
    arg_checks.MOMENT.check("since", since)
    arg_checks.MOMENT.check("until", until)
    return Call(
        method="Accounting",
        request=pb.AccountingRequest(since=since, until=until, by=key),
        read=decode.account,
        for_admin=True,
    )


def advise(name: str, since: float | None) -> Call[tuple[types.Advice, ...]]:
    """Return the call for what to ask for instead. Raises UsageError."""
    arg_checks.TEXT.check("name", name)
    arg_checks.MOMENT.check("since", since)
    return Call(
        method="Advise",
        request=pb.AdviseRequest(name=name, since=since),
        read=lambda answer: tuple(decode.advice(each) for each in answer.advice),
        seconds=WORK_SECONDS,
        for_admin=True,
    )


def reclaim(gpus: Sequence[str | int]) -> Call[tuple[types.Instance, ...]]:
    """Return the call that destroys idle instances. Raises UsageError."""
    return Call(
        method="Reclaim",
        request=pb.ReclaimRequest(gpus=[_gpu_name(each) for each in gpus]),
        read=lambda answer: tuple(decode.instance(each) for each in answer.destroyed),
        seconds=WORK_SECONDS,
        for_admin=True,
        repeated=False,
    )


def adopt(uuids: Sequence[str], gpus: Sequence[str | int], *, everything: bool) -> Call[tuple[types.Instance, ...]]:
    """Return the call that adopts foreign instances. Raises UsageError."""
    for each in uuids:
        arg_checks.TEXT.check("uuid", each)
    if not (uuids or gpus or everything):
        raise UsageError("cannot adopt without being told what", "name UUIDs or GPUs, or say all")
    return Call(
        method="Adopt",
        request=pb.AdoptRequest(gpus=[_gpu_name(each) for each in gpus], uuids=uuids, all=everything),
        read=lambda answer: tuple(decode.instance(each) for each in answer.adopted),
        seconds=WORK_SECONDS,
        for_admin=True,
        repeated=False,
    )


def cordon(gpu: str | int, reason: str) -> Call[types.Gpu]:
    """Return the call that keeps new leases off a GPU. Raises UsageError."""
    arg_checks.TEXT.check("reason", reason)
    return _cordon(pb.CordonRequest(gpu=_gpu_name(gpu), reason=reason))


def uncordon(gpu: str | int) -> Call[types.Gpu]:
    """Return the call that allows new leases on a GPU again. Raises UsageError."""
    return _cordon(pb.CordonRequest(gpu=_gpu_name(gpu), uncordon=True))


def drain(gpus: Sequence[str | int], deadline: str | float | None, reason: str) -> Call[types.Drained]:
    """Return the call that cordons GPUs so that they become empty. Raises UsageError."""
    arg_checks.TEXT.check("reason", reason)
    names = [_gpu_name(each) for each in gpus]
    return Call(
        method="Drain",
        request=pb.DrainRequest(gpus=names, deadline_seconds=_seconds(deadline), reason=reason),
        read=decode.drained,
        for_admin=True,
    )


def undrain(gpus: Sequence[str | int]) -> Call[tuple[types.Gpu, ...]]:
    """Return the call that ends the draining of GPUs. Raises UsageError."""
    return Call(
        method="Drain",
        request=pb.DrainRequest(gpus=[_gpu_name(each) for each in gpus], undrain=True),
        read=lambda answer: tuple(decode.gpu(each) for each in answer.gpus),
        for_admin=True,
    )


def set_mig_mode(gpu: str | int, *, enable: bool) -> Call[types.ModeChange]:
    """Return the call that switches a GPU's MIG mode. Raises UsageError."""
    mode = pb.MIG_MODE_TARGET_ENABLED if enable else pb.MIG_MODE_TARGET_DISABLED
    return Call(
        method="SetMigMode",
        request=pb.SetMigModeRequest(gpu=_gpu_name(gpu), mode=mode),
        read=decode.mode_change,
        seconds=WORK_SECONDS,
        for_admin=True,
        repeated=False,
    )


def pause(reason: str) -> Call[types.Paused]:
    """Return the call that pauses the agent and releases the driver. Raises UsageError."""
    arg_checks.TEXT.check("reason", reason)
    return Call(
        method="Pause",
        request=pb.PauseRequest(reason=reason),
        read=decode.paused,
        seconds=WORK_SECONDS,
        for_admin=True,
    )


def resume() -> Call[types.Paused]:
    """Return the call that ends an administrator's pause."""
    return Call(method="Resume", request=pb.ResumeRequest(), read=decode.paused, seconds=WORK_SECONDS, for_admin=True)


def watch(after_revision: int | None) -> pb.WatchRequest:
    """Return the request for a stream of events, after a revision or from now on. Raises UsageError."""
    arg_checks.check_revision("after_revision", after_revision)
    return pb.WatchRequest(after_revision=after_revision)


def request_for(args: RequestArgs) -> pb.Request:
    """Return a request as a message. Raises UsageError."""
    # Imported here: reading a node's state, which has to be quick, needs no checks of requests.
    from mig_agent.client import request_args  # noqa: PLC0415 -- see above

    return request_args.request_for(args)


def acquire_seconds(request: pb.Request) -> float | None:
    """Return the time limit of Acquire: the requested wait, and the work. None: until the caller gives up."""
    if not request.HasField("wait_seconds"):
        return WORK_SECONDS
    return None if math.isinf(request.wait_seconds) else request.wait_seconds + WORK_SECONDS


def _cordon(request: pb.CordonRequest) -> Call[types.Gpu]:
    return Call(method="Cordon", request=request, read=lambda answer: decode.gpu(answer.gpu), for_admin=True)


def _nothing(_answer: Message) -> None:
    return None


def _id_of(lease: types.LeaseRef) -> str:
    return lease if isinstance(lease, str) else lease.id


def _id_and_token(lease: types.LeaseRef, token: str) -> tuple[str, str]:
    """Return a lease's id and token: the one that is given, else the one that comes with it. Raises UsageError."""
    arg_checks.LEASE.check("lease", lease)
    arg_checks.TEXT.check("token", token)
    return _id_of(lease), token or (lease.token if isinstance(lease, types.Grant) else "")


def _new_deadline(ttl: str | float | None) -> float | None:
    """Return in how many seconds a renewed lease ends; None for no deadline, which is written `none`, too."""
    if isinstance(ttl, str) and ttl.strip().lower() == "none":
        return None
    seconds = _seconds(ttl)
    if seconds is not None and math.isinf(seconds):
        raise UsageError(f"cannot take {shown(str(ttl))} as a deadline", "none removes the deadline")
    return seconds


def _seconds(value: str | float | None) -> float | None:
    """Return a duration, given as text or seconds, in seconds."""
    from mig_agent.client import request_args  # noqa: PLC0415 -- as above

    return request_args.seconds(value)


def _gpu_name(gpu: str | int) -> str:
    """Return an index or UUID as the API takes it."""
    from mig_agent.core.requests import parse_gpu  # noqa: PLC0415 -- as above

    return parse_gpu(str(gpu))
