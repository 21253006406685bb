"""What a node can never serve as it is, told at once rather than queued: permanent refusals."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from mig_agent.core.choosing import choose, order_of_size
from mig_agent.core.emptied import fits_when_empty
from mig_agent.core.errors import Reason, Refusal, UsageError
from mig_agent.core.finding import named_gpus
from mig_agent.core.model import Gpu, NodeView, Profile, Request, Want
from mig_agent.core.quantities import format_memory, shown
from mig_agent.core.requests import validate
from mig_agent.core.wording import each_gpu, here, several, want_words

_PROFILE_LIKE = re.compile(r"([0-9]{1,3})g\.([0-9]{1,5})gb", re.ASCII)
_COMPUTE_INSTANCE = re.compile(r"[0-9]{1,3}c\.", re.ASCII)


def never_served(view: NodeView, request: Request) -> Refusal | None:
    """Why the request can never be served here, whatever ends; None when it can be."""
    try:
        validate(request)
    except UsageError as error:
        return Refusal(reason=Reason.INVALID_REQUEST, message=error.message, hint=error.hint)
    unknown = _unknown_gpus(view, request)
    if unknown is not None:
        return unknown
    gpus = named_gpus(view, request)
    if not gpus:
        return Refusal(
            reason=Reason.NO_MIG_GPU,
            message=f"cannot place {several(request.wants)}: this node has no GPU",
            hint="`nvidia-smi` shows what the driver finds; `mig-agent serve --gpus` limits what is managed",
        )
    for want in request.wants:
        if not any(choose(want, gpu.layout) for gpu in gpus):
            return _not_offered(view, request, want, gpus)
    if not fits_when_empty(gpus, request.wants):
        return _too_many(request, gpus)
    return None


def _unknown_gpus(view: NodeView, request: Request) -> Refusal | None:
    known = {str(gpu.index) for gpu in view.gpus} | {gpu.uuid.casefold() for gpu in view.gpus}
    unknown = [name for name in request.gpus if name.casefold() not in known]
    if not unknown:
        return None
    listed = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in view.gpus)
    return Refusal(
        reason=Reason.UNKNOWN_GPU,
        message=f"cannot use GPU {shown(unknown[0])}: this node has no such GPU",
        hint=f"it has {listed}" if listed else "it has none",
    )


def _not_offered(view: NodeView, request: Request, want: Want, gpus: Sequence[Gpu]) -> Refusal:
    """No GPU model among these has anything for the want."""
    refusal = _no_mig_gpu(want, gpus) or (
        _unknown_profile(request, want, gpus) if want.profile is not None else _too_large(request, want, gpus)
    )
    others = [gpu for gpu in view.gpus if gpu not in gpus and choose(want, gpu.layout)]
    if not others:
        return refusal
    return Refusal(
        reason=refusal.reason,
        message=refusal.message,
        hint=f"{each_gpu(others)} could serve it: leave the choice of GPUs out",
    )


def _no_mig_gpu(want: Want, gpus: Sequence[Gpu]) -> Refusal | None:
    if any(_instance_profiles(gpu) for gpu in gpus):
        return None
    why = ", ".join(f"GPU {gpu.index}: {gpu.reason or 'MIG mode is off'}" for gpu in gpus[:8])
    capable = [gpu for gpu in gpus if gpu.mode.capable]
    hint = f"`migctl mode enable --gpu {capable[0].index}` switches MIG mode on; " if capable else ""
    return Refusal(
        reason=Reason.NO_MIG_GPU,
        message=f"cannot place {want_words(want)}: {each_gpu(gpus)} cannot be divided now ({why})",
        hint=f"{hint}--num-gpus 1 takes a whole GPU",
    )


def _unknown_profile(request: Request, want: Want, gpus: Sequence[Gpu]) -> Refusal:
    name = want.profile or ""
    offered = _offered(gpus)
    known = next((profile for profile in offered if profile.name == name), None)
    if known is not None:
        return _contradiction(want, known)
    names = ", ".join(profile.name for profile in offered)
    hint = _spelling(name, offered) or _nearest(name, offered) or "`migctl profiles` tells what each has"
    if _COMPUTE_INSTANCE.match(name):
        hint = f"compute instances inside a GPU instance are not handed out one by one; {hint}"
    return Refusal(
        reason=Reason.UNKNOWN_PROFILE,
        message=f"cannot place {shown(name)}: no such profile {here(request, gpus)}, which offers {names}",
        hint=hint,
    )


def _contradiction(want: Want, known: Profile) -> Refusal:
    """The profile exists and has not what else was asked for."""
    lacks = [f"no {attribute}" for attribute in sorted(want.attributes - known.attributes)]
    if known.compute_slices < want.min_compute_slices:
        plural = "s" if known.compute_slices > 1 else ""
        lacks.append(f"{known.compute_slices} compute slice{plural}, not {want.min_compute_slices}")
    return Refusal(
        reason=Reason.INVALID_REQUEST,
        message=f"cannot place {want_words(want)}: {known.name} has {' and '.join(lacks)}",
        hint="a profile's name says all; leave the rest out, or ask for memory instead",
    )


def _spelling(name: str, offered: Sequence[Profile]) -> str:
    """The profile that a name almost is; Kubernetes resource names have a dot where the driver has a plus."""
    names = [profile.name for profile in offered]
    bare = _COMPUTE_INSTANCE.sub("", name.lower().removeprefix("nvidia.com/").removeprefix("mig-"))
    folded = re.sub(r"gb\.([a-z])", r"gb+\1", bare)
    if folded in names:
        return f"did you mean {folded}?"
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.9)
    return f"did you mean {close[0]}?" if close else ""


def _nearest(name: str, offered: Sequence[Profile]) -> str:
    """What comes nearest to a name that looks like a profile, by memory and by compute."""
    match = _PROFILE_LIKE.search(name)
    plain = [profile for profile in offered if not profile.attributes]
    if match is None or not plain:
        return ""
    compute, gigabytes = int(match[1]), int(match[2])
    by_memory = min(
        plain, key=lambda each: (abs(each.memory_mib / 1024 - gigabytes), abs(each.compute_slices - compute))
    )
    by_compute = min(
        plain, key=lambda each: (abs(each.compute_slices - compute), abs(each.memory_mib / 1024 - gigabytes))
    )
    if by_memory.name == by_compute.name:
        return f"nearest is {by_memory.name}"
    return f"nearest by memory is {by_memory.name}, by compute {by_compute.name}"


def _too_large(request: Request, want: Want, gpus: Sequence[Gpu]) -> Refusal:
    offered = _offered(gpus)
    place = here(request, gpus)
    alike = [profile for profile in offered if profile.attributes == want.attributes]
    if not alike:
        known = sorted({"".join(sorted(profile.attributes)) for profile in offered if profile.attributes})
        asked = " ".join(sorted(want.attributes))
        return Refusal(
            reason=Reason.UNKNOWN_PROFILE,
            message=f"cannot place {want_words(want)}: nothing {place} is offered with {asked}",
            hint=f"it offers {', '.join(known)}" if known else "no profile there has any attribute",
        )
    able = [profile for profile in alike if profile.compute_slices >= want.min_compute_slices]
    if not able:
        most = max(alike, key=lambda profile: (profile.compute_slices, profile.memory_mib))
        return Refusal(
            reason=Reason.TOO_LARGE,
            message=f"cannot place {want_words(want)}: the most {place} is {most.compute_slices} ({most.name})",
            hint=f"ask for at most {most.compute_slices} compute slices",
        )
    largest = max(able, key=order_of_size)
    amount = format_memory(largest.memory_bytes)
    hint = f"ask for at most {amount}, or for several devices"
    wholes = [gpu for gpu in gpus if not _instance_profiles(gpu)]
    if any(want.memory_bytes and gpu.layout.memory_mib << 20 >= want.memory_bytes for gpu in wholes):
        hint += "; --num-gpus 1 takes a whole GPU"
    return Refusal(
        reason=Reason.TOO_LARGE,
        message=f"cannot place {want_words(want)}: the largest instance {place} is {largest.name} with {amount}",
        hint=hint,
    )


def _too_many(request: Request, gpus: Sequence[Gpu]) -> Refusal:
    wants = request.wants
    place = here(request, gpus)
    if len(set(wants)) == 1:
        most = len(wants)
        while most > 0 and not fits_when_empty(gpus, wants[:most]):
            most -= 1
        fit = "fits" if most == 1 else "fit"
        return Refusal(
            reason=Reason.TOO_MANY_DEVICES,
            message=f"cannot place {several(wants)}: at most {most} {fit} {place} with nothing else there",
            hint=f"ask for at most {most}",
        )
    return Refusal(
        reason=Reason.TOO_MANY_DEVICES,
        message=f"cannot place {several(wants)}: they do not fit {place} together, even with nothing else there",
        hint="ask for fewer or smaller devices, or in several requests",
    )


def _instance_profiles(gpu: Gpu) -> tuple[Profile, ...]:
    return tuple(profile for profile in gpu.layout.profiles if not profile.is_whole_gpu)


def _offered(gpus: Sequence[Gpu]) -> list[Profile]:
    """All profiles, each name once, the smallest first."""
    by_name: dict[str, Profile] = {}
    for gpu in gpus:
        for profile in _instance_profiles(gpu):
            by_name.setdefault(profile.name, profile)
    return sorted(by_name.values(), key=lambda profile: (order_of_size(profile), profile.name))
