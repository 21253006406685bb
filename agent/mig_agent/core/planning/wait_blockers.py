"""What a waiting request waits for: the few things that would have to end before it fits, and who holds them."""

from __future__ import annotations

from collections.abc import Sequence

from mig_agent.core.errors import Blocker
from mig_agent.core.model import Gpu, GpuUuid, InstanceState, NodeView, Request
from mig_agent.core.planning.blockers import blockers_of, obstacles, unavailable
from mig_agent.core.planning.feasibility import fewest_gpus
from mig_agent.core.planning.search import NOTHING_RESERVED, named_gpus, usable_gpus

MOST_WAIT_BLOCKERS = 4
"""The most blockers of one waiting request: a queue may be long, and all of it is in one status."""


def wait_blockers(
    view: NodeView, request: Request, reserved: frozenset[GpuUuid] = NOTHING_RESERVED
) -> tuple[Blocker, ...]:
    """Return what blocks a request where that is expected to end first, at most MOST_WAIT_BLOCKERS.

    Where nothing is in the way there, these are the `reserved` GPUs, or those that are cordoned or lost.
    """
    usable = usable_gpus(view, request, reserved) or usable_gpus(view, request)
    found = _held(view, request, usable) or _out_of_use(view, request, reserved)
    return found[:MOST_WAIT_BLOCKERS]


def _held(view: NodeView, request: Request, usable: Sequence[Gpu]) -> tuple[Blocker, ...]:
    if len(request.wants) == 1:
        nearest = next(iter(obstacles(view, usable, request.wants[0])), None)
        return () if nearest is None else blockers_of(view, nearest.gpu, nearest.everything)
    fewest = fewest_gpus(usable, request.wants)
    return tuple(
        blocker
        for gpu in usable
        if gpu.uuid in fewest
        for blocker in blockers_of(view, gpu, (each for each in gpu.instances if each.state is not InstanceState.IDLE))
    )


def _out_of_use(view: NodeView, request: Request, reserved: frozenset[GpuUuid]) -> tuple[Blocker, ...]:
    named = named_gpus(view, request)
    return (*unavailable((gpu for gpu in named if gpu.uuid in reserved), "reserved"), *unavailable(named))
