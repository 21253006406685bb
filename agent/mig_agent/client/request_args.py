"""What a caller asks for, from texts as people write them to a message. What cannot be meant raises UsageError."""

from __future__ import annotations

import difflib
import getpass
import math
import uuid
from collections.abc import Sequence
from typing import TypedDict

from mig_agent.client import arg_checks, types
from mig_agent.core import requests
from mig_agent.core.errors import UsageError
from mig_agent.core.model import Holder, Request, RequestId, Want
from mig_agent.core.owner import Pod, PodOwner
from mig_agent.core.quantities import parse_duration, shown
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb

FOREVER = math.inf
"""For `wait`: as long as the caller stays."""


class Asking(TypedDict, total=False):
    """What may be asked for. Exactly one of `gpu_memory`, `mig_profile`, `gpu_fraction`, `num_gpus` and `devices`."""

    gpu_memory: str | None
    """One device with at least so much memory: `4G`, `9.5Gi`."""
    mig_profile: str | None
    """One device of exactly this profile: `2g.10gb`."""
    gpu_fraction: str | float | None
    """One device with at least this share of a GPU's memory slices: above 0, up to 1."""
    num_gpus: int | None
    """So many whole GPUs."""
    devices: Sequence[str]
    """Several devices at once, all or nothing, each a profile, a quantity of memory, or `whole`."""
    min_compute: int | None
    """At least so many compute slices, where memory or a fraction is asked for."""
    attributes: Sequence[str]
    """Profiles with these attributes may serve, where memory or a fraction is asked for: `+me`, `+gfx`."""
    gpus: Sequence[str | int]
    """Only these GPUs, each by index or UUID."""
    wait: str | float | None
    """How long to queue, as text (`10m`, `forever`) or seconds. None: be refused at once."""
    priority: int
    """Higher goes first in the queue."""
    ttl: str | float | None
    """The lease ends after so long unless it is renewed, as text (`2h`) or seconds. None: no deadline."""
    pid: int | None
    """The lease ends when this process ends."""
    request_id: str | None
    """Repeats an earlier request: the same id gives the same lease. None: a new one."""
    tenant: str
    """The account that it counts for."""
    name: str | None
    """Who holds it, for messages. None: the login name, or the pod's."""
    pod: types.Pod | None
    """The pod of Kubernetes that it is taken for, which is to run on that node; for administrators and schedulers. The
    lease is released and renewed by its token, and ends at `ttl`, until the pod has come; from then on it ends with
    the pod, and by nobody else."""
    if_revision: int | None
    """Be refused when the node has changed since this revision."""


def request_for(asking: Asking) -> pb.Request:
    """The request as a message, with a request id. Raises UsageError for what cannot be meant, whatever the node."""
    _check_arguments(asking)
    gpus = tuple(requests.parse_gpu(str(each)) for each in asking.get("gpus", ()))
    request = Request(
        wants=_wants(asking),
        request_id=RequestId(asking.get("request_id") or uuid.uuid4().hex),
        holder=_holder(asking),
        gpus=gpus,
        priority=asking.get("priority", 0),
        wait_seconds=seconds(asking.get("wait")),
        ttl_seconds=seconds(asking.get("ttl")),
        owner=requests.owner_for(_pod(asking), asking.get("pid")),
        if_revision=asking.get("if_revision"),
    )
    requests.validate(request)
    return _message(request)


def _check_arguments(asking: Asking) -> None:
    unknown = sorted(set(asking) - set(Asking.__annotations__))
    if unknown:
        close = difflib.get_close_matches(unknown[0], Asking.__annotations__, 1)
        hint = f"do you mean {close[0]}?" if close else f"there is {', '.join(Asking.__annotations__)}"
        raise UsageError(f"cannot ask with {shown(unknown[0])}: there is no such argument", hint)
    for name, value in asking.items():
        arg_checks.ASKING[name].check(name, value)
    arg_checks.check_revision("if_revision", asking.get("if_revision"))


def seconds(value: str | float | None) -> float | None:
    """A duration as text (`90s`, `10m`, `forever`) or seconds; None stays None. Raises UsageError."""
    arg_checks.DURATION.check("a duration", value)
    if isinstance(value, str):
        return FOREVER if value.strip().lower() == "forever" else parse_duration(value)
    return value


def _wants(asking: Asking) -> tuple[Want, ...]:
    given = {
        "--gpu-memory": asking.get("gpu_memory"),
        "--mig-profile": asking.get("mig_profile"),
        "--gpu-fraction": asking.get("gpu_fraction"),
        "--num-gpus": asking.get("num_gpus"),
        "--device": asking.get("devices") or None,
    }
    asked = [name for name, value in given.items() if value is not None]
    if len(asked) > 1:
        raise UsageError(
            f"cannot ask for {' and '.join(asked)} at once",
            "give one of them; --device can be repeated and takes profiles and memory: --device 2g.10gb --device 4G",
        )
    if not asked:
        raise UsageError(
            "cannot serve a request for nothing",
            "ask for memory (--gpu-memory 4G), a profile (--mig-profile 1g.10gb) or whole GPUs (--num-gpus 1)",
        )
    compute = asking.get("min_compute")
    attributes = frozenset(requests.parse_attribute(each) for each in asking.get("attributes", ()))
    wants = _plain_wants(asking)
    if compute is None and not attributes:
        return wants
    flexible = [want.memory_bytes is not None or want.fraction is not None for want in wants]
    if not any(flexible):
        raise UsageError(
            f"cannot combine {'--min-compute' if compute is not None else '--attribute'} with {asked[0]}",
            "a profile's name says both already; they go with --gpu-memory and --gpu-fraction",
        )
    return tuple(
        _with(want, 1 if compute is None else compute, attributes) if bends else want
        for want, bends in zip(wants, flexible, strict=True)
    )


def _plain_wants(asking: Asking) -> tuple[Want, ...]:
    if (memory := asking.get("gpu_memory")) is not None:
        return (requests.memory_want(memory),)
    if (profile := asking.get("mig_profile")) is not None:
        return (requests.profile_want(profile),)
    if (fraction := asking.get("gpu_fraction")) is not None:
        return (requests.fraction_want(fraction if isinstance(fraction, str) else f"{fraction:.12f}"),)
    if (number := asking.get("num_gpus")) is not None:
        if not 0 < number <= requests.MOST_WANTS:
            raise UsageError(
                f"cannot serve {number} whole GPUs: from 1 to {requests.MOST_WANTS} can be asked",
                "--gpu-fraction 0.25 asks for a part of one"
                if number < 1
                else "`migctl status` shows how many there are",
            )
        return (requests.whole_gpu_want(),) * number
    return tuple(requests.parse_device(each) for each in asking.get("devices", ()))


def _with(want: Want, compute: int, attributes: frozenset[str]) -> Want:
    return Want(
        memory_bytes=want.memory_bytes,
        fraction=want.fraction,
        min_compute_slices=compute,
        attributes=attributes,
        text=want.text,
    )


def _holder(asking: Asking) -> Holder:
    name = asking.get("name")
    return Holder(
        tenant=asking.get("tenant", ""),
        # Of a pod's lease the agent makes it.
        name=_name() if name is None and asking.get("pod") is None else name or "",
    )


def _pod(asking: Asking) -> Pod | None:
    given = asking.get("pod")
    return None if given is None else Pod(namespace=given.namespace, name=given.name, uid=given.uid)


def _name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user that the machine has no name for, as in many containers
        return ""


def _message(request: Request) -> pb.Request:
    return pb.Request(
        wants=[_want(each) for each in request.wants],
        request_id=request.request_id,
        holder=_holder_message(request),
        gpus=request.gpus,
        priority=request.priority,
        wait_seconds=request.wait_seconds,
        ttl_seconds=request.ttl_seconds,
        pid=None if request.owner.process is None else request.owner.process.pid,
        if_revision=request.if_revision,
    )


def _holder_message(request: Request) -> pb.Holder:
    pod = request.owner.pod if isinstance(request.owner, PodOwner) else None
    return pb.Holder(
        tenant=request.holder.tenant,
        name=request.holder.name,
        pod=None if pod is None else pb.Pod(namespace=pod.namespace, name=pod.name, uid=pod.uid),
    )


def _want(want: Want) -> pb.Want:
    message = pb.Want(min_compute_slices=want.min_compute_slices, attributes=sorted(want.attributes), text=want.text)
    if want.memory_bytes is not None:
        message.memory_bytes = want.memory_bytes
    elif want.profile is not None:
        message.profile = want.profile
    elif want.fraction is not None:
        message.gpu_fraction = want.fraction
    else:
        message.whole_gpu = True
    return message
