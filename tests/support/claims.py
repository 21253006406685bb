"""ResourceClaims and ResourceSlices as an API server has them, and the scheduler's rule, for a driver under test."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from placement_bench.allocator import Allocator

from mig_agent.adapters.kubeapi import AllocatedDevice, ClaimFacts, Json, KubeApiError, NodeFacts, PodFacts, PodName
from mig_agent.core.dra.names import DRIVER, pool_name
from mig_agent.core.dra.objects import read_slice
from mig_agent.core.dra.relisting import Relisting
from mig_agent.core.owner import Claim

NODE = "node-1"
NAMESPACE = "team-a"


@dataclass
class ClaimsApi:
    """What the driver asks of an API server, as values: to be changed between two questions."""

    claims: dict[str, ClaimFacts] = field(default_factory=dict)
    """By name, all in one namespace."""
    stored: dict[str, Json] = field(default_factory=dict)
    """Slices by name."""
    drops_counters: bool = False
    """True while its feature gate is off."""
    silent: bool = False
    writes: list[str] = field(default_factory=list)
    """Names of the slices that were written, in order."""

    async def node(self) -> NodeFacts:
        return NodeFacts(name=NODE, uid="uid-of-node")

    async def claim(self, namespace: str, name: str) -> ClaimFacts | None:
        self._answer()
        return self.claims.get(name) if namespace == NAMESPACE else None

    async def slices(self, driver: str) -> tuple[Json, ...]:
        self._answer()
        return tuple(each for each in self.stored.values() if each["spec"]["driver"] == driver)

    async def write_slice(self, body: Json, *, is_new: bool) -> Json:
        self._answer()
        name = body["metadata"]["name"]
        assert is_new == (name not in self.stored)
        stored = json.loads(json.dumps(body))
        if self.drops_counters:
            stored["spec"].pop("sharedCounters", None)
            for each in stored["spec"].get("devices", ()):
                each.pop("consumesCounters")
        self.stored[name] = stored
        self.writes.append(name)
        return dict(stored)

    async def delete_slice(self, name: str) -> None:
        self._answer()
        self.stored.pop(name, None)

    def allocated(self, name: str, *devices: str, driver: str = DRIVER) -> Claim:
        """A claim that the scheduler has given these devices of the node."""
        facts = ClaimFacts(
            namespace=NAMESPACE,
            name=name,
            uid=str(uuid.uuid4()),
            devices=tuple(
                AllocatedDevice(request=f"gpu-{number}", driver=driver, pool=pool_name(NODE), device=each)
                for number, each in enumerate(devices)
            ),
        )
        self.claims[name] = facts
        return Claim(namespace=NAMESPACE, name=name, uid=facts.uid)

    def scheduler(self) -> Allocator:
        """The scheduler's view of what is published, with what claims have."""
        found = Allocator()
        published = [read_slice(each) for each in self.stored.values()]  # type: ignore[arg-type]  # JSON of the driver
        by_name = {device.name: device for each in published for device in each.content.devices}
        mine = [each.device for claim in self.claims.values() for each in claim.devices if each.driver == DRIVER]
        found.allocated = {name: by_name[name] for name in mine}
        found.apply(Relisting(writes=tuple(published)))
        return found

    def _answer(self) -> None:
        if self.silent:
            raise KubeApiError("cannot reach the API server: no answer")


def pods_using(**claims: str) -> Mapping[PodName, PodFacts]:
    """Pods bound to the node, by name, each with the claim that it uses."""
    return {
        (NAMESPACE, name): PodFacts(
            namespace=NAMESPACE, name=name, uid=f"uid-{name}", phase="Pending", node=NODE, claims=(claim,)
        )
        for name, claim in claims.items()
    }
