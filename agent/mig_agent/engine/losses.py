"""When an instance of a lease is lost: a pod's lease goes on with what is left of it, any other ends.

A pod's container has the device nodes of all its instances until it ends. Were its lease to end with the first that is
lost, the others would be idle, and another pod would be given what that container has open.
"""

from __future__ import annotations

from mig_agent.core.events import Event, EventKind
from mig_agent.core.model import Generation, GpuUuid, Instance, LeaseId
from mig_agent.engine.context import Context
from mig_agent.engine.lifetimes import WORDS
from mig_agent.engine.state import State


def left_beside(context: Context, gpu: GpuUuid) -> frozenset[LeaseId]:
    """The leases of pods that have something on other GPUs than this one, those that are not managed now included."""
    state = context.state
    return frozenset(
        lease.id
        for lease in state.leases.values()
        if lease.of_pod and any(_is_left(context, lease.id, generation, gpu) for generation in lease.instances)
    )


def silent(state: State) -> frozenset[LeaseId]:
    """The leases that have something on a GPU that has not answered since the start, or is not managed now."""
    gone = {generation for generation, gpu in state.unmanaged.items() if gpu not in state.gpus}
    if not gone:
        return frozenset()
    return frozenset(lease.id for lease in state.leases.values() if not gone.isdisjoint(lease.instances))


def _is_left(context: Context, lease: LeaseId, generation: Generation, but_on: GpuUuid) -> bool:
    state = context.state
    instance = state.instance(generation)
    if instance is not None:
        on = instance.slot.gpu
        return instance.lease == lease and on != but_on and not state.gpus[on].lost
    recorded_on = state.unmanaged.get(generation)
    return recorded_on is not None and recorded_on != but_on and recorded_on not in state.gpus


def reduced(context: Context, instance: Instance, reason: str) -> Event | None:
    """What is told when the lease of an instance goes on without it; None where it has none."""
    lease = context.state.leases.get(instance.lease) if instance.lease is not None else None
    if lease is None:
        return None
    number = lease.instances.index(instance.generation)
    device = f" ({lease.kubelet_devices[number]})" if number < len(lease.kubelet_devices) else ""
    return context.journal.event(
        EventKind.LEASE_REDUCED,
        f"lease {lease.id} of {lease.holder} lost {context.place(instance)}{device}: {WORDS.get(reason, reason)}; "
        "what is left of it stays its own",
        instance=instance,
        lease=lease.id,
        holder=str(lease.holder),
        reason=reason,
        tenant=lease.holder.tenant,
        device=number,
        pod=lease.holder.pod,
    )
