"""Parses and validates requests as people and callers write them.

Nothing here knows a node: whether the node can serve a request is the planner's answer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from mig_agent.core.errors import UsageError
from mig_agent.core.model import Isolation, Request, Want
from mig_agent.core.owner import TOKEN_OWNER, Owner, Pod, PodOwner, ProcessOwner
from mig_agent.core.quantities import parse_fraction, parse_memory, shown
from mig_agent.core.texts import check_text

MOST_WANTS = 64
"""Devices in one request."""
MOST_COMPUTE_SLICES = 64
LONGEST_TEXT = 256
"""Bytes, in UTF-8, of any name in a request."""
LONGEST_REQUEST_ID = 128
"""Bytes, in UTF-8."""
MOST_GPUS_NAMED = 64
MOST_ATTRIBUTES = 16
"""Attributes of profiles for one device."""
_LONGEST_ATTRIBUTE = 16
MOST_PERCENT = 100
LONGEST_TTL_SECONDS = 10 * 365 * 86_400.0
MOST_PRIORITY = 2**31 - 1
"""The limit of the wire format; Kubernetes' critical pods have a priority of two thousand million."""
MOST_PID = 2**31 - 1

LONGEST_POD_NAME = 253
"""Characters, as in Kubernetes; a namespace has fewer."""
LONGEST_NAMESPACE = 63

_MOST_TEXTS = 3
"""Wants that are named one by one in a phrase."""
_PROFILE_LIKE = re.compile(r"(?:[0-9]+c\.)?[0-9]+g\.[0-9]+gb(?:[+.-][a-z.]+)*", re.ASCII)
_PART_OF_PROFILE = re.compile(r"[0-9]+g")
_PROFILE_START = re.compile(r"(?:[0-9]+c\.)?[0-9]+g\.", re.ASCII)
_ATTRIBUTE = re.compile(r"[+-][a-z]+(?:\.[a-z]+)*", re.ASCII)
_PERCENT = re.compile(r"([0-9]{1,3})\s*%?", re.ASCII)
_PERCENT_HINT = "write whole percents from 1% to 100%, such as 25%"
_INDEX = re.compile(r"[0-9]{1,4}", re.ASCII)
_POD_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?", re.ASCII)
_POD_UID = re.compile(r"[-_.:0-9A-Za-z]{0,64}", re.ASCII)
_GPU_UUID = re.compile(r"GPU-[0-9A-Z-]{1,64}", re.ASCII | re.IGNORECASE)


def memory_want(text: str, *, min_compute_slices: int = 1, attributes: frozenset[str] = frozenset()) -> Want:
    """Return a want for at least this much memory: `4G`, `9.5Gi`. Raises UsageError."""
    return Want(
        memory_bytes=parse_memory(text),
        min_compute_slices=min_compute_slices,
        attributes=attributes,
        text=text.strip(),
    )


def profile_want(text: str) -> Want:
    """Return a want for exactly this profile: `1g.10gb`, `1g.5gb+me`. Raises UsageError.

    Only text that cannot be a name is rejected here: only the node knows which names exist.
    """
    name = text.strip()
    if not name:
        raise UsageError("cannot take an empty text as a profile", "write its name, such as 1g.10gb")
    check_text(name, "a profile")
    if len(name) > LONGEST_TEXT or " " in name:
        raise UsageError(f"cannot take {shown(name)} as a profile", "write its name, such as 1g.10gb")
    return Want(profile=name, text=name)


def fraction_want(text: str, *, min_compute_slices: int = 1, attributes: frozenset[str] = frozenset()) -> Want:
    """Return a want for at least this share of a GPU's memory slices: `0.25`. Raises UsageError."""
    return Want(
        fraction=parse_fraction(text),
        min_compute_slices=min_compute_slices,
        attributes=attributes,
        text=text.strip(),
    )


def whole_gpu_want() -> Want:
    """Return a want for a whole GPU."""
    return Want(whole_gpu=True, text="whole")


_DEVICE_HINT = "write a profile such as 1g.10gb, a quantity of memory such as 4G, or whole"
_DECIMAL_COMMA = re.compile(r"[0-9]+,[0-9]+ *[A-Za-z]*", re.ASCII)


def parse_device(text: str) -> Want:
    """Parse the value of `--device`: a profile (`1g.10gb`), an amount of memory (`4G`), or `whole`.

    Raises UsageError.
    """
    name = text.strip()
    parts = [each.strip() for each in name.split(",")]
    if len(parts) > 1 and all(parts) and not _DECIMAL_COMMA.fullmatch(name):
        repeated = " ".join(f"--device {shown(each)}" for each in parts)
        raise UsageError(f"cannot take {shown(name)} as a device: it has a comma", f"repeat it: {repeated}")
    if name.lower() == "whole":
        return whole_gpu_want()
    if _PROFILE_LIKE.fullmatch(name) or _PROFILE_START.match(name):
        return profile_want(name)
    if _PART_OF_PROFILE.fullmatch(name):
        raise UsageError(
            f"cannot take {shown(name)} as a device: it may be memory or the beginning of a profile",
            f"write {shown(name[:-1])}G for memory, or a profile as `migctl profiles` shows it",
        )
    if not name:
        raise UsageError("cannot take an empty text as a device", _DEVICE_HINT)
    if not any(each.isdigit() for each in name):
        raise UsageError(f"cannot understand {shown(name)} as a device", _DEVICE_HINT)
    return memory_want(name)


def parse_attribute(text: str) -> str:
    """Parse an attribute of profiles: `+me`, `+gfx`, `-me`; `me` means `+me`. Raises UsageError."""
    name = text.strip().lower()
    signed = name if name[:1] in {"+", "-"} else "+" + name
    if len(signed) > _LONGEST_ATTRIBUTE or not _ATTRIBUTE.fullmatch(signed):
        raise UsageError(f"cannot take {shown(text.strip())} as an attribute of profiles", "write +me or +gfx")
    return signed


def parse_gpu(text: str) -> str:
    """Parse the value of `--gpu`: the index or UUID of a GPU, in the form of `Request.gpus`. Raises UsageError."""
    name = text.strip()
    if _INDEX.fullmatch(name):
        return str(int(name))
    if _GPU_UUID.fullmatch(name):
        return name
    hint = "write its index, such as 0, as `migctl status` shows it, or its UUID, GPU-..., as `nvidia-smi -L` does"
    if re.fullmatch(r"[0-9]*\.[0-9]+", name, re.ASCII):
        hint = f"--gpu-fraction {name} asks for a part of a GPU; --gpu says on which GPU, by index or UUID"
    elif re.fullmatch(r"[0-9.]+\s*[kKMGT]i?B?", name, re.ASCII):
        hint = f"--gpu-memory {name} asks for memory; --gpu says on which GPU, by index or UUID"
    raise UsageError(f"cannot take {shown(name) or 'an empty text'} as a GPU", hint)


def validate(request: Request) -> None:
    """Raise UsageError for a request that no node could serve."""
    if not request.wants:
        raise UsageError(
            "cannot serve a request for nothing",
            "ask for memory (--gpu-memory 4G), a profile (--mig-profile 1g.10gb) or whole GPUs (--num-gpus 1)",
        )
    validate_numbers(wants=len(request.wants), gpus=len(request.gpus))
    for want in request.wants:
        validate_want(want)
        if want.compute_percent is not None:
            _validate_compute_percent(request, want, want.compute_percent)
    for gpu in request.gpus:
        parse_gpu(gpu)
    _validate_texts(request)
    _validate_numbers(request)


def validate_numbers(*, wants: int = 0, gpus: int = 0, attributes: int = 0) -> None:
    """Raise UsageError for too many devices or named GPUs in a request, or too many attributes of a device."""
    if wants > MOST_WANTS:
        raise UsageError(
            f"cannot serve {wants} devices in one request: at most {MOST_WANTS}", "split it into several requests"
        )
    if gpus > MOST_GPUS_NAMED:
        raise UsageError(f"cannot choose among {gpus} named GPUs: at most {MOST_GPUS_NAMED}")
    if attributes > MOST_ATTRIBUTES:
        raise UsageError(f"cannot ask for {attributes} attributes of profiles: at most {MOST_ATTRIBUTES}")


def validate_want(want: Want) -> None:
    """Raise UsageError for a device that no node could serve."""
    amounts = (want.memory_bytes, want.profile, want.fraction, want.slot)
    asked = (*(each is not None for each in amounts), want.whole_gpu)
    if sum(asked) == 0:
        raise UsageError("cannot serve a device with nothing asked for", "ask for memory, a profile or a whole GPU")
    if sum(asked) > 1:
        raise UsageError(
            "cannot serve a device with more than one of memory, profile, fraction and whole GPU",
            "ask for one of them; --device names several devices",
        )
    if want.memory_bytes is not None and want.memory_bytes <= 0:
        words = "it is zero" if want.memory_bytes == 0 else "it is negative"
        raise UsageError(f"cannot serve {want.memory_bytes} bytes of memory: {words}", "ask for memory such as 4G")
    if want.fraction is not None and not 0 < want.fraction <= 1:
        raise UsageError(
            f"cannot serve the fraction {want.fraction} of a GPU: it must be above 0 and at most 1",
            "write a number such as 0.25; --num-gpus asks for several whole GPUs",
        )
    if not 1 <= want.min_compute_slices <= MOST_COMPUTE_SLICES:
        raise UsageError(
            f"cannot serve at least {want.min_compute_slices} compute slices: ask for 1 to {MOST_COMPUTE_SLICES}"
        )
    if want.profile is not None:
        profile_want(want.profile)
    if _bytes(want.text) > LONGEST_TEXT:
        raise UsageError(f"cannot serve a device whose text is {_bytes(want.text)} bytes long: at most {LONGEST_TEXT}")
    check_text(want.text, "the text of a device")
    validate_numbers(attributes=len(want.attributes))
    for attribute in want.attributes:
        if parse_attribute(attribute) != attribute:
            raise UsageError(f"cannot take {shown(attribute)} as an attribute of profiles", "write +me or +gfx")


def _validate_compute_percent(request: Request, want: Want, percent: int) -> None:
    if not 1 <= percent <= MOST_PERCENT:
        raise UsageError(f"cannot take {percent}% of the multiprocessors: from 1 to 100", _PERCENT_HINT)
    if want.memory_bytes is None and want.fraction is None:
        raise UsageError(
            f"cannot limit {want.text or 'this device'} to {percent}% of the multiprocessors: only a share of a GPU "
            "has such a limit",
            "--compute goes with --gpu-memory and --gpu-fraction",
        )
    if want.isolation is Isolation.MIG:
        raise UsageError(
            f"cannot limit a MIG instance to {percent}% of the multiprocessors: only a share has such a limit",
            "add --isolation any, or leave --compute out; --min-compute asks for compute slices",
        )
    if len(request.wants) > 1:
        raise UsageError(
            f"cannot limit several devices to {percent}% of the multiprocessors: only a share has such a limit, and "
            "one process cannot use two shares",
            "ask for one device in each request",
        )


def parse_isolation(text: str) -> Isolation:
    """Parse the value of `--isolation`: `any` or `mig`. Raises UsageError."""
    name = text.strip().lower()
    if name not in set(Isolation):
        raise UsageError(f"cannot take {shown(text.strip()) or 'an empty text'} as an isolation", "write any or mig")
    return Isolation(name)


def parse_compute(text: str) -> int:
    """Parse the value of `--compute`, a part of the multiprocessors in percent: `25%`. Raises UsageError."""
    match = _PERCENT.fullmatch(text.strip())
    if match is None or not 1 <= int(match[1]) <= MOST_PERCENT:
        raise UsageError(f"cannot take {shown(text.strip()) or 'an empty text'} as a part of compute", _PERCENT_HINT)
    return int(match[1])


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "replace"))


def _validate_texts(request: Request) -> None:
    texts = {"tenant": request.holder.tenant, "name of the holder": request.holder.name}
    for what, text in texts.items():
        if _bytes(text) > LONGEST_TEXT:
            raise UsageError(f"cannot take a {what} of {_bytes(text)} bytes: at most {LONGEST_TEXT}")
        check_text(text, f"the {what}")
    check_text(request.request_id, "a request id")
    if _bytes(request.request_id) > LONGEST_REQUEST_ID:
        raise UsageError(f"cannot take {shown(request.request_id)} as a request id", "leave it out to have one made")


def validate_pod(pod: Pod) -> None:
    """Raise UsageError unless this can be a Kubernetes pod; its UID may be empty."""
    names = {"namespace": (pod.namespace, LONGEST_NAMESPACE), "name": (pod.name, LONGEST_POD_NAME)}
    for what, (name, longest) in names.items():
        if len(name) > longest or not _POD_NAME.fullmatch(name):
            raise UsageError(
                f"cannot take {shown(name) or 'an empty text'} as the {what} of a pod",
                "write namespace, name and UID as `kubectl get pod -o yaml` shows them",
            )
    if not _POD_UID.fullmatch(pod.uid):
        raise UsageError(f"cannot take {shown(pod.uid)} as the UID of a pod", "copy it from the pod's metadata.uid")


def owner_for(pod: Pod | None, pid: int | None) -> Owner:
    """Return the owner of a lease for a pod, for a process, or for neither. Raises UsageError for both, and no pod."""
    process = None if pid is None else ProcessOwner(pid=pid)
    if pod is None:
        return process or TOKEN_OWNER
    validate_pod(pod)
    if process is not None:
        raise UsageError(
            f"cannot bind the lease of {pod} to process {pid}: it ends with its pod",
            "give it a ttl until the pod has come",
        )
    return PodOwner(pod=pod)


def parse_reason(text: str) -> str:
    """Return an administrator's reason, without surrounding blanks. Raises UsageError if one line cannot show it."""
    reason = text.strip()
    if _bytes(reason) > LONGEST_TEXT:
        raise UsageError(f"cannot take a reason of {_bytes(reason)} bytes: at most {LONGEST_TEXT}")
    check_text(reason, "the reason")
    return reason


def describe(request: Request) -> str:
    """Return what is asked for as a phrase: `2g.10gb`, `4G and 4G`."""
    return phrase_of(request.wants)


def phrase_of(wants: Sequence[Want]) -> str:
    """Return the devices that are asked for as a phrase: `2g.10gb`, `4G and 4G`."""
    texts = [want.text or want.profile or "a device" for want in wants]
    return " and ".join(texts) if len(texts) <= _MOST_TEXTS else f"{len(texts)} devices"


def validate_ttl(seconds: float | None) -> None:
    """Raise UsageError unless this is a valid time to live; None is a lease without a deadline."""
    if seconds is not None and not 0 < seconds <= LONGEST_TTL_SECONDS:
        raise UsageError(
            f"cannot lease for {seconds:g} seconds: more than none, and at most ten years",
            "write how long, such as --ttl 2h, or leave it out",
        )


def validate_drain_deadline(seconds: float | None) -> None:
    """Raise UsageError unless this is a valid deadline from now; None is a drain without a deadline."""
    if seconds is not None and not 0 < seconds <= LONGEST_TTL_SECONDS:
        raise UsageError(
            f"cannot drain within {seconds:g} seconds: more than none, and at most ten years",
            "write how long leases may last, such as --deadline 2h, or leave it out",
        )


def _validate_numbers(request: Request) -> None:
    if abs(request.priority) > MOST_PRIORITY:
        raise UsageError(f"cannot take {request.priority} as a priority: from {-MOST_PRIORITY} to {MOST_PRIORITY}")
    wait = request.wait_seconds
    if wait is not None and (math.isnan(wait) or wait < 0):
        raise UsageError(f"cannot wait {wait:g} seconds", "write how long, such as --wait 10m")
    validate_ttl(request.ttl_seconds)
    process = request.owner.process
    if process is not None and not 0 < process.pid <= MOST_PID:
        raise UsageError(f"cannot watch process {process.pid}: it is not a process id")
