"""A trace of pods in rounds: in each, some end, and then others come. The same for a cluster and for the planner alone.

A round has no length: who replays it waits until all of it has happened, so that the outcome does not hang on how quick
a machine is.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from placement_bench.agent import AgentCluster, Handle

from mig_agent.adapters import profiles
from mig_agent.core.model import (
    Gpu,
    GpuState,
    GpuUuid,
    MigMode,
    NodeView,
    Request,
    RequestId,
)
from mig_agent.core.plan import Plan
from mig_agent.core.planner import plan
from mig_agent.core.policy import DEFAULT_POLICY
from mig_agent.core.requests import memory_want
from support.documents import ROOT

SHARES = {"5g": 0.5, "10g": 0.25, "20g": 0.15, "40g": 0.07, "80g": 0.03}
"""Of the pods; the keys are memory classes as resources name them."""
_LASTS = (1, 1, 1, 2, 2, 3)
"""Rounds that a pod stays, each as likely."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A pod that comes in a round, and ends at the beginning of another."""

    name: str
    memory: str
    ends: int


def trace(pods: int, a_round: int, seed: int) -> list[list[Asked]]:
    """So many pods, in rounds of so many."""
    chance = random.Random(seed)  # noqa: S311 -- the same one every time
    names, weights = list(SHARES), list(SHARES.values())
    made = [
        Asked(
            name=f"p{number:03}",
            memory=chance.choices(names, weights)[0],
            ends=number // a_round + chance.choice(_LASTS),
        )
        for number in range(pods)
    ]
    return [made[first : first + a_round] for first in range(0, pods, a_round)]


class MixedCluster(AgentCluster):
    """GPUs of several models under the planner, as one node: which node has which does not matter to the scores."""

    def __init__(self, models: Sequence[str]) -> None:
        super().__init__(0, DEFAULT_POLICY)
        mode = MigMode(capable=True, current=True, pending=True)
        gpus = tuple(
            Gpu(
                index=index,
                uuid=GpuUuid(f"GPU-{index}"),
                layout=profiles.load_model(ROOT / f"profiles/{model}.yaml").layout,
                mode=mode,
                state=GpuState.READY,
            )
            for index, model in enumerate(models)
        )
        self.view = NodeView(node="trace", revision=0, gpus=gpus)
        self._index = {gpu.uuid: gpu.index for gpu in gpus}

    def take(self, asked: Asked) -> Handle | None:
        """What the planner says."""
        request = Request(wants=(memory_want(asked.memory.upper()),), request_id=RequestId(asked.name))
        outcome = plan(self.view, request, self.policy, 0.0)
        return self.carry_out(outcome, 0.0) if isinstance(outcome, Plan) else None


def served_by_the_planner(rounds: Sequence[Sequence[Asked]], models: Sequence[str]) -> Mapping[str, bool]:
    """Who of the trace is served, by the name of the pod; the others are lost."""
    cluster = MixedCluster(models)
    held: dict[str, tuple[int, Handle]] = {}
    served: dict[str, bool] = {}
    for number, arrivals in enumerate(rounds):
        for name in [name for name, (ends, _) in held.items() if ends <= number]:
            cluster.end(held.pop(name)[1], 0.0)
        for each in arrivals:
            handle = cluster.take(each)
            served[each.name] = handle is not None
            if handle is not None:
                held[each.name] = (each.ends, handle)
    return served
