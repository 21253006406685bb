"""GPUs under the agent's own planner: the view that it plans on, and the changes that its plans make."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache

import numpy as np

from mig_agent.core.model import (
    Generation,
    Gpu,
    GpuState,
    GpuUuid,
    Instance,
    InstanceState,
    Layout,
    LeaseId,
    MigMode,
    NodeView,
    Placement,
    Request,
    RequestId,
    Slot,
    Want,
)
from mig_agent.core.planning.plan import Plan, Policy, ReuseInstance
from mig_agent.core.planning.planner import plan
from placement_bench.clusters import Made
from placement_bench.mixes import NAMES, kinds, layout
from placement_bench.rules import MASKS, Rule

Handle = tuple[Instance, ...]
_MODE = MigMode(capable=True, current=True, pending=True)


@cache
def request_for(kind: int) -> Request:
    """Return a request for one instance of a kind."""
    return Request(wants=(Want(profile=NAMES[kind]),), request_id=RequestId(NAMES[kind]))


def node(gpus: int, of: Layout | None = None) -> NodeView:
    """Return a node with this many empty GPUs."""
    return node_of([of or layout()] * gpus)


def node_of(models: Sequence[Layout]) -> NodeView:
    """Return a node with an empty GPU of each of these models."""
    return NodeView(
        node="bench",
        revision=0,
        gpus=tuple(
            Gpu(
                index=index,
                uuid=GpuUuid(f"GPU-{index}"),
                layout=model,
                mode=_MODE,
                state=GpuState.READY,
            )
            for index, model in enumerate(models)
        ),
    )


class AgentCluster:
    """GPUs under `mig_agent.core.planning.planner.plan`, which is called as the agent calls it."""

    def __init__(self, gpus: int | Sequence[Layout] | NodeView, policy: Policy) -> None:
        """Create this many GPUs of the benchmark's model, or one of each of these, or those of a view.

        The GPUs of a view keep their instances; all others are empty.
        """
        self.made = Made()
        self.policy = policy
        if isinstance(gpus, NodeView):
            self.view = gpus
        else:
            self.view = node(gpus) if isinstance(gpus, int) else node_of(gpus)
        self._index = {gpu.uuid: gpu.index for gpu in self.view.gpus}
        self._generation = max((each.generation for gpu in self.view.gpus for each in gpu.instances), default=0)

    def place(self, kind: int, now: float) -> Handle | None:
        """Place one instance of a kind by `plan`; None if it is refused."""
        return self.serve(request_for(kind), now)

    def serve(self, request: Request, now: float) -> Handle | None:
        """Place any request by `plan`; None if it is refused."""
        outcome = plan(self.view, request, self.policy, now)
        return self.carry_out(outcome, now) if isinstance(outcome, Plan) else None

    def carry_out(self, outcome: Plan, now: float) -> Handle:
        """Carry out a plan at once."""
        return tuple(self._serve(outcome, number, now) for number in range(len(outcome.devices)))

    def end(self, handle: Handle, now: float) -> None:
        """End the lease; the instances stay, idle."""
        for leased in handle:
            idle = Instance(
                slot=leased.slot,
                generation=leased.generation,
                state=InstanceState.IDLE,
                uuid=leased.uuid,
                since=now,
            )
            gpu = self.view.gpus[self._index[leased.slot.gpu]]
            self._put(gpu, tuple(idle if each is leased else each for each in gpu.instances))

    def _serve(self, outcome: Plan, number: int, now: float) -> Instance:
        device = outcome.devices[number]
        gpu = self.view.gpus[self._index[device.gpu]]
        gone = [victim.instance for victim in device.victims]
        if isinstance(device.serve, ReuseInstance):
            self.made.reused += 1
            generation = device.serve.instance.generation
            gone.append(device.serve.instance)
        else:
            self.made.created += 1
            self._generation += 1
            generation = Generation(self._generation)
        self.made.destroyed += len(device.victims)
        leased = Instance(
            slot=device.slot,
            generation=generation,
            state=InstanceState.LEASED,
            uuid=f"MIG-{generation}",
            lease=LeaseId(str(generation)),
            since=now,
        )
        staying = [each for each in gpu.instances if all(each is not other for other in gone)]
        self._put(gpu, tuple(sorted((*staying, leased), key=_start)))
        return leased

    def _put(self, gpu: Gpu, instances: tuple[Instance, ...]) -> None:
        changed = Gpu(
            index=gpu.index,
            uuid=gpu.uuid,
            layout=gpu.layout,
            mode=gpu.mode,
            state=gpu.state,
            instances=instances,
        )
        gpus = self.view.gpus
        self.view = NodeView(
            node=self.view.node,
            revision=self.view.revision + 1,
            gpus=(*gpus[: gpu.index], changed, *gpus[gpu.index + 1 :]),
        )


@cache
def planner_rule() -> Rule:
    """Return what the planner would do on one GPU with nothing idle, for each kind and set of busy slices."""
    scores = np.full((len(NAMES), MASKS), np.inf)
    places: list[list[Placement | None]] = [[None] * MASKS for _ in NAMES]
    for mask, instances in _busy_instances().items():
        empty = node(1)
        gpu = dataclasses.replace(empty.gpus[0], instances=instances)
        view = NodeView(node=empty.node, revision=0, gpus=(gpu,))
        for kind in range(len(NAMES)):
            outcome = plan(view, request_for(kind))
            if isinstance(outcome, Plan):
                places[kind][mask] = outcome.devices[0].slot.placement
                scores[kind, mask] = outcome.score
    return Rule("this agent's choice", scores, tuple(map(tuple, places)))


def _busy_instances() -> dict[int, tuple[Instance, ...]]:
    """Return each set of slices that can be busy, with some instances that make it so."""
    found: dict[int, tuple[Instance, ...]] = {0: ()}
    ahead = [0]
    uuid = node(1).gpus[0].uuid
    while ahead:
        mask = ahead.pop()
        for profile in kinds():
            for place in profile.placements:
                larger = mask | place.mask
                if not place.mask & mask and larger not in found:
                    busy = Instance(
                        slot=Slot(uuid, profile, place),
                        generation=Generation(larger),
                        state=InstanceState.LEASED,
                        lease=LeaseId(str(larger)),
                    )
                    found[larger] = tuple(sorted((*found[mask], busy), key=_start))
                    ahead.append(larger)
    return found


def _start(instance: Instance) -> int:
    return instance.slot.placement.start
