"""The planner: turns a request into a plan, or into a refusal that says why it does not fit now or never will.

`plan` is pure: the same function serves the agent, the dry run, the queue and the benchmark.
"""

from __future__ import annotations

import bisect
import difflib
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, islice

from mig_agent.core.errors import Blocker, Reason, Refusal, UsageError
from mig_agent.core.model import (
    Gpu,
    GpuState,
    GpuUuid,
    InstanceState,
    NodeView,
    Profile,
    Request,
    Slot,
    Want,
)
from mig_agent.core.planning.alike_gpus import alike, models_of
from mig_agent.core.planning.blockers import (
    MOST_BLOCKERS,
    blockers_of,
    describe_gpus,
    describe_obstacle,
    describe_scope,
    describe_want,
    describe_wants,
    free_again,
    obstacles,
    unavailable,
)
from mig_agent.core.planning.exact_packing import pack
from mig_agent.core.planning.feasibility import fits_when_empty
from mig_agent.core.planning.occupancy import Occupancy
from mig_agent.core.planning.pinning import window_of
from mig_agent.core.planning.plan import DEFAULT_POLICY, Outcome, Policy
from mig_agent.core.planning.profiles import order_of_size, round_amount, served_by, smallest_profile
from mig_agent.core.planning.search import (
    NOTHING_EXCLUDED,
    NOTHING_RESERVED,
    find,
    gpus_of_any_model,
    named_gpus,
    usable_gpus,
)
from mig_agent.core.planning.shares import largest_share, share_for, without_shares
from mig_agent.core.planning.without_mig import instance_profiles, is_or_are, no_mig_gpu, too_large_for_a_share
from mig_agent.core.quantities import format_memory, format_mib, shown
from mig_agent.core.requests import validate
from mig_agent.core.texts import state_and_reason


def plan(
    view: NodeView,
    request: Request,
    policy: Policy = DEFAULT_POLICY,
    now: float = 0.0,
    *,
    reserved: frozenset[GpuUuid] = NOTHING_RESERVED,
    exclude: frozenset[Slot] = NOTHING_EXCLUDED,
) -> Outcome:
    """Return how this node would serve the request now, or why it cannot.

    `reserved` are GPUs reserved for other requests, `exclude` slots that just failed and are neither used nor created.
    `now` is the wall clock in seconds, for hints when a lease in the way will end.
    """
    if request.if_revision is not None and request.if_revision != view.revision:
        return Refusal(
            reason=Reason.REVISION_CHANGED,
            message=f"cannot go by revision {request.if_revision}: the node has changed and is at {view.revision}",
            hint="read the status again and decide anew",
            revision=view.revision,
        )
    unknown = _unknown_gpus(view, request)  # also one beside a GPU that there is: the other may be what was meant
    if unknown is not None:
        return unknown
    found = find(view, request, policy, reserved=reserved, exclude=exclude)
    return refusal_for(view, request, policy, now, reserved=reserved, exclude=exclude) if found is None else found


_MOST_TRIED = 16
"""The most devices of one request that are tried one by one, to say how many of them fit."""


def refusal_for(
    view: NodeView,
    request: Request,
    policy: Policy,
    now: float,
    *,
    reserved: frozenset[GpuUuid],
    exclude: frozenset[Slot],
) -> Refusal:
    """Return the refusal of a request for which the planner found no slot."""
    never = permanent_refusal(view, request)
    if never is not None:
        return never
    usable = usable_gpus(view, request)
    # On all of them it would fit: permanent_refusal has checked that.
    if len(usable) < len(named_gpus(view, request)) and not fits_when_empty(usable, request.wants):
        return _gpus_unavailable(view, request)
    if reserved and find(view, request, policy, exclude=exclude) is not None:
        return _reserved_for_another(view, request, reserved)
    if exclude and find(view, request, policy, reserved=reserved) is not None:
        return _just_failed(view, request, exclude)
    if len(request.wants) == 1:
        return _no_capacity_for_one(view, request, now, reserved)
    return _no_capacity_together(view, request, policy, reserved)


def _gpus_unavailable(view: NodeView, request: Request) -> Refusal:
    """Return the refusal of a request that would fit on GPUs that are cordoned or lost."""
    unavailable_gpus = [gpu for gpu in named_gpus(view, request) if gpu.state in {GpuState.CORDONED, GpuState.LOST}]
    able = [gpu for gpu in unavailable_gpus if any(served_by(want, gpu) for want in request.wants)]
    words = ", ".join(f"GPU {gpu.index} is {state_and_reason(gpu.state, gpu.reason)}" for gpu in able)
    cordoned = [gpu for gpu in able if gpu.state is GpuState.CORDONED and not gpu.set_aside]
    hint = "`nvidia-smi` tells whether the driver still sees it"
    if any(gpu.set_aside for gpu in able):
        hint = "it is used again by itself as soon as it can be; --wait 10m waits for that"
    if cordoned:
        hint = f"`migctl uncordon --gpu {cordoned[0].index}` lets new work onto it"
    return Refusal(
        reason=Reason.GPU_UNAVAILABLE,
        message=f"cannot place {describe_wants(request.wants)}: {words}",
        hint=hint,
        blockers=unavailable(able)[:MOST_BLOCKERS],
    )


def _reserved_for_another(view: NodeView, request: Request, reserved: frozenset[GpuUuid]) -> Refusal:
    reserved_gpus = [gpu for gpu in named_gpus(view, request) if gpu.uuid in reserved]
    verb = "is" if len(reserved_gpus) == 1 else "are"
    words = f"{describe_gpus(reserved_gpus)} {verb} kept for a request that has waited long"
    return Refusal(
        reason=Reason.NO_CAPACITY,
        message=f"cannot place {describe_wants(request.wants)}: {words}",
        hint="--wait 10m waits for its turn",
        blockers=unavailable(reserved_gpus, "reserved")[:MOST_BLOCKERS],
    )


def _just_failed(view: NodeView, request: Request, exclude: frozenset[Slot]) -> Refusal:
    gpus = view.by_uuid
    failed = sorted({(gpus[slot.gpu].index, str(slot)) for slot in exclude if slot.gpu in gpus})
    words = ", ".join(f"{slot} of GPU {index}" for index, slot in failed)
    return Refusal(
        reason=Reason.DRIVER_FAILED,
        message=f"cannot place {describe_wants(request.wants)}: the only places left just failed ({words})",
        hint="`migctl events` tells what the driver said",
    )


def _no_capacity_for_one(view: NodeView, request: Request, now: float, reserved: frozenset[GpuUuid]) -> Refusal:
    want = request.wants[0]
    # Where all is reserved and full besides, what fills it is the reason to give.
    usable = usable_gpus(view, request, reserved)
    found = obstacles(view, usable, want) or obstacles(view, usable_gpus(view, request), want)
    words = describe_want(want)
    profiles = {_named(each.profile) for each in found}
    if len(profiles) == 1 and want.profile is None and want.slot is None and not want.whole_gpu:
        words = f"{words} ({next(iter(profiles))})"
    nearest = found[0]
    if len(found) == 1:
        where, why = f"on GPU {nearest.gpu.index}", describe_obstacle(view, nearest)
    else:
        where = f"on any of {len(found)} GPUs"
        why = f"nearest is GPU {nearest.gpu.index}, where {describe_obstacle(view, nearest)}"
    hints = (_what_fits_now(view, request, want, reserved), free_again(view, nearest, now))
    listed = chain.from_iterable(blockers_of(view, each.gpu, each.everything) for each in found)
    return Refusal(
        reason=Reason.NO_CAPACITY,
        message=f"cannot place {words} {where}: {why}",
        hint="; ".join(hint for hint in hints if hint) or "--wait 10m waits until it fits",
        blockers=tuple(islice(chain(listed, _out_of_reach(view, request, reserved)), MOST_BLOCKERS)),
    )


def _named(profile: Profile) -> str:
    return f"a share of {format_mib(profile.memory_mib)}" if profile.kind.shares_memory else profile.name


def _what_fits_now(view: NodeView, request: Request, want: Want, reserved: frozenset[GpuUuid]) -> str:
    """Return a hint with the largest smaller amount of memory that fits now."""
    if want.memory_bytes is None:
        return ""
    best: tuple[int, str] | None = None
    for gpu in usable_gpus(view, request, reserved):
        share = largest_share(gpu) if share_for(want, gpu.layout) is not None else None
        if share is not None and (best is None or share.memory_mib > best[0]):
            best = (share.memory_mib, f"{round_amount(share)} would fit now (a share of GPU {gpu.index})")
        for profile in gpu.layout.profiles:
            if profile.attributes != want.attributes or profile.compute_slices < want.min_compute_slices:
                continue
            if profile.kind.takes_whole_gpu or profile.memory_bytes >= want.memory_bytes:
                continue
            if (best is None or profile.memory_mib > best[0]) and Occupancy.of(gpu).best(profile, 0.0) is not None:
                words = f"{round_amount(profile)} would fit now ({profile.name} on GPU {gpu.index})"
                best = (profile.memory_mib, words)
    return "" if best is None else best[1]


def _no_capacity_together(view: NodeView, request: Request, policy: Policy, reserved: frozenset[GpuUuid]) -> Refusal:
    usable = usable_gpus(view, request, reserved)
    sets = alike(usable_gpus(view, request), request.wants)
    choices = (usable,) if sets is None else sets.without(reserved).of_one_model
    count = max(len(_fitting([Occupancy.of(gpu) for gpu in gpus], request.wants)) for gpus in choices)
    held = chain.from_iterable(
        blockers_of(view, gpu, (each for each in gpu.instances if each.state is not InstanceState.IDLE))
        for gpu in usable
    )
    only = "none of them fits" if count == 0 else f"only {count} of them {'fits' if count == 1 else 'fit'}"
    hint, of_what = "--wait 10m waits until all fit", describe_wants(request.wants)
    if sets is not None and len(models_of(usable)) > 1:
        of_what += " of one model"
        if (unlike := gpus_of_any_model(usable, request, policy)) is not None:
            hint += f"; --gpu {','.join(map(str, unlike))} takes unlike ones now"
    return Refusal(
        reason=Reason.NO_CAPACITY,
        message=f"cannot place {of_what} together: {only} now",
        hint=hint,
        blockers=(*held, *_out_of_reach(view, request, reserved))[:MOST_BLOCKERS],
    )


def _fitting(occupancies: Sequence[Occupancy], wants: Sequence[Want]) -> Sequence[Want]:
    """Return the wants that fit together, earlier ones first, out of wants that do not all fit."""
    # Binary search for how many of the first ones fit; then each of the others, unless they are very many.
    beyond = bisect.bisect_left(
        range(1, len(wants) + 1), x=True, key=lambda count: pack(occupancies, wants[:count]) is None
    )
    fitting = list(wants[:beyond])
    for want in islice(wants, beyond + 1, beyond + 1 + _MOST_TRIED):
        if pack(occupancies, [*fitting, want]) is not None:
            fitting.append(want)
    return fitting


def _out_of_reach(view: NodeView, request: Request, reserved: frozenset[GpuUuid]) -> tuple[Blocker, ...]:
    """Return, as blockers, the GPUs that could serve the request but are cordoned, lost or reserved for another."""
    able = [gpu for gpu in named_gpus(view, request) if any(served_by(want, gpu) for want in request.wants)]
    return (*unavailable(able), *unavailable((gpu for gpu in able if gpu.uuid in reserved), "reserved"))


_PROFILE_LIKE = re.compile(r"([0-9]{1,3})g\.([0-9]{1,5})gb", re.ASCII)
_COMPUTE_INSTANCE = re.compile(r"[0-9]{1,3}c\.", re.ASCII)


def permanent_refusal(view: NodeView, request: Request) -> Refusal | None:
    """Return why the request can never be served here, whatever ends; None if it can be."""
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
            message=f"cannot place {describe_wants(request.wants)}: this node has no GPU",
            hint="`nvidia-smi` shows what the driver finds; `mig-agent serve --gpus` limits what is managed",
        )
    for want in request.wants:
        missing = _never_offered(view, request, want, gpus)
        if missing is not None:
            return missing
    if not fits_when_empty(gpus, request.wants):
        return _too_many(request, gpus)
    return None


def _unknown_gpus(view: NodeView, request: Request) -> Refusal | None:
    if not request.gpus:
        return None
    known = {str(gpu.index) for gpu in view.gpus} | {gpu.uuid.casefold() for gpu in view.gpus}
    unknown = [name for name in request.gpus if name.casefold() not in known]
    return _unknown_gpu(view, unknown[0]) if unknown else None


def _unknown_gpu(view: NodeView, name: str) -> Refusal:
    listed = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in view.gpus)
    return Refusal(
        reason=Reason.UNKNOWN_GPU,
        message=f"cannot use GPU {shown(name)}: this node has no such GPU",
        hint=f"it has {listed}" if listed else "it has none",
    )


def _never_offered(view: NodeView, request: Request, want: Want, gpus: Sequence[Gpu]) -> Refusal | None:
    if want.slot is not None:
        return _no_such_slot(view, want, want.slot, gpus)
    if any(smallest_profile(want, gpu.layout) for gpu in gpus):
        return None
    return _not_offered(view, request, want, gpus)


def _no_such_slot(view: NodeView, want: Want, slot: Slot, gpus: Sequence[Gpu]) -> Refusal | None:
    """Return the refusal of a slot that cannot exist here, whatever leases end; None if its GPU offers it."""
    gpu = view.by_uuid.get(slot.gpu)
    if gpu is None:
        return _unknown_gpu(view, slot.gpu)
    if gpu not in gpus:
        return Refusal(
            reason=Reason.INVALID_REQUEST,
            message=f"cannot place {describe_want(want)}: the request is for {describe_gpus(gpus)} alone",
            hint="leave the choice of GPUs out: the slot names one",
        )
    if window_of(Occupancy.of(gpu), slot) is not None:
        return None
    profile = next((each for each in gpu.layout.profiles if each.name == slot.profile.name), None)
    places = "" if profile is None else ", ".join(map(str, profile.placements))
    offers = f"offers {slot.profile.name} on slices {places}" if places else "has no such profile"
    return Refusal(
        reason=Reason.UNKNOWN_PROFILE,
        message=f"cannot place {describe_want(want)}: GPU {gpu.index} {offers}",
        hint="`migctl profiles` tells what each has",
    )


def _not_offered(view: NodeView, request: Request, want: Want, gpus: Sequence[Gpu]) -> Refusal:
    """Return the refusal of a want that no model among these GPUs can serve."""
    refusal = (
        _no_compute_percent(want, gpus)
        or too_large_for_a_share(want, gpus)
        or no_mig_gpu(want, gpus)
        or (_unknown_profile(request, want, gpus) if want.profile is not None else _too_large(request, want, gpus))
    )
    others = [gpu for gpu in view.gpus if gpu not in gpus and smallest_profile(want, gpu.layout)]
    if not others:
        return refusal
    return Refusal(
        reason=refusal.reason,
        message=refusal.message,
        hint=f"{describe_gpus(others)} could serve it: leave --gpu out",
    )


def _no_compute_percent(want: Want, gpus: Sequence[Gpu]) -> Refusal | None:
    """Return the refusal of a want that these GPUs could serve without its part of the multiprocessors."""
    terms = [gpu.layout.shares for gpu in gpus if gpu.layout.shares is not None]
    if want.compute_percent is None or any(each.way(has_process=False, limits_compute=True) for each in terms):
        return None
    if not any(smallest_profile(replace(want, compute_percent=None), gpu.layout) for gpu in gpus):
        return None  # it lacks more than that
    if terms:
        ways = " and ".join(sorted({each.enforced_by.value for each in terms}))
        shared = describe_gpus(gpu for gpu in gpus if gpu.layout.shares is not None)
        why = f"shares of {shared} are enforced by {ways}, which cannot limit compute"
    else:
        why = f"{describe_gpus(gpus)} {is_or_are(gpus)} not shared by MPS"
        why += ", and a MIG instance has compute slices of its own"
    return Refusal(
        reason=Reason.NOT_SUPPORTED,
        message=f"cannot place {describe_want(want)}: {why}",
        hint="leave --compute out; --min-compute asks for compute slices of a MIG instance",
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
        message=f"cannot place {shown(name)}: no such profile {describe_scope(request, gpus)}, which offers {names}",
        hint=hint,
    )


def _contradiction(want: Want, known: Profile) -> Refusal:
    """Return the refusal of a want whose profile exists but lacks what else was requested."""
    lacks = [f"no {attribute}" for attribute in sorted(want.attributes - known.attributes)]
    if known.compute_slices < want.min_compute_slices:
        plural = "s" if known.compute_slices > 1 else ""
        lacks.append(f"{known.compute_slices} compute slice{plural}, not {want.min_compute_slices}")
    return Refusal(
        reason=Reason.INVALID_REQUEST,
        message=f"cannot place {describe_want(want)}: {known.name} has {' and '.join(lacks)}",
        hint="a profile's name says all; leave the rest out, or ask for memory instead",
    )


def _spelling(name: str, offered: Sequence[Profile]) -> str:
    """Return a hint with the profile that a name almost is; Kubernetes has a dot where the driver has a plus."""
    names = [profile.name for profile in offered]
    bare = _COMPUTE_INSTANCE.sub("", name.lower().removeprefix("nvidia.com/").removeprefix("mig-"))
    folded = re.sub(r"gb\.([a-z])", r"gb+\1", bare)
    if folded in names:
        return f"did you mean {folded}?"
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.9)
    return f"did you mean {close[0]}?" if close else ""


def _nearest(name: str, offered: Sequence[Profile]) -> str:
    """Return a hint with the profiles nearest to a name that looks like one, by memory and by compute."""
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
    place = describe_scope(request, gpus)
    alike = [profile for profile in offered if profile.attributes == want.attributes]
    if not alike:
        known = sorted({"".join(sorted(profile.attributes)) for profile in offered if profile.attributes})
        asked = " ".join(sorted(want.attributes))
        return Refusal(
            reason=Reason.UNKNOWN_PROFILE,
            message=f"cannot place {describe_want(want)}: nothing {place} is offered with {asked}",
            hint=f"it offers {', '.join(known)}" if known else "no profile there has any attribute",
        )
    able = [profile for profile in alike if profile.compute_slices >= want.min_compute_slices]
    if not able:
        most = max(alike, key=lambda profile: (profile.compute_slices, profile.memory_mib))
        return Refusal(
            reason=Reason.TOO_LARGE,
            message=f"cannot place {describe_want(want)}: the most {place} is {most.compute_slices} ({most.name})",
            hint=f"ask for at most {most.compute_slices} compute slices",
        )
    largest = max(able, key=order_of_size)
    amount = format_memory(largest.memory_bytes)
    hint = f"ask for at most {amount}, or for several devices"
    wholes = [gpu for gpu in gpus if not instance_profiles(gpu)]
    if any(want.memory_bytes and gpu.layout.memory_mib << 20 >= want.memory_bytes for gpu in wholes):
        hint += "; --num-gpus 1 takes a whole GPU"
    return Refusal(
        reason=Reason.TOO_LARGE,
        message=f"cannot place {describe_want(want)}: the largest instance {place} is {largest.name} with {amount}",
        hint=hint,
    )


def _too_many(request: Request, gpus: Sequence[Gpu]) -> Refusal:
    wants = request.wants
    place = describe_scope(request, gpus)
    if any(_only_shared(want, gpus) for want in wants):
        return Refusal(
            reason=Reason.TOO_MANY_DEVICES,
            message=f"cannot place {describe_wants(wants)} together: {place} they would be shares of GPUs, and one "
            "process cannot use two shares",
            hint="ask for each in a request of its own",
        )
    if len(set(wants)) == 1:
        most = len(wants)
        while most > 0 and not fits_when_empty(gpus, wants[:most]):
            most -= 1
        fit = "fits" if most == 1 else "fit"
        return Refusal(
            reason=Reason.TOO_MANY_DEVICES,
            message=f"cannot place {describe_wants(wants)}: at most {most} {fit} {place} with nothing else there",
            hint=f"ask for at most {most}",
        )
    return Refusal(
        reason=Reason.TOO_MANY_DEVICES,
        message=f"cannot place {describe_wants(wants)}: they do not fit {place} together, even with nothing else there",
        hint="ask for fewer or smaller devices, or in several requests",
    )


def _only_shared(want: Want, gpus: Sequence[Gpu]) -> bool:
    """Return True if a share of a GPU serves the want, and nothing else on these GPUs does."""
    (alone,) = without_shares((want,))
    return not any(smallest_profile(alone, gpu.layout) for gpu in gpus)


def _offered(gpus: Sequence[Gpu]) -> list[Profile]:
    """Return all profiles, each name once, the smallest first."""
    by_name: dict[str, Profile] = {}
    for gpu in gpus:
        for profile in instance_profiles(gpu):
            by_name.setdefault(profile.name, profile)
    return sorted(by_name.values(), key=lambda profile: (order_of_size(profile), profile.name))
