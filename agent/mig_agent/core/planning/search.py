"""The search for a plan, without the texts of a refusal: used by `planner.plan` and by the queue."""

from __future__ import annotations

from collections.abc import Sequence

from mig_agent.core.model import Gpu, GpuState, GpuUuid, NodeView, Profile, Request, Slot, Want
from mig_agent.core.planning.alike_gpus import alike, mixed_note
from mig_agent.core.planning.multi_device import place_devices
from mig_agent.core.planning.occupancy import VICTIM_COST_SHARE, Candidate, Occupancy
from mig_agent.core.planning.plan import (
    DEFAULT_POLICY,
    CreateInstance,
    DestroyInstance,
    DevicePlan,
    Plan,
    Policy,
    ReuseInstance,
)
from mig_agent.core.planning.profiles import near_miss_notes, smallest_profile, wasted_mib
from mig_agent.core.planning.shares import without_shares

NOTHING_RESERVED: frozenset[GpuUuid] = frozenset()
NOTHING_EXCLUDED: frozenset[Slot] = frozenset()


def find(
    view: NodeView,
    request: Request,
    policy: Policy = DEFAULT_POLICY,
    *,
    reserved: frozenset[GpuUuid] = NOTHING_RESERVED,
    exclude: frozenset[Slot] = NOTHING_EXCLUDED,
) -> Plan | None:
    """Return the cheapest plan for a request, or None if it does not fit now."""
    policy = policy.of(request)
    wants = request.wants
    if len(wants) == 1 and wants[0].slot is None:
        return _find_one(usable_gpus(view, request, reserved), wants[0], policy, exclude)
    return _find_several(view, request, policy, reserved, exclude) if wants else None


def usable_gpus(view: NodeView, request: Request, reserved: frozenset[GpuUuid] = NOTHING_RESERVED) -> Sequence[Gpu]:
    """Return the GPUs on which something new may be placed for this request, by index."""
    gpus: Sequence[Gpu] = view.gpus
    if request.gpus:
        gpus = named_gpus(view, request)
    return [
        gpu for gpu in gpus if (gpu.state is GpuState.READY or gpu.state is GpuState.WHOLE) and gpu.uuid not in reserved
    ]


def named_gpus(view: NodeView, request: Request) -> Sequence[Gpu]:
    """Return the GPUs that the request allows, whatever their state."""
    if not request.gpus:
        return view.gpus
    named = {each.casefold() for each in request.gpus}
    return [gpu for gpu in view.gpus if str(gpu.index) in named or gpu.uuid.casefold() in named]


def gpus_of_any_model(gpus: Sequence[Gpu], request: Request, policy: Policy) -> Sequence[int] | None:
    """Return the indices of GPUs that would serve several devices now, of one model or not; None if there are none."""
    found = place_devices(gpus, request.wants, policy.of(request))
    return None if found is None else sorted({gpu.index for gpu, _ in found.places})


def _find_one(gpus: Sequence[Gpu], want: Want, policy: Policy, exclude: frozenset[Slot]) -> Plan | None:
    creation_cost = policy.creation_cost
    # By identity: the GPUs of one model share one Layout, and hashing it for each would cost more than the choice.
    chosen: dict[int, tuple[Profile | None, float]] = {}
    best: tuple[bool, float, float, float] | None = None
    best_gpu: Gpu | None = None
    best_candidate: Candidate | None = None
    for gpu in gpus:
        layout = gpu.layout
        choice = chosen.get(id(layout))
        if choice is None:
            profile = smallest_profile(want, layout)
            choice = (profile, 0.0 if profile is None else wasted_mib(profile, want, layout))
            chosen[id(layout)] = choice
        profile, waste = choice
        if profile is None:
            continue
        occupancy = Occupancy.of(gpu, policy)
        if exclude:
            candidate = next(iter(occupancy.candidates(profile, creation_cost, exclude)), None)
        else:
            candidate = occupancy.best(profile, creation_cost)
        if candidate is not None:
            # MIG isolates more than memory, so a share is what remains where no instance fits.
            key = (profile.kind.shares_memory, waste, candidate.cost, candidate.age)
            if best is None or key < best:
                best, best_gpu, best_candidate = key, gpu, candidate
    if best is None or best_gpu is None or best_candidate is None:
        return None
    device = _device(best_gpu, best_candidate)
    return Plan(
        devices=(device,),
        wasted_mib=best[1],
        cost=best[2],
        creation_cost=_creating((device,), creation_cost),
        notes=near_miss_notes(want, best_candidate.window.profile, best_gpu),
    )


def _find_several(
    view: NodeView, request: Request, policy: Policy, reserved: frozenset[GpuUuid], exclude: frozenset[Slot]
) -> Plan | None:
    sets = alike(usable_gpus(view, request), request.wants)
    if sets is None:
        return _place_several(usable_gpus(view, request, reserved), request.wants, policy, exclude)
    sets = sets.without(reserved)
    for tier in (sets.of_one_kind, sets.of_one_model):
        plans = [_place_several(gpus, request.wants, policy, exclude) for gpus in tier]
        found = [plan for plan in plans if plan is not None]
        if found:
            return min(found, key=lambda plan: (plan.wasted_mib, plan.cost))
    return None


def _place_several(
    gpus: Sequence[Gpu], wants: tuple[Want, ...], policy: Policy, exclude: frozenset[Slot]
) -> Plan | None:
    wants = without_shares(wants)
    found = place_devices(gpus, wants, policy, exclude)
    if found is None:
        return None
    notes = dict.fromkeys(mixed_note((gpu for gpu, _ in found.places), wants))
    for want, (gpu, candidate) in zip(wants, found.places, strict=True):
        notes.update(dict.fromkeys(near_miss_notes(want, candidate.window.profile, gpu)))
    devices = tuple(_device(gpu, candidate) for gpu, candidate in found.places)
    return Plan(
        devices=devices,
        wasted_mib=found.waste,
        cost=found.cost,
        creation_cost=_creating(devices, policy.creation_cost),
        notes=tuple(notes),
    )


def _creating(devices: Sequence[DevicePlan], creation_cost: float) -> float:
    """Return the cost of creating these devices and of destroying the instances on their slices."""
    return sum(
        creation_cost * (1 + VICTIM_COST_SHARE * len(each.victims))
        for each in devices
        if isinstance(each.serve, CreateInstance)
    )


def _device(gpu: Gpu, candidate: Candidate) -> DevicePlan:
    if candidate.reuse is not None:
        return DevicePlan(gpu=gpu.uuid, serve=ReuseInstance(candidate.reuse))
    slot = Slot(gpu.uuid, candidate.window.profile, candidate.window.placement)
    victims = tuple(DestroyInstance(victim) for victim in candidate.victims)
    return DevicePlan(gpu=gpu.uuid, serve=CreateInstance(slot), victims=victims)
