"""The API's methods as values: what is sent, how long it may take, how the answer is read. For both clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from google.protobuf.message import Message

from mig_agent.client import arg_checks, decode, types
from mig_agent.core.errors import UsageError
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb

if TYPE_CHECKING:
    from mig_agent.client.request_args import Asking

ANSWER_SECONDS = 60.0
"""How long a plain call may take."""
WORK_SECONDS = 240.0
"""How long a call may take that works on the hardware, waiting in the queue aside: the agent gives up long before."""

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[Answer]):
    """One call of a method that answers once."""

    method: str
    """Its name in the service."""
    request: Message
    read: Callable[[Any], Answer]
    """From the method's message to what the caller gets."""
    seconds: float = ANSWER_SECONDS
    for_admin: bool = False
    """On the administrators' socket where this person may open it; otherwise the agent refuses in words."""
    repeated: bool = True
    """Whether it does no harm when it is done twice, and so is repeated while the connection breaks."""

    def on(self, stub: object) -> Any:  # noqa: ANN401 -- an answer, or with an asynchronous stub what gives one
        """Calls it."""
        return getattr(stub, self.method)(self.request, timeout=self.seconds)


def release(lease: str, token: str, *, force: bool = False) -> Call[None]:
    """Ends a lease. Raises UsageError."""
    _check_lease(lease, token)
    return Call(
        method="Release",
        request=pb.ReleaseRequest(lease=lease, token=token, force=force),
        read=_nothing,
        for_admin=force or not token,
    )


def renew(lease: str, token: str, ttl: str | float | None) -> Call[types.LeaseInfo]:
    """Gives a lease a new deadline, or none. Raises UsageError."""
    _check_lease(lease, token)
    return Call(
        method="Renew",
        request=pb.RenewRequest(lease=lease, token=token, ttl_seconds=_seconds(ttl)),
        read=lambda answer: decode.lease(answer.lease),
        for_admin=not token,
    )


def recover(lease: str, token: str) -> Call[types.Recovered]:
    """Makes a lease of before again. Raises UsageError."""
    _check_lease(lease, token)
    if not token:
        raise UsageError(f"cannot recover lease {lease} without its token", "give the token that came with it")
    return Call(
        method="Recover",
        request=pb.RecoverRequest(lease=lease, token=token),
        read=decode.recovered,
        seconds=WORK_SECONDS,
    )


def plan_each(askings: Sequence[Asking], *, explain: bool) -> Call[list[types.Plan | types.NoPlan]]:
    """How each of several requests would be served. Raises UsageError."""
    return Call(
        method="Plan",
        request=pb.PlanRequest(requests=[request_for(each) for each in askings], explain=explain),
        read=lambda answer: [decode.outcome(each, answer.revision) for each in answer.outcomes],
    )


def status() -> Call[types.Status]:
    """The node."""
    return Call(method="Status", request=pb.StatusRequest(), read=decode.status)


def profiles() -> Call[tuple[types.GpuModel, ...]]:
    """What the GPUs can be cut into."""
    return Call(method="Profiles", request=pb.ProfilesRequest(), read=decode.models)


def events(since: float | None, gpu: str | int | None, limit: int) -> Call[tuple[types.Event, ...]]:
    """What happened. Raises UsageError."""
    arg_checks.MOMENT.check("since", since)
    arg_checks.check_count("limit", limit)
    return Call(
        method="Events",
        request=pb.EventsRequest(since=since, gpu="" if gpu is None else _gpu_name(gpu), limit=limit),
        read=lambda answer: tuple(decode.event(each) for each in answer.events),
    )


def usage() -> Call[dict[int, types.Usage]]:
    """What is used on each instance."""
    return Call(
        method="Usage",
        request=pb.UsageRequest(),
        read=lambda answer: {each.generation: decode.usage(each) for each in answer.instances},
    )


def reclaim(gpus: Sequence[str | int]) -> Call[tuple[types.Instance, ...]]:
    """Destroys the idle instances. Raises UsageError."""
    return Call(
        method="Reclaim",
        request=pb.ReclaimRequest(gpus=[_gpu_name(each) for each in gpus]),
        read=lambda answer: tuple(decode.instance(each) for each in answer.destroyed),
        seconds=WORK_SECONDS,
        for_admin=True,
        repeated=False,
    )


def adopt(uuids: Sequence[str], gpus: Sequence[str | int], *, everything: bool) -> Call[tuple[types.Instance, ...]]:
    """Adopts foreign instances. Raises UsageError."""
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
    """Keeps new leases off a GPU. Raises UsageError."""
    arg_checks.TEXT.check("reason", reason)
    return _cordon(pb.CordonRequest(gpu=_gpu_name(gpu), reason=reason))


def uncordon(gpu: str | int) -> Call[types.Gpu]:
    """Allows new leases on a GPU again. Raises UsageError."""
    return _cordon(pb.CordonRequest(gpu=_gpu_name(gpu), uncordon=True))


def set_mig_mode(gpu: str | int, *, enable: bool) -> Call[types.ModeChange]:
    """Switches a GPU's MIG mode. Raises UsageError."""
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
    """Has the agent grant nothing more and let go of the driver. Raises UsageError."""
    arg_checks.TEXT.check("reason", reason)
    return Call(
        method="Pause",
        request=pb.PauseRequest(reason=reason),
        read=decode.paused,
        seconds=WORK_SECONDS,
        for_admin=True,
    )


def resume() -> Call[types.Paused]:
    """Takes an administrator's pause back."""
    return Call(method="Resume", request=pb.ResumeRequest(), read=decode.paused, seconds=WORK_SECONDS, for_admin=True)


def watch(after_revision: int | None) -> pb.WatchRequest:
    """What happens after a revision, or from now on; its answers are a stream. Raises UsageError."""
    arg_checks.check_revision("after_revision", after_revision)
    return pb.WatchRequest(after_revision=after_revision)


def request_for(asking: Asking) -> pb.Request:
    """What is asked for, as a message. Raises UsageError."""
    # Only now: looking at a node, which has to be quick, needs none of what judges a request.
    from mig_agent.client import request_args as judging  # noqa: PLC0415 -- see above

    return judging.request_for(asking)


def acquire_seconds(request: pb.Request) -> float | None:
    """How long Acquire may take: the wait asked for, and the work. None: as long as the caller stays."""
    if not request.HasField("wait_seconds"):
        return WORK_SECONDS
    return None if math.isinf(request.wait_seconds) else request.wait_seconds + WORK_SECONDS


def _cordon(request: pb.CordonRequest) -> Call[types.Gpu]:
    return Call(method="Cordon", request=request, read=lambda answer: decode.gpu(answer.gpu), for_admin=True)


def _nothing(_answer: Message) -> None:
    return None


def _check_lease(lease: str, token: str) -> None:
    arg_checks.TEXT.check("lease", lease)
    arg_checks.TEXT.check("token", token)


def _seconds(value: str | float | None) -> float | None:
    """A duration as text or seconds."""
    from mig_agent.client import request_args as judging  # noqa: PLC0415 -- as above

    return judging.seconds(value)


def _gpu_name(gpu: str | int) -> str:
    """An index or UUID as the API takes it."""
    from mig_agent.core.requests import parse_gpu  # noqa: PLC0415 -- as above

    return parse_gpu(str(gpu))
