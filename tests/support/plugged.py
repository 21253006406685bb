"""The device plugin's parts over a real manager, with what the kubelet says written down by the test."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mig_agent.adapters.cdi import CDI_KIND, CdiFolder
from mig_agent.adapters.kubeapi import KubeApiError, PodFacts
from mig_agent.adapters.kubelet import CheckpointEntry, Identity, KubeletError, ListedContainer, ListedPod
from mig_agent.core.model import Lease
from mig_agent.core.owner import KubeletDevice, Pod
from mig_agent.engine.tasks import Tasks
from mig_agent.frontends.kubernetes.device_plugin.allocate import Allocator
from mig_agent.frontends.kubernetes.device_plugin.allocations import AllocationTable
from mig_agent.frontends.kubernetes.device_plugin.cdi_injection import CdiInjector
from mig_agent.frontends.kubernetes.device_plugin.kubelet_pods import KubeletPods
from mig_agent.frontends.kubernetes.device_plugin.prestart import PreStart
from mig_agent.frontends.kubernetes.resources import Naming, resources_of
from support.engine import Node, engine
from support.owners import devices_of, pod_of

SMALL, MIDDLE, LARGE = "nvidia.com/mig-1g.10gb", "nvidia.com/mig-3g.40gb", "nvidia.com/mig-7g.80gb"
SECONDS = 30.0
"""For a container that is sure to start."""


def devices(*numbers: int, resource: str = SMALL) -> tuple[KubeletDevice, ...]:
    """Of one resource, by number."""
    return tuple(KubeletDevice(resource=resource, id=f"mig-agent-{each}") for each in numbers)


@dataclass
class Words:
    """What the kubelet and the API server say, as values: to be changed between two questions."""

    pods: dict[str, dict[str, tuple[KubeletDevice, ...]]] = field(default_factory=dict)
    """By name, the containers with their devices."""
    recorded: tuple[CheckpointEntry, ...] = ()
    facts: dict[str, PodFacts] = field(default_factory=dict)
    kubelet: Identity | None = field(default_factory=lambda: Identity(1, 1, 1))
    silent: bool = False
    """Neither answers."""
    does_not_answer: bool = False
    """The API server alone."""
    told: list[tuple[Pod | None, str, str]] = field(default_factory=list)
    patched: list[Mapping[str, int]] = field(default_factory=list)

    async def list(self) -> tuple[ListedPod, ...]:
        """The kubelet's pods."""
        if self.silent:
            raise KubeletError("cannot list the pods of this node: there is no kubelet")
        return tuple(
            ListedPod(
                namespace="team-a",
                name=name,
                containers=tuple(ListedContainer(name=each, devices=has) for each, has in containers.items()),
            )
            for name, containers in self.pods.items()
        )

    async def pod(self, _namespace: str, name: str) -> PodFacts | None:
        """The API server's answer."""
        if self.silent or self.does_not_answer:
            raise KubeApiError("cannot read the pod: no answer")
        return self.facts.get(name)

    async def patch_resources(self, counts: Mapping[str, int], capacity: Mapping[str, int]) -> None:
        """Kept."""
        assert all(count <= capacity[name] for name, count in counts.items())
        self.patched.append(counts)

    async def tell(self, about: Pod | None, reason: str, words: str, *, warning: bool) -> None:
        """Kept."""
        del warning
        self.told.append((about, reason, words))

    def put(self, name: str, *has: KubeletDevice, container: str = "main", uid: str = "") -> None:
        """A pod as the kubelet shows it from its admission on."""
        self.pods.setdefault(name, {})[container] = has
        uid = uid or f"uid-{name}"
        for resource in dict.fromkeys(each.resource for each in has):
            own = tuple(each for each in has if each.resource == resource)
            self.recorded += (CheckpointEntry(pod_uid=uid, container=container, devices=own),)
        had = self.facts[name].resources if name in self.facts else {}
        asks = Counter(had) + Counter(each.resource for each in has)
        self.facts[name] = PodFacts(
            namespace="team-a", name=name, uid=uid, phase="Running", node="node-1", resources=dict(asks)
        )

    def drop(self, name: str) -> None:
        """The pod is gone, for the kubelet and for the API server."""
        del self.pods[name]
        uid = self.facts.pop(name).uid
        self.recorded = tuple(each for each in self.recorded if each.pod_uid != uid)


@dataclass
class Plugged:
    """The parts put together."""

    node: Node
    words: Words
    table: AllocationTable
    starting: PreStart
    following: KubeletPods
    allocating: Allocator
    injector: CdiInjector
    folder: CdiFolder
    tasks: Tasks

    def lease(self, device: KubeletDevice) -> Lease:
        """The lease that stands for a device."""
        (found,) = (each for each in self.node.leases.values() if device in devices_of(each))
        return found

    def holder(self, device: KubeletDevice) -> str:
        """The name of the pod that has it."""
        return pod_of(self.lease(device)).name

    async def admit(self, name: str, *has: KubeletDevice, container: str = "main", uid: str = "") -> None:
        """What the kubelet does with a container: allocates by resource, then shows it."""
        for resource in dict.fromkeys(each.resource for each in has):
            await self.allocating.allocate([[each for each in has if each.resource == resource]])
        self.words.put(name, *has, container=container, uid=uid)

    async def start(self, *asked: KubeletDevice, seconds: float = SECONDS) -> None:
        """The kubelet starts a container."""
        await self.starting.start(asked, seconds)

    def begin(self, asked: Sequence[KubeletDevice], seconds: float = SECONDS) -> asyncio.Task[None]:
        """The same beside the test."""
        return self.node.start(self.starting.start(asked, seconds))


@contextlib.asynccontextmanager
async def plugged(
    folder: Path, gpus: str = "h100-80gb:1", *, has_api: bool = True, words: Words | None = None, **changes: Any
) -> AsyncIterator[Plugged]:
    """A node with these GPUs, or the one of this folder again with `""`; `words` are those of before."""
    async with engine(folder, gpus, **changes) as node:
        words, table, tasks = words or Words(), AllocationTable(), Tasks()
        view = node.manager.snapshot.view
        resources = {each.name: each for each in resources_of(view, Naming())}
        cdi = CdiFolder(folder / "cdi", CDI_KIND, node.host, simulated=True)
        injector = CdiInjector(cdi, resources, lambda: node.manager.snapshot.view, node.manager.access)
        api = words if has_api else None
        starting = PreStart(
            manager=node.manager,
            table=table,
            tasks=tasks,
            kubelet=words,
            recorded=lambda: words.recorded,
            api=api,
            injector=injector,
            resources=resources,
            changed=lambda: None,
        )
        following = KubeletPods(
            manager=node.manager,
            table=table,
            kubelet=words,
            recorded=lambda: words.recorded,
            api=api,
            node="node-1",
            changed=lambda: None,
        )
        allocating = Allocator(node.manager, table, injector.qualified, lambda: None)
        try:
            yield Plugged(node, words, table, starting, following, allocating, injector, cdi, tasks)
        finally:
            starting.close()
            await tasks.end(5.0)
