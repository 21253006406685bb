"""Why a request does not fit, in words: what can never be served here first, then what could at another moment."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import chain, islice

from mig_agent.core.blockers import MOST_BLOCKERS, Obstacle, blockers_of, free_again, in_words, obstacle, unavailable
from mig_agent.core.board import Board
from mig_agent.core.choosing import choose
from mig_agent.core.emptied import fits_when_empty
from mig_agent.core.errors import Blocker, Reason, Refusal
from mig_agent.core.finding import find, named_gpus, usable_gpus
from mig_agent.core.model import Gpu, GpuState, GpuUuid, InstanceState, NodeView, Request, Slot, Want
from mig_agent.core.never import never_served
from mig_agent.core.notes import round_amount
from mig_agent.core.packing import pack
from mig_agent.core.policy import Policy
from mig_agent.core.wording import each_gpu, several, want_words

_MOST_TRIED = 16
"""Devices of one request that are tried one by one, to say how many of them fit."""


def explain(
    view: NodeView,
    request: Request,
    policy: Policy,
    now: float,
    *,
    reserved: frozenset[GpuUuid],
    exclude: frozenset[Slot],
) -> Refusal:
    """The refusal of a request that the planner found no place for."""
    never = never_served(view, request)
    if never is not None:
        return never
    usable = usable_gpus(view, request)
    # On all of them it would fit: never_served has found that out.
    if len(usable) < len(named_gpus(view, request)) and not fits_when_empty(usable, request.wants):
        return _gpus_unavailable(view, request)
    if reserved and find(view, request, policy, exclude=exclude) is not None:
        return _kept_for_another(view, request, reserved)
    if exclude and find(view, request, policy, reserved=reserved) is not None:
        return _just_failed(view, request, exclude)
    if len(request.wants) == 1:
        return _no_room_for_one(view, request, now, reserved)
    return _no_room_together(view, request, reserved)


def _gpus_unavailable(view: NodeView, request: Request) -> Refusal:
    """It would fit on GPUs that are cordoned or lost."""
    away = [gpu for gpu in named_gpus(view, request) if gpu.state in {GpuState.CORDONED, GpuState.LOST}]
    able = [gpu for gpu in away if any(choose(want, gpu.layout) for want in request.wants)]
    words = ", ".join(f"GPU {gpu.index} is {gpu.state}{f' ({gpu.reason})' if gpu.reason else ''}" for gpu in able)
    cordoned = [gpu for gpu in able if gpu.state is GpuState.CORDONED and not gpu.set_aside]
    hint = "`nvidia-smi` tells whether the driver still sees it"
    if any(gpu.set_aside for gpu in able):
        hint = "it is used again by itself as soon as it can be; --wait 10m waits for that"
    if cordoned:
        hint = f"`migctl uncordon --gpu {cordoned[0].index}` lets new work onto it"
    return Refusal(
        reason=Reason.GPU_UNAVAILABLE,
        message=f"cannot place {several(request.wants)}: {words}",
        hint=hint,
        blockers=unavailable(able)[:MOST_BLOCKERS],
    )


def _kept_for_another(view: NodeView, request: Request, reserved: frozenset[GpuUuid]) -> Refusal:
    kept = [gpu for gpu in named_gpus(view, request) if gpu.uuid in reserved]
    words = f"{each_gpu(kept)} {'is' if len(kept) == 1 else 'are'} kept for a request that has waited long"
    return Refusal(
        reason=Reason.NO_CAPACITY,
        message=f"cannot place {several(request.wants)}: {words}",
        hint="--wait 10m waits for its turn",
        blockers=unavailable(kept, "reserved")[:MOST_BLOCKERS],
    )


def _just_failed(view: NodeView, request: Request, exclude: frozenset[Slot]) -> Refusal:
    gpus = view.by_uuid
    failed = sorted({(gpus[slot.gpu].index, str(slot)) for slot in exclude if slot.gpu in gpus})
    words = ", ".join(f"{slot} of GPU {index}" for index, slot in failed)
    return Refusal(
        reason=Reason.DRIVER_FAILED,
        message=f"cannot place {several(request.wants)}: the only places left just failed ({words})",
        hint="`migctl events` tells what the driver said",
    )


def _no_room_for_one(view: NodeView, request: Request, now: float, reserved: frozenset[GpuUuid]) -> Refusal:
    want = request.wants[0]
    # Where all is reserved and full besides, what fills it is the reason to give.
    obstacles = _obstacles(usable_gpus(view, request, reserved), want) or _obstacles(usable_gpus(view, request), want)
    words = want_words(want)
    profiles = {each.profile.name for each in obstacles}
    if len(profiles) == 1 and want.profile is None and not want.whole_gpu:
        words = f"{words} ({next(iter(profiles))})"
    nearest = obstacles[0]
    if len(obstacles) == 1:
        where, why = f"on GPU {nearest.gpu.index}", in_words(view, nearest)
    else:
        where = f"on any of {len(obstacles)} GPUs"
        why = f"nearest is GPU {nearest.gpu.index}, where {in_words(view, nearest)}"
    hints = (_what_fits_now(view, request, want, reserved), free_again(view, nearest, now))
    listed = chain.from_iterable(blockers_of(view, each.gpu, each.everything) for each in obstacles)
    return Refusal(
        reason=Reason.NO_CAPACITY,
        message=f"cannot place {words} {where}: {why}",
        hint="; ".join(hint for hint in hints if hint) or "--wait 10m waits until there is room",
        blockers=tuple(islice(chain(listed, _out_of_reach(view, request, reserved)), MOST_BLOCKERS)),
    )


def _obstacles(gpus: Sequence[Gpu], want: Want) -> list[Obstacle]:
    """One for each GPU that could serve the want, the nearest first."""
    found = [obstacle(gpu, profile) for gpu in gpus if (profile := choose(want, gpu.layout)) is not None]
    return sorted(found, key=lambda each: each.weight)


def _what_fits_now(view: NodeView, request: Request, want: Want, reserved: frozenset[GpuUuid]) -> str:
    """The largest smaller amount of memory that has a place now, as a hint."""
    if want.memory_bytes is None:
        return ""
    best: tuple[int, str] | None = None
    for gpu in usable_gpus(view, request, reserved):
        for profile in gpu.layout.profiles:
            if profile.attributes != want.attributes or profile.compute_slices < want.min_compute_slices:
                continue
            if profile.is_whole_gpu or profile.memory_bytes >= want.memory_bytes:
                continue
            if (best is None or profile.memory_mib > best[0]) and Board.of(gpu).best(profile, 0.0) is not None:
                words = f"{round_amount(profile)} would fit now ({profile.name} on GPU {gpu.index})"
                best = (profile.memory_mib, words)
    return "" if best is None else best[1]


def _no_room_together(view: NodeView, request: Request, reserved: frozenset[GpuUuid]) -> Refusal:
    usable = usable_gpus(view, request, reserved)
    boards = [Board.of(gpu) for gpu in usable]
    count = len(_fitting(boards, request.wants))
    held = chain.from_iterable(
        blockers_of(view, gpu, (each for each in gpu.instances if each.state is not InstanceState.IDLE))
        for gpu in usable
    )
    only = "none of them fits" if count == 0 else f"only {count} of them {'fits' if count == 1 else 'fit'}"
    return Refusal(
        reason=Reason.NO_CAPACITY,
        message=f"cannot place {several(request.wants)} together: {only} now",
        hint="--wait 10m waits until there is room for all",
        blockers=(*held, *_out_of_reach(view, request, reserved))[:MOST_BLOCKERS],
    )


def _fitting(boards: Sequence[Board], wants: Sequence[Want]) -> Sequence[Want]:
    """Of wants that do not fit together those that do, the first asked for before others."""
    # Of the first so many, which is found by halves; then each of the others, unless they are very many.
    beyond = bisect.bisect_left(range(1, len(wants) + 1), x=True, key=lambda count: pack(boards, wants[:count]) is None)
    fitting = list(wants[:beyond])
    for want in islice(wants, beyond + 1, beyond + 1 + _MOST_TRIED):
        if pack(boards, [*fitting, want]) is not None:
            fitting.append(want)
    return fitting


def _out_of_reach(view: NodeView, request: Request, reserved: frozenset[GpuUuid]) -> tuple[Blocker, ...]:
    """GPUs that could have served it and may not."""
    able = [gpu for gpu in named_gpus(view, request) if any(choose(want, gpu.layout) for want in request.wants)]
    return (*unavailable(able), *unavailable((gpu for gpu in able if gpu.uuid in reserved), "reserved"))
