"""Decodes requests from messages of the API. Raises UsageError for what is invalid."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import assert_never

from mig_agent.core import requests
from mig_agent.core.errors import Reason, UsageError, refuse
from mig_agent.core.model import Holder, Isolation, Request, RequestId, Want
from mig_agent.core.owner import Pod
from mig_agent.core.quantities import shown
from mig_agent.engine.callers import Caller
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb


def request_from(message: pb.Request, caller: Caller) -> Request:
    """Return the request that a message contains.

    Raises UsageError if it is invalid, and RefusedError (NOT_PERMITTED) if it names a pod, or a tenant that is not the
    caller's, and the caller may not act for others.
    """
    # Check the numbers of repeated fields before their contents.
    requests.validate_numbers(wants=len(message.wants), gpus=len(message.gpus))
    pod = _pod(message.holder)
    isolation = _isolation(message.isolation)
    wants = tuple(want_from(each, isolation) for each in message.wants)
    owner = requests.owner_for(pod, message.pid if message.HasField("pid") else None)
    request = Request(
        wants=wants,
        request_id=RequestId(message.request_id or uuid.uuid4().hex),
        holder=_holder(message, caller, pod),
        gpus=tuple(requests.parse_gpu(each) for each in message.gpus),
        priority=message.priority,
        wait_seconds=message.wait_seconds if message.HasField("wait_seconds") else None,
        ttl_seconds=message.ttl_seconds if message.HasField("ttl_seconds") else None,
        owner=owner,
        if_revision=message.if_revision if message.HasField("if_revision") else None,
    )
    requests.validate(request)
    return request


def _pod(holder: pb.Holder) -> Pod | None:
    if not holder.HasField("pod"):
        return None
    return Pod(namespace=holder.pod.namespace, name=holder.pod.name, uid=holder.pod.uid)


def _holder(message: pb.Request, caller: Caller, pod: Pod | None) -> Holder:
    """Return the holder of the lease; the message can only choose it if the caller may act for others."""
    tenant, name = message.holder.tenant, message.holder.name
    pid = caller.pid
    if caller.acts_for_others:
        if pod is not None:
            tenant, name = tenant or f"namespace {pod.namespace}", name or str(pod)
        return Holder(tenant=tenant or caller.tenant, name=name or caller.name, uid=caller.uid, pid=pid)
    own = caller.tenant
    if pod is not None:
        raise refuse(
            Reason.NOT_PERMITTED,
            f"cannot ask for {shown(str(pod))}: requests of {caller} count for {own or 'no tenant'}",
            "leave the pod out; administrators and schedulers may ask for pods",
        )
    if tenant not in {"", own}:
        raise refuse(
            Reason.NOT_PERMITTED,
            f"cannot ask for tenant {shown(tenant)}: requests of {caller} count for {own or 'no tenant'}",
            "leave the tenant out; administrators and schedulers may ask for others",
        )
    # Others should see who it really is, whatever name was given.
    label = str(caller) if name in {"", own} else f"{caller} ({name})"
    return Holder(tenant=own, name=label, uid=caller.uid, pid=pid)


def _isolation(word: str) -> Isolation | None:
    return requests.parse_isolation(word) if word else None


def want_from(message: pb.Want, isolation: Isolation | None = None) -> Want:
    """Return the want for one device, with this isolation if it names none. Raises UsageError for what is invalid."""
    requests.validate_numbers(attributes=len(message.attributes))
    compute = message.min_compute_slices or 1
    attributes = frozenset(requests.parse_attribute(each) for each in message.attributes)
    kind = message.WhichOneof("what")
    match kind:
        case "memory":
            want = requests.memory_want(message.memory, min_compute_slices=compute, attributes=attributes)
        case "memory_bytes":
            want = Want(memory_bytes=message.memory_bytes, text=f"{message.memory_bytes} bytes")
        case "profile":
            want = requests.profile_want(message.profile)
        case "gpu_fraction":
            want = Want(fraction=message.gpu_fraction, text=f"{message.gpu_fraction:g} of a GPU")
        case "whole_gpu" if message.whole_gpu:
            want = requests.whole_gpu_want()
        case "whole_gpu" | None:
            raise UsageError("cannot serve a device with nothing asked for", "ask for memory, a profile or a whole GPU")
        case _:
            assert_never(kind)
    return replace(
        want,
        min_compute_slices=compute,
        attributes=attributes,
        isolation=_isolation(message.isolation) or isolation,
        compute_percent=message.compute_percent if message.HasField("compute_percent") else None,
        text=message.text or want.text,
    )
