"""Turns request arguments, as people write them, into API messages. Raises UsageError for invalid ones."""

from __future__ import annotations

import difflib
import getpass
import math
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import TypedDict

from mig_agent.client import arg_checks, types
from mig_agent.core import requests
from mig_agent.core.errors import UsageError
from mig_agent.core.model import Holder, Request, RequestId, Want
from mig_agent.core.owner import Pod, PodOwner
from mig_agent.core.quantities import parse_duration, shown
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb

FOREVER = math.inf
"""Value of `wait` without a limit: until the caller gives up."""


class RequestArgs(TypedDict, total=False):
    """Arguments of a request.

    Exactly one of `gpu_memory`, `mig_profile`, `gpu_fraction`, `num_gpus` and `devices` is given.
    """

    gpu_memory: str | None
    """One device with at least this much memory: `4G`, `9.5Gi`."""
    mig_profile: str | None
    """One device of exactly this profile: `1g.10gb`."""
    gpu_fraction: str | float | None
    """One device with at least this share of a GPU's memory slices: above 0, up to 1."""
    num_gpus: int | None
    """This many whole GPUs."""
    devices: Sequence[str]
    """Several devices at once, all or nothing, each a profile, a quantity of memory, or `whole`."""
    min_compute: int | None
    """At least this many compute slices, for requests by memory or fraction."""
    attributes: Sequence[str]
    """Attributes that a profile may have, for requests by memory or fraction: `+me`, `+gfx`."""
    isolation: str | None
    """`any`: a share of a GPU where no MIG instance fits; `mig`: never a share. None: as the agent is configured."""
    compute: str | int | None
    """The largest part of the multiprocessors, in percent: `25%`. Only a share that MPS enforces has it."""
    gpus: Sequence[str | int]
    """Only these GPUs, each by index or UUID."""
    wait: str | float | None
    """How long to queue, as text (`10m`, `forever`) or seconds. None: do not queue."""
    priority: int
    """Higher goes first in the queue."""
    ttl: str | float | None
    """The lease ends after this time unless it is renewed, as text (`2h`) or seconds. None: no deadline."""
    pid: int | None
    """The lease ends when this process ends."""
    request_id: str | None
    """Repeats an earlier request: the same id gives the same lease. None: a new id."""
    tenant: str
    """The account that the lease counts for."""
    name: str | None
    """Name of the holder, for messages. None: the login name, or the pod's."""
    pod: types.Pod | None
    """The Kubernetes pod that the lease is for, which is to run on that node; for administrators and schedulers.

    Until the pod is bound, the lease is released and renewed by its token and ends at `ttl`; from then on it ends only
    with the pod.
    """
    if_revision: int | None
    """Refuse if the node has changed since this revision."""


def request_for(args: RequestArgs) -> pb.Request:
    """Return the request as a message with a request id. Raises UsageError for what is invalid on every node."""
    _check_arguments(args)
    gpus = tuple(requests.parse_gpu(str(each)) for each in args.get("gpus", ()))
    request = Request(
        wants=_wants(args),
        request_id=RequestId(args.get("request_id") or uuid.uuid4().hex),
        holder=_holder(args),
        gpus=gpus,
        priority=args.get("priority", 0),
        wait_seconds=seconds(args.get("wait")),
        ttl_seconds=seconds(args.get("ttl")),
        owner=requests.owner_for(_pod(args), args.get("pid")),
        if_revision=args.get("if_revision"),
    )
    requests.validate(request)
    return _message(request, _isolation(args))


def _isolation(args: RequestArgs) -> str:
    """Return the isolation that is asked for, as a word; empty for that of the agent's configuration."""
    given = args.get("isolation")
    return "" if given is None else requests.parse_isolation(given).value


def _check_arguments(args: RequestArgs) -> None:
    unknown = sorted(set(args) - set(RequestArgs.__annotations__))
    if unknown:
        close = difflib.get_close_matches(unknown[0], RequestArgs.__annotations__, 1)
        hint = f"do you mean {close[0]}?" if close else f"there is {', '.join(RequestArgs.__annotations__)}"
        raise UsageError(f"cannot ask with {shown(unknown[0])}: there is no such argument", hint)
    for name, value in args.items():
        arg_checks.REQUEST_ARGS[name].check(name, value)
    arg_checks.check_revision("if_revision", args.get("if_revision"))
    if args.get("request_id") == "":  # such as an unset variable of a script that repeats its request
        raise UsageError("cannot take an empty text as a request id", "leave it out to have one made")


def seconds(value: str | float | None) -> float | None:
    """Return seconds of a duration, given as text (`90s`, `10m`, `forever`) or seconds; None stays None.

    Raises UsageError.
    """
    arg_checks.DURATION.check("a duration", value)
    if isinstance(value, str):
        return FOREVER if value.strip().lower() == "forever" else parse_duration(value)
    return value


def _wants(args: RequestArgs) -> tuple[Want, ...]:
    given = {
        "--gpu-memory": args.get("gpu_memory"),
        "--mig-profile": args.get("mig_profile"),
        "--gpu-fraction": args.get("gpu_fraction"),
        "--num-gpus": args.get("num_gpus"),
        "--device": args.get("devices") or None,
    }
    asked = [name for name, value in given.items() if value is not None]
    if len(asked) > 1:
        raise UsageError(
            f"cannot ask for {' and '.join(asked)} at once",
            "give one of them; --device can be repeated and takes profiles and memory: --device 1g.10gb --device 4G",
        )
    if not asked:
        raise UsageError(
            "cannot serve a request for nothing",
            "ask for memory (--gpu-memory 4G), a profile (--mig-profile 1g.10gb) or whole GPUs (--num-gpus 1)",
        )
    compute = args.get("min_compute")
    attributes = frozenset(requests.parse_attribute(each) for each in args.get("attributes", ()))
    wants = _plain_wants(args)
    percent = args.get("compute")
    if percent is not None:
        wants = tuple(replace(each, compute_percent=requests.parse_compute(str(percent))) for each in wants)
    isolation = args.get("isolation")
    if isolation is not None:  # checked here, together with what else is asked for
        wants = tuple(replace(each, isolation=requests.parse_isolation(isolation)) for each in wants)
    if compute is None and not attributes:
        return wants
    flexible = [want.memory_bytes is not None or want.fraction is not None for want in wants]
    if not any(flexible):
        raise UsageError(
            f"cannot combine {'--min-compute' if compute is not None else '--attribute'} with {asked[0]}",
            "a profile's name says both already; they go with --gpu-memory and --gpu-fraction",
        )
    return tuple(
        replace(want, min_compute_slices=1 if compute is None else compute, attributes=attributes)
        if is_flexible
        else want
        for want, is_flexible in zip(wants, flexible, strict=True)
    )


def _plain_wants(args: RequestArgs) -> tuple[Want, ...]:
    if (memory := args.get("gpu_memory")) is not None:
        return (requests.memory_want(memory),)
    if (profile := args.get("mig_profile")) is not None:
        return (requests.profile_want(profile),)
    if (fraction := args.get("gpu_fraction")) is not None:
        return (requests.fraction_want(fraction if isinstance(fraction, str) else f"{fraction:.12f}"),)
    if (number := args.get("num_gpus")) is not None:
        if not 0 < number <= requests.MOST_WANTS:
            raise UsageError(
                f"cannot serve {number} whole GPUs: from 1 to {requests.MOST_WANTS} can be asked",
                "--gpu-fraction 0.25 asks for a part of one"
                if number < 1
                else "`migctl status` shows how many there are",
            )
        return (requests.whole_gpu_want(),) * number
    return tuple(requests.parse_device(each) for each in args.get("devices", ()))


def _holder(args: RequestArgs) -> Holder:
    name = args.get("name")
    return Holder(
        tenant=args.get("tenant", ""),
        # The agent names a pod's lease itself.
        name=_name() if name is None and args.get("pod") is None else name or "",
    )


def _pod(asking: RequestArgs) -> Pod | None:
    given = asking.get("pod")
    return None if given is None else Pod(namespace=given.namespace, name=given.name, uid=given.uid)


def _name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a uid without a name, as in many containers
        return ""


def _message(request: Request, isolation: str) -> pb.Request:
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
        isolation=isolation,
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
    if want.compute_percent is not None:
        message.compute_percent = want.compute_percent
    return message
