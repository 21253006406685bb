"""Which devices of a lease are still there: a pod's lease outlives the loss of one, and keeps its place in it. Pure."""

from __future__ import annotations

from mig_agent.core.model import GpuState, Instance, Lease, NodeView


def standing(view: NodeView, lease: Lease) -> tuple[Instance | None, ...]:
    """Of each device of a lease its instance; None for one that is lost: gone, or on a GPU that is lost.

    None, too, where the GPU does not answer yet or is not managed now.
    """
    return tuple(
        each if each is not None and each.lease == lease.id and _answers(view, each) else None
        for each in (view.instances.get(generation) for generation in lease.instances)
    )


def _answers(view: NodeView, instance: Instance) -> bool:
    return view.by_uuid[instance.slot.gpu].state is not GpuState.LOST
